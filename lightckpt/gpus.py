"""GPUs, as torch knows them: which one a tensor is on, and the stream that its work is given to.

All that the package asks of ``torch.cuda`` about tensors is here. Ordinals count as CUDA does in
this process; ``HOST`` stands for memory of the host.
"""

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


def synchronize() -> None:
    """Wait for what the calling thread has given to its current stream of each GPU."""
    for ordinal in range(torch.cuda.device_count()):
        torch.cuda.current_stream(ordinal).synchronize()


def memory_of(ordinal: int) -> tuple[int, int]:
    """Return the bytes of a GPU's memory that nobody has, torch's pool neither, and all of it."""
    free, total = torch.cuda.mem_get_info(ordinal)
    return free, total


def some_device() -> torch.device:
    """Return the device for state that was on a GPU, where no tensor of the run says which."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
