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
_tensor_ptr, _storage_ptr = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
_numpy, _cpu = torch.Tensor.numpy, torch.Tensor.cpu


def _data_ptr(tensor):
    """Return the host's address; torch itself takes the way around that is made here for others."""
    with torch._C.DisableTorchFunction():
        return _tensor_ptr(tensor)


class DeviceMemory:
    """What of the fake driver's memory tensors lie in."""

    def __init__(self, library, monkeypatch):
        self._lib = library
        self._lib.fake_cuda_memory.restype = ctypes.c_void_p
        # By the host's address: (device's address, bytes, ordinal).
        self._begins, self._places = [], []
        self.waits = []  # calls here that make the host wait for the device
        seen = self._seen

        def numpy(tensor, *, force=False):
            if self.ordinal_of(tensor) == gpus.HOST:
                return _numpy(tensor, force=force)
            if not force:
                raise TypeError("numpy() of a tensor in a device's memory: take its cpu() first")
            return _numpy(tensor.detach().cpu())

        def cpu(tensor, *args, **kwargs):
            if self.ordinal_of(tensor) == gpus.HOST:
                return _cpu(tensor, *args, **kwargs)
            self.waits.append("cpu")
            with torch._C.DisableTorchFunction():
                return tensor.clone()

        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda one: seen(_data_ptr(one)))
        monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda one: seen(_storage_ptr(one)))
        monkeypatch.setattr(torch.Tensor, "numpy", numpy)
        monkeypatch.setattr(torch.Tensor, "cpu", cpu)

    def tensor(self, values, ordinal=0):
        """Return a copy of *values* in memory of a device."""
        device, size = ctypes.c_uint64(), max(1, values.nbytes)
        self._lib.fake_cuda_set_device(ordinal)
        assert self._lib.cuMemAlloc_v2(ctypes.byref(device), ctypes.c_size_t(size)) == 0
        self._lib.fake_cuda_set_device(0)
        host = self._lib.fake_cuda_memory(device)
        at = bisect.bisect(self._begins, host)
        self._begins.insert(at, host)
        self._places.insert(at, (device.value, size, ordinal))
        memory = (ctypes.c_byte * size).from_address(host)
        flat = torch.frombuffer(memory, dtype=values.dtype, count=values.numel())
        return flat.view(values.shape).copy_(values)

    def ordinal_of(self, tensor):
        """Return the device that a tensor is on, as ``gpus.ordinal_of`` does."""
        place = self._place_of(_data_ptr(tensor)) if tensor.layout == torch.strided else None
        return gpus.HOST if place is None else place[1]

    def kernel_view(self, tensor):
        """Return the bytes of a tensor of the device, for what stands for a kernel."""
        with torch._C.DisableTorchFunction():
            return _numpy(tensor.detach())

    def _seen(self, host):
        """Return the address under which all but torch know of one of the host's."""
        place = self._place_of(host)
        return host if place is None else place[0]

    def _place_of(self, host):
        """Return the device's address of one of the host's, and the device; None if it has none."""
        at = bisect.bisect(self._begins, host) - 1
        if at < 0:
            return None
        device, size, ordinal = self._places[at]
        offset = host - self._begins[at]
        return (device + offset, ordinal) if offset < size else None
