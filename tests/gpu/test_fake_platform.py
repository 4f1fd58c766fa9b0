"""The fake platform's own rules. Goal: what a real device does not let pass, it does not either:
host code that touches a device's memory is found, so is a copy that outlives its memory, and runs
are right under all that a driver may do. Method: mistakes made on purpose, and whole runs.
"""

import ctypes
import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import lightckpt
from gpu_run import Run, same, states_of, stored
from platforms import Options

# A run whose tensors are taken for the host's: workers read at their addresses.
MISTAKEN_RUN = """
import os, sys
from pytest import MonkeyPatch
from gpu_run import Run
from lightckpt import gpus
from platforms import Fake
platform = Fake(os.environ["LIGHTCKPT_FAKE_CUDA"], MonkeyPatch())
gpus.ordinal_of = lambda tensor: gpus.HOST
run = Run(platform, sys.argv[1])
print("made", flush=True)
run.train(1)
run.checkpointer.wait()
"""


def test_torch_alone_gets_at_a_device_s_bytes(fake):
    values = torch.arange(12.0).reshape(3, 4)
    tensor = fake().tensor(values)
    assert torch.equal(tensor + 1, values + 1)
    for as_array in (torch.Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="in a device's memory"):
            as_array(tensor)
    assert np.array_equal(tensor.cpu().numpy(), values.numpy())
    assert tensor.cpu().data_ptr() != tensor.data_ptr()


def test_at_a_device_s_address_the_host_finds_nothing(fake):
    tensor = fake().tensor(torch.arange(12.0))
    row = tensor.reshape(3, 4)[2]
    assert row.data_ptr() == tensor.data_ptr() + 8 * 4
    assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = os.pipe()
    for address, written in ((torch.zeros(1).data_ptr(), 1), (row.data_ptr(), -1)):
        # What the kernel cannot read for us would end this process by SIGSEGV.
        assert libc.write(target, ctypes.c_void_p(address), ctypes.c_size_t(1)) == written
    assert ctypes.get_errno() == errno.EFAULT
    os.close(source)
    os.close(target)


def test_a_core_that_takes_a_device_s_memory_for_the_host_s_ends(fake, path):
    fake()
    command = [sys.executable, "-c", MISTAKEN_RUN, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert done.stdout == "made\n", done.stderr
    assert done.returncode == -signal.SIGSEGV or "SEGV" in done.stderr, done.stderr


def test_a_copy_that_outlives_its_memory_is_found_at_the_end(fake):
    platform = fake()
    lib, size = platform.lib, ctypes.c_size_t(4096)
    device, pinned = ctypes.c_uint64(), ctypes.c_uint64()
    assert lib.cuMemAlloc_v2(ctypes.byref(device), size) == 0
    assert lib.cuMemHostAlloc(ctypes.byref(pinned), size, 1) == 0
    lib.fake_cuda_gate(ctypes.c_uint64(platform.stream))
    assert lib.cuMemcpyDtoHAsync_v2(pinned, device, size, ctypes.c_uint64(platform.stream)) == 0
    assert lib.cuMemFreeHost(pinned) == 0
    assert lib.fake_cuda_misuse() == b""
    with pytest.raises(AssertionError, match="memory of a copy went"):
        platform.finish()
    lib.fake_cuda_reset(ctypes.byref(Options(seed=1, devices=1)))


def test_a_tensor_of_a_device_among_the_host_state_is_copied_to_the_host_first(fake, path):
    platform = fake()
    run = Run(platform, path)
    run.optimizer.param_groups[0]["lr"] = platform.tensor(torch.tensor([0.25, 0.5]))
    run.train(2)
    run.checkpointer.wait()
    run.checkpointer.close()
    [group] = lightckpt.load(path)["optimizer"]["param_groups"]
    assert group["lr"].tolist() == [0.25, 0.5]


@pytest.mark.parametrize("way", ["auto", "device"])
def test_runs_are_right_where_a_driver_waits(fake, path, way):
    platform = fake()
    platform.set_rules(memory_waits=1, pageable_blocks=1)
    expected = states_of(platform, 6)
    run = Run(platform, path, snapshot=way, staging=1)
    for step in (3, 6):
        run.train(3)
        assert run.checkpointer.wait() == step
        assert same(stored(path)[1], expected[step])
    assert run.checkpointer.stats.dropped == 0
    run.checkpointer.close()
