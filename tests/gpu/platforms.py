"""Where the tests of GPUs run: on a real one, or on tests/fake_cuda, whose memory is the host's.

A platform has tensors on device 0, or another, gives the device work, holds it up so that a test
sees what does not wait for it, and notes where the host waits all the same. On the fake one torch
knows nothing of a device: its tensors are those of the cpu that pass for a device's
(device_memory), ``lightckpt.gpus`` is told so, and "kernels" are numpy calls that the fake stream
makes late. They move no version counters; whoever enqueues one does, as torch does when it gives a
kernel to a stream.
"""

import ctypes
import warnings
from contextlib import contextmanager

import numpy as np
import torch

from device_memory import DeviceMemory
from host_waits import HostWaits
from lightckpt import gpus

LR, DECAY = 0.1, 0.9
_are_nonzero, _Answer = gpus.are_nonzero, gpus.Answer  # as they are where there is no platform


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
        self.devices = chosen["devices"]
        self.stream, *self._others = map(self.lib.fake_cuda_stream, range(self.devices))
        self.capturing = False
        self._kernels = []
        self._memory = DeviceMemory(self.lib, monkeypatch)
        monkeypatch.setattr(gpus, "ordinal_of", self._memory.ordinal_of)
        monkeypatch.setattr(gpus, "current_stream", self._stream_of)
        monkeypatch.setattr(gpus, "packed", self._packed)
        monkeypatch.setattr(gpus, "are_nonzero", self._are_nonzero)
        monkeypatch.setattr(gpus, "Answer", self._answer)
        monkeypatch.setattr(gpus, "memory_of", lambda ordinal: (16 << 30, 16 << 30))
        monkeypatch.setattr(gpus, "is_capturing", lambda: self.capturing)

    def set_rules(self, **rules):
        self.lib.fake_cuda_rules(ctypes.byref(Rules(**rules)))

    def tensor(self, values, ordinal=0):
        """Return a copy of *values* on a device."""
        return self._memory.tensor(values, ordinal)

    def zeros_like(self, tensor):
        return self.tensor(torch.zeros(tensor.shape), gpus.ordinal_of(tensor))

    def _stream_of(self, ordinal):
        return self._others[ordinal - 1] if ordinal > 0 else self.stream

    def launch(self, kernel, ordinal=0):
        """Give the device's stream a function to run."""
        self._kernels.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: kernel()))
        stream = ctypes.c_uint64(self._stream_of(ordinal))
        self.lib.fake_cuda_enqueue(stream, self._kernels[-1], None)

    def update(self, parameter, momentum, step):
        """Give the stream an update of SGD with momentum; the gradient is made up."""
        torch.autograd.graph.increment_version([parameter, momentum])
        p, m = map(self._memory.kernel_view, (parameter, momentum))

        def kernel():
            m[...] = m * np.float32(DECAY) + (p * np.float32(0.01) + np.float32(step * 0.001))
            p[...] -= np.float32(LR) * m

        self.launch(kernel, gpus.ordinal_of(parameter))

    def add(self, tensor, value, *, counted=True):
        if counted:
            torch.autograd.graph.increment_version([tensor])
        array = self._memory.kernel_view(tensor)
        self.launch(lambda: np.add(array, np.float32(value), out=array), gpus.ordinal_of(tensor))

    def _packed(self, tensor):
        source, ordinal = self._memory.kernel_view(tensor), gpus.ordinal_of(tensor)
        packed = self.tensor(torch.zeros(source.nbytes, dtype=torch.uint8), ordinal)
        target = self._memory.kernel_view(packed).view(source.dtype).reshape(source.shape)
        self.launch(lambda: np.copyto(target, source), ordinal)
        return packed

    def _are_nonzero(self, tensors):
        self.synchronize()  # kernels here are late, and torch's calls are not
        return _are_nonzero(tensors)

    def _answer(self, tensors):
        on_host = gpus.ordinal_of(tensors[0]) == gpus.HOST
        return _Answer(tensors) if on_host else FakeAnswer(self, tensors, self._memory.kernel_view)

    @contextmanager
    def waits(self):
        """Yields a list, of what makes the host wait for a device within."""
        with HostWaits(lambda tensor: self._memory.ordinal_of(tensor) != gpus.HOST) as waits:
            self._memory.waits = waits.calls
            yield waits.calls
        self._memory.waits = []

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
        self.capturing, self.launch = True, lambda *kernel: replays.append(kernel)
        self.lib.fake_cuda_capture(ctypes.c_uint64(self.stream), 1)
        try:
            yield replays
        finally:
            self.lib.fake_cuda_capture(ctypes.c_uint64(self.stream), 0)
            self.capturing, self.launch = False, launch

    def replay(self, replays):
        for kernel in replays:
            self.launch(*kernel)

    def finish(self):
        """Check that the driver was used as CUDA asks, also by what is still queued."""
        counters = Counters()
        self.lib.fake_cuda_finish()
        self.lib.fake_cuda_counters(ctypes.byref(counters))
        words = self.lib.fake_cuda_misuse().decode()
        assert not words, words
        assert counters.unregistered_copies == counters.broken_captures == 0


class FakeAnswer:
    """``gpus.Answer`` of a fake device: a kernel finds it."""

    def __init__(self, platform, tensors, view):
        self._found = None
        arrays = list(map(view, tensors))
        platform.launch(lambda: self._find(arrays), gpus.ordinal_of(tensors[0]))

    def _find(self, arrays):
        self._found = [bool(array.any()) for array in arrays]

    def get(self):
        return self._found


class Real:
    """The devices of this machine, and torch's own kernels."""

    real = True
    name = "real"

    def __init__(self):
        self.devices = torch.cuda.device_count()
        torch.cuda.set_device(0)

    def tensor(self, values, ordinal=0):
        return values.to(torch.device("cuda", ordinal))

    def zeros_like(self, tensor):
        return torch.zeros_like(tensor, requires_grad=False)

    @torch.no_grad()
    def update(self, parameter, momentum, step):
        momentum.mul_(DECAY).add_(parameter * 0.01 + step * 0.001)
        parameter.sub_(LR * momentum)

    @torch.no_grad()
    def add(self, tensor, value, *, counted=True):
        (tensor if counted else tensor.data).add_(value)

    @contextmanager
    def held_up(self):
        torch.cuda._sleep(2_000_000_000)  # a second or so
        event = torch.cuda.Event()
        event.record()
        yield
        assert not event.query(), "the host waited for the stream"

    def other_stream(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)

    def synchronize(self):
        for ordinal in range(self.devices):
            torch.cuda.synchronize(ordinal)

    @contextmanager
    def waits(self):
        """Yields a list, of what makes the host wait for a device within; there at the end."""
        calls = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield calls
            finally:
                torch.cuda.set_sync_debug_mode("default")
        noted = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
        calls += [f"{one.filename}:{one.lineno}" for one in noted]

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
