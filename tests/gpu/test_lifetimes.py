"""Memory that a GPU copies. Goal: while a copy is under way its memory is there, whatever became of
the version, and not for longer. Method: a version is given up while the GPU stands at a gate, and
the run lets go of a tensor of it.
"""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gate import until
from gpu_run import Run, same, stored
from lightckpt import CheckpointError, CheckpointWarning
from lightckpt._core import Store


@pytest.mark.parametrize("way", ["direct", "host", "device"])
def test_a_dropped_version_keeps_its_tensors_until_the_device_is_through(
    fake, path, way, monkeypatch
):
    platform = fake()
    run = Run(platform, path, snapshot=way, on_error="warn")
    run.model.register_buffer("still", platform.tensor(torch.ones(1000)))  # no kernel holds it
    run.train(4)
    run.checkpointer.wait()
    old = StorageWeakRef(run.model.still.untyped_storage())
    monkeypatch.setattr(Store.drop, "__defaults__", (0.01,))  # which has to pass: the device stands
    with platform.held_up():
        run.train(1)
        with pytest.warns(CheckpointWarning, match="step 5 has no version: a CUDA graph"):
            with platform.capture():
                run.optimizer.step()
        run.model.still = platform.tensor(torch.zeros(1000))
        with pytest.warns(CheckpointWarning, match="a checkpoint failed"):
            run.checkpointer.mark()  # the structure follows, but the area is not free yet
        gc.collect()
        assert not old.expired()

    def is_let_go():
        run.checkpointer.mark()
        gc.collect()
        return old.expired()

    platform.synchronize()
    with pytest.raises(CheckpointError):  # of the version that could not be begun
        run.checkpointer.wait()
    until(is_let_go, "end of the copies of a dropped version")
    expected = run.state()
    run.checkpointer.wait()
    assert same(stored(path)[1], expected)
    run.checkpointer.close()
