"""Where the tests of GPUs run: on a real one, or on tests/fake_cuda, whose memory is the host's.

A platform has tensors on device 0, gives the device work, and holds it up so that a test sees what
does not wait for it. On the fake one torch knows nothing of a device: its tensors are those of the
cpu that pass for a device's (device_memory), ``lightckpt.gpus`` is told so, and "kernels" are numpy
calls that the fake stream makes late. They move no version counters; whoever enqueues one does, as
torch does when it gives a kernel to a stream.
"""

import ctypes
from contextlib import contextmanager

import numpy as np
import torch

from device_memory import DeviceMemory
from lightckpt import gpus

LR, DECAY = 0.1, 0.9


class Options(ctypes.Structure):
    """The start of FakeCudaOptions, see tests/fake_cuda/fake_cuda.h."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("delay_us_max", ctypes.c_uint32),
        ("devices", ctypes.c_int32),
        ("refuse_registration", ctypes.c_int32),
        ("pop_fails_late", ctypes.c_int32),
        ("copies_singly", ctypes.c_int32),
        ("ignore_waits", ctypes.c_int32),
    ]


class Rules(ctypes.Structure):
    """FakeCudaRules: what the driver does although by itself it does not."""

    _fields_ = [
        ("memory_waits", ctypes.c_int32),
        ("pageable_blocks", ctypes.c_int32),
        ("any_address", ctypes.c_int32),
    ]


class Counters(ctypes.Structure):
    """FakeCudaCounters."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "contexts", "streams", "events", "device_allocations", "host_allocations",
            "registrations", "copies", "unregistered_copies", "misuses", "broken_captures", "depth",
            "capture_mode", "highest_priority",
        )
    ]  # fmt: skip


class Fake:
    """A fake driver that has done nothing."""

    real = False
    name = "fake"

    def __init__(self, library, monkeypatch, **options):
        self.lib = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self.lib.fake_cuda_stream.restype = ctypes.c_uint64
        self.lib.fake_cuda_gate.restype = ctypes.c_uint64
        self.lib.fake_cuda_misuse.restype = ctypes.c_char_p
        chosen = {"seed": 1, "delay_us_max": 50, "devices": 1, **options}
        self.lib.fake_cuda_reset(ctypes.byref(Options(**chosen)))
        assert self.lib.cuInit(0) == 0
        self.lib.fake_cuda_set_device(0)
        self.stream = self.lib.fake_cuda_stream(0)
        self.capturing = False
        self._kernels = []
        self._memory = DeviceMemory(self.lib, monkeypatch)
        monkeypatch.setattr(gpus, "ordinal_of", self._memory.ordinal_of)
        monkeypatch.setattr(gpus, "current_stream", lambda ordinal: self.stream)
        monkeypatch.setattr(gpus, "memory_of", lambda ordinal: (16 << 30, 16 << 30))
        monkeypatch.setattr(gpus, "is_capturing", lambda: self.capturing)

    def set_rules(self, **rules):
        self.lib.fake_cuda_rules(ctypes.byref(Rules(**rules)))

    def tensor(self, values):
        """Return a copy of *values* on the device."""
        return self._memory.tensor(values)

    def launch(self, kernel):
        """Give the stream a function to run."""
        self._kernels.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: kernel()))
        self.lib.fake_cuda_enqueue(ctypes.c_uint64(self.stream), self._kernels[-1], None)

    def update(self, parameter, momentum, step):
        """Give the stream an update of SGD with momentum; the gradient is made up."""
        torch.autograd.graph.increment_version([parameter, momentum])
        p, m = map(self._memory.kernel_view, (parameter, momentum))

        def kernel():
            m[...] = m * np.float32(DECAY) + (p * np.float32(0.01) + np.float32(step * 0.001))
            p[...] -= np.float32(LR) * m

        self.launch(kernel)

    def add(self, tensor, value, *, counted=True):
        if counted:
            torch.autograd.graph.increment_version([tensor])
        array = self._memory.kernel_view(tensor)
        self.launch(lambda: np.add(array, np.float32(value), out=array))

    @contextmanager
    def held_up(self):
        """The stream stands still within."""
        gate = self.lib.fake_cuda_gate(ctypes.c_uint64(self.stream))
        try:
            yield
        finally:
            self.lib.fake_cuda_open(ctypes.c_uint64(gate))

    def other_stream(self):
        """Let current work go to another stream from now on, after what this one has."""
        self.synchronize()
        self.stream = self.lib.fake_cuda_stream(0)

    def synchronize(self):
        self.lib.fake_cuda_settle()

    @contextmanager
    def capture(self):
        """Record a graph within; yields the list of what is called to replay it."""
        replays, launch = [], self.launch
        self.capturing, self.launch = True, replays.append
        self.lib.fake_cuda_capture(ctypes.c_uint64(self.stream), 1)
        try:
            yield replays
        finally:
            self.lib.fake_cuda_capture(ctypes.c_uint64(self.stream), 0)
            self.capturing, self.launch = False, launch

    def replay(self, replays):
        for kernel in replays:
            self.launch(kernel)

    def finish(self):
        """Check that the driver was used as CUDA asks, also by what is still queued."""
        counters = Counters()
        self.lib.fake_cuda_finish()
        self.lib.fake_cuda_counters(ctypes.byref(counters))
        words = self.lib.fake_cuda_misuse().decode()
        assert not words, words
        assert counters.unregistered_copies == counters.broken_captures == 0


class Real:
    """Device 0 of this machine, and torch's own kernels."""

    real = True
    name = "real"

    def __init__(self):
        self.device = torch.device("cuda:0")
        torch.cuda.set_device(0)

    def tensor(self, values):
        return values.to(self.device)

    @torch.no_grad()
    def update(self, parameter, momentum, step):
        momentum.mul_(DECAY).add_(parameter * 0.01 + step * 0.001)
        parameter.sub_(LR * momentum)

    @torch.no_grad()
    def add(self, tensor, value, *, counted=True):
        (tensor if counted else tensor.data).add_(value)

    @contextmanager
    def held_up(self):
        torch.cuda._sleep(1_000_000_000)  # half a second or so
        event = torch.cuda.Event()
        event.record()
        yield
        assert not event.query(), "the host waited for the stream"

    def other_stream(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)

    def synchronize(self):
        torch.cuda.synchronize()

    @contextmanager
    def capture(self):
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph

    def replay(self, graph):
        graph.replay()

    def finish(self):
        self.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())
