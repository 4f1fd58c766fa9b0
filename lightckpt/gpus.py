"""GPUs, as torch knows them: which one a tensor is on, and the stream that its work is given to.

All that the package asks of ``torch.cuda`` about tensors is here. Ordinals count as CUDA does in
this process; ``HOST`` stands for memory of the host.

To look into a tensor on a GPU is to wait until the GPU is through with all that it was given. What
does that says so; at the boundaries and guards of a run that has settled nothing does.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

HOST = -1


def ordinal_of(tensor: Tensor) -> int:
    """Return the GPU that *tensor* is on, or ``HOST``."""
    return tensor.device.index if tensor.device.type == "cuda" else HOST


def current_stream(ordinal: int) -> int:
    """Return the CUDA stream that the calling thread's work on a GPU goes to."""
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def is_capturing() -> bool:
    """Is what the calling thread gives its stream recorded into a CUDA graph, instead of run?"""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def is_pinned(tensor: Tensor) -> bool:
    """May a GPU still be copying into *tensor*, of the host, when torch returns?"""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(used) and ordinal_of(tensor) == HOST and tensor.is_pinned()


def synchronize(ordinals: Iterable[int]) -> None:
    """Wait for what the calling thread has given to its current stream of each GPU in use.

    Those are *ordinals*, and all that have a context. Any other would be given one by being waited
    for, which takes half a gigabyte of its memory.
    """
    in_use = set(ordinals) - {HOST}
    in_use |= {ordinal for ordinal in range(torch.cuda.device_count()) if has_context(ordinal)}
    for ordinal in sorted(in_use):
        torch.cuda.current_stream(ordinal).synchronize()


def has_context(ordinal: int) -> bool:
    """Has a GPU been used by this process, by torch or anybody else?"""
    return bool(torch._C._cuda_hasPrimaryContext(ordinal))  # type: ignore[attr-defined]


def packed(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor on a GPU in logical order, as bytes on it; nobody waits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def are_nonzero(tensors: Sequence[Tensor]) -> Tensor:
    """Find for each of *tensors*, of one device, whether it is not all zero, there."""
    with torch.no_grad():
        # Sums of magnitudes: nothing cancels out, an overflow is infinite, and NaN is no zero.
        return torch.stack(torch._foreach_norm(list(tensors), 1)) != 0


class Answer:
    """The same, on its way to the host, once the device has got to it. Nobody waits for it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        found = are_nonzero(tensors)
        self._here, self._copied = found, None  # no event: it is there
        if found.device.type == "cuda":
            # Into pinned memory, since torch waits for a copy into any other.
            self._here = torch.empty(len(tensors), dtype=torch.bool, pin_memory=True, device="cpu")
            self._here.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(found.device))

    def get(self) -> list[bool] | None:
        """Return what was found, or None while the device has not got there."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        return self._here.tolist()


def memory_of(ordinal: int) -> tuple[int, int]:
    """Return the bytes of a GPU's memory that nobody has, torch's pool neither, and all of it."""
    free, total = torch.cuda.mem_get_info(ordinal)
    return free, total


def some_device() -> torch.device:
    """Return the device for state that was on a GPU, where no tensor of the run says which."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
