"""What a tensor is in memory: its dtype's name, its span of bytes, its inner tensors.

Also the one way in which tensors travel inside host state (learning rates held as tensors, a
loader's generator state, an averaged copy in an ``extra``): as leaves of raw bytes.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from .errors import FormatError
from .hoststate import Blob
from .manifest import DTYPE_BYTES

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPE_BYTES if hasattr(torch, name)
}
_GRADIENT = attrgetter("grad")
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the stored name of *dtype*, or "" if it has none (quantised, sub-byte)."""
    return _NAMES.get(dtype, "")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a stored name.

    Raises:
        FormatError: this torch has no such dtype.
    """
    if name not in _DTYPES:
        raise FormatError(f"torch {torch.__version__} has no dtype {name!r}")
    return _DTYPES[name]


def is_uninitialised(tensor: Tensor) -> bool:
    return is_lazy(tensor)  # a plain class: isinstance of a Parameter's runs Python


def inner_tensors(tensor: Tensor) -> dict[str, Tensor] | None:
    """Return attribute -> inner tensor of a wrapper subclass; None for any other tensor."""
    if type(tensor) in (Tensor, Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first element and the bytes to behind the last; (0, 0) if empty."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def compact(tensor: Tensor) -> Tensor:
    """Return the view of *tensor* that has each of its elements in memory once.

    Dimensions of stride 0 (``expand``) shrink to one, so the view can be written to.
    """
    for dim, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and n > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Do the elements fill their span, each byte reached once?"""
    expected = 1
    for n, s in sorted(
        ((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if s != expected:
            return False
        expected = s * n
    return True


def gradient_form(gradient: Tensor) -> int:
    """Return 1 for a dense gradient, one more than its sparse dimensions for a COO one."""
    return 1 + gradient.sparse_dim() if gradient.layout == torch.sparse_coo else 1


def gradient_forms(tensors: list[Tensor]) -> bytes:
    """Return the form of each tensor's gradient; 0 where there is none."""
    gradients = map(_GRADIENT, tensors)
    return bytes([0 if g is None else gradient_form(g) if g.is_sparse else 1 for g in gradients])


def empty_gradient(tensor: Tensor, form: int) -> Tensor:
    """Return a gradient of zeros for *tensor*, of a form that :func:`gradient_form` returned."""
    if form == 1:
        return torch.zeros_like(tensor)
    at = torch.empty((form - 1, 0), dtype=torch.int64, device=tensor.device)
    values = torch.empty((0, *tensor.shape[form - 1 :]), dtype=tensor.dtype, device=tensor.device)
    return torch.sparse_coo_tensor(at, values, tensor.shape, check_invariants=True)


def refuse_storage(tensor: Tensor) -> str:
    """Say why *tensor* cannot be streamed as raw bytes; "" if it can."""
    if tensor.device.type not in ("cpu", "cuda"):
        return f"it is on {tensor.device}: tensors of the cpu and of CUDA devices are streamed"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}"
    if not dtype_name(tensor.dtype):
        return f"its dtype is {tensor.dtype}"
    if type(tensor) not in (Tensor, Parameter) and tensor.numel() > 0 and tensor.data_ptr() == 0:
        return f"its class {type(tensor).__qualname__} has neither bytes nor __tensor_flatten__"
    return ""


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor in logical order as bytes; copies only if it must."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def from_bytes(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a new contiguous tensor with the elements in *data*."""
    flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    if len(data):
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return flat.view(dtype).reshape(shape)


def encode_leaf(value: object) -> Blob | None:
    """Encode a tensor inside host state; declines what is no tensor or has no plain bytes."""
    if type(value) not in (Tensor, Parameter):
        return None
    tensor: Tensor = value  # type: ignore[assignment]
    parts = [tensor]
    meta: dict[str, Any] = {"kind": "tensor", "parts": []}
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        meta["coo"] = {"shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}
    elif tensor.layout != torch.strided:
        return None
    elif not tensor.is_contiguous() and is_dense(tuple(tensor.shape), tensor.stride()):
        meta["stride"] = list(tensor.stride())
    data = bytearray()
    for part in parts:
        if not dtype_name(part.dtype):
            return None
        fields = {"dtype": dtype_name(part.dtype), "shape": list(part.shape), "offset": len(data)}
        meta["parts"].append(fields)
        data += raw_bytes(part)
    if tensor.device.type != "cpu":
        meta["device"] = str(tensor.device)
    if tensor.requires_grad:
        meta["requires_grad"] = True
    if isinstance(tensor, Parameter):
        meta["parameter"] = True
    return Blob(meta, bytes(data))


def decode_leaf(
    meta: dict[str, Any],
    data: memoryview,
    place: Callable[[Tensor, torch.device], Tensor] | None = None,
) -> Tensor:
    """Rebuild a tensor of host state in memory of its own, of the cpu.

    Args:
        place: puts a tensor that was not on the cpu, but on the device that it is told, where it
            is needed; None leaves it on the cpu. What it raises is not about *meta* and *data*.

    Raises:
        FormatError: *meta* and *data* do not fit.
    """
    try:
        tensor = _decoded(meta, data)
        requires_grad = bool(meta.get("requires_grad", False))
        device = torch.device(str(meta.get("device", "cpu")))
        if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise FormatError(f"a gradient for a tensor of {tensor.dtype}")
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise FormatError(f"a tensor inside host state cannot be read: {error}") from error
    if place is not None and device.type != "cpu":
        tensor = place(tensor, device)
    if meta.get("parameter"):
        return Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _decoded(meta: dict[str, Any], data: memoryview) -> Tensor:
    parts = []
    for part in meta["parts"]:
        dtype, shape = dtype_of(part["dtype"]), tuple(int(n) for n in part["shape"])
        size = torch.Size(shape).numel() * DTYPE_BYTES[part["dtype"]]
        start = int(part["offset"])
        if min(shape, default=0) < 0 or not 0 <= start <= start + size <= len(data):
            raise FormatError(f"a tensor of {size} bytes in a leaf of {len(data)}")
        parts.append(from_bytes(data[start : start + size], dtype, shape))
    tensor = parts[0]
    if "coo" in meta:
        shape = tuple(int(n) for n in meta["coo"]["shape"])
        tensor = torch.sparse_coo_tensor(parts[0], parts[1], shape, check_invariants=True)
        return tensor._coalesced_(bool(meta["coo"]["coalesced"]))
    if "stride" in meta:
        stride = [int(n) for n in meta["stride"]]
        if len(stride) != tensor.dim() or not is_dense(tuple(tensor.shape), tuple(stride)):
            raise FormatError(f"strides {stride} for the shape {tuple(tensor.shape)}")
        made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="cpu")
        return made.copy_(tensor)
    return tensor
