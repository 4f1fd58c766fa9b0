"""Device memory on the fake platform: tensors of the cpu that pass for a device's.

Torch works on their bytes, as it would on a real device. For all others the bytes are not there,
as they are not on a real one: a tensor's address is that of the fake driver's memory, at which the
host finds nothing, so whoever reads or writes there ends by SIGSEGV, and ``numpy()`` raises.
"""

import bisect
import ctypes

import torch

from lightckpt import gpus

# As they are where no platform has been made.
_data_ptr, _storage_ptr = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
_numpy, _cpu = torch.Tensor.numpy, torch.Tensor.cpu


class DeviceMemory:
    """What of the fake driver's memory tensors lie in."""

    def __init__(self, library, monkeypatch):
        self._lib = library
        self._lib.fake_cuda_memory.restype = ctypes.c_void_p
        self._begins, self._places = [], []  # by the host's address: (device's address, bytes)
        seen = self._seen

        def numpy(tensor, *, force=False):
            if self.ordinal_of(tensor) == gpus.HOST:
                return _numpy(tensor, force=force)
            if not force:
                raise TypeError("numpy() of a tensor in a device's memory: take its cpu() first")
            return _numpy(tensor.detach().cpu())

        def cpu(tensor, *args, **kwargs):
            on_host = self.ordinal_of(tensor) == gpus.HOST
            return _cpu(tensor, *args, **kwargs) if on_host else tensor.clone()

        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda one: seen(_data_ptr(one)))
        monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda one: seen(_storage_ptr(one)))
        monkeypatch.setattr(torch.Tensor, "numpy", numpy)
        monkeypatch.setattr(torch.Tensor, "cpu", cpu)

    def tensor(self, values):
        """Return a copy of *values* in memory of the device."""
        device, size = ctypes.c_uint64(), max(1, values.nbytes)
        assert self._lib.cuMemAlloc_v2(ctypes.byref(device), ctypes.c_size_t(size)) == 0
        host = self._lib.fake_cuda_memory(device)
        at = bisect.bisect(self._begins, host)
        self._begins.insert(at, host)
        self._places.insert(at, (device.value, size))
        memory = (ctypes.c_byte * size).from_address(host)
        flat = torch.frombuffer(memory, dtype=values.dtype, count=values.numel())
        return flat.view(values.shape).copy_(values)

    def ordinal_of(self, tensor):
        """Return 0 for a tensor of the device, as ``gpus.ordinal_of`` does."""
        if tensor.layout != torch.strided:
            return gpus.HOST
        host = _data_ptr(tensor)
        return gpus.HOST if self._seen(host) == host else 0

    def kernel_view(self, tensor):
        """Return the bytes of a tensor of the device, for what stands for a kernel."""
        return _numpy(tensor.detach())

    def _seen(self, host):
        """Return the address under which all but torch know of one of the host's."""
        at = bisect.bisect(self._begins, host) - 1
        if at < 0:
            return host
        device, size = self._places[at]
        offset = host - self._begins[at]
        return device + offset if offset < size else host
