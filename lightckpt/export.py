"""Export: a version as a file that other programs read, whole or not at all.

``.pt`` takes everything that ``load`` returns, ``.safetensors`` the weights: the models' tensors
under their own names (``<model>.<name>`` where several were saved), loose tensors under
``tensors.<name>``, and the step as metadata. What has no place in the format is refused by name.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .copies import fresh_file
from .errors import StructureError
from .loading import load


def export(
    path: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    step: int | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Write a version of the store at *path* to *dest*, in the format of its suffix; return *dest*.

    A file that is there is replaced, once the new one is whole. In a ``.pt`` file numpy arrays
    become tensors, so that ``torch.load`` reads it with ``weights_only=True`` if the rest is plain.

    Raises:
        ValueError: the suffix is none of ``.pt``, ``.pth`` and ``.safetensors``.
        ModuleNotFoundError: safetensors is not installed.
        StructureError: something has no place in the format; the message names it.
        CheckpointError: as ``load``.
    """
    target = Path(dest)
    write = _WRITERS.get(target.suffix)
    if write is None:
        raise ValueError(f"{target} ends in {target.suffix!r}; it must be one of {[*_WRITERS]}")
    if target.exists() and os.path.samefile(path, target):
        raise ValueError(f"{target} is the store itself")
    with fresh_file(target, replace=True) as part:
        write(load(path, step, allow_pickle=allow_pickle), part)
    return target


def _write_torch(state: dict[str, Any], part: Path) -> None:
    torch.save(_plain(state), part)


def _plain(value: Any) -> Any:
    """Return *value* with numpy's arrays as tensors and its scalars as Python's."""
    kind = type(value)
    if kind is dict:
        return {key: _plain(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(_plain(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    if kind is np.ndarray:
        try:
            return torch.from_numpy(value)
        except TypeError:
            return value  # no dtype of torch's: strings, dates, records
    return value


def _write_safetensors(state: dict[str, Any], part: Path) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("no safetensors: pip install safetensors") from error
    tensors = weights_of(state)
    mode = part.stat().st_mode
    try:
        save_file(tensors, part, metadata={"format": "pt", "step": str(state["step"])})
    except (SafetensorError, KeyError, ValueError) as error:
        raise StructureError(f"safetensors cannot hold this state: {error!r}") from error
    part.chmod(mode)  # the library puts a file of its own there, for its owner only


def weights_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights in the state dict *state* under flat names, each in memory of its own.

    Raises:
        StructureError: two have the same name, or one is no plain tensor.
    """
    weights: dict[str, Tensor] = {}
    taken: set[int] = set()
    named = dict(_named(state))
    for name, value in state["tensors"].items():
        if (full := f"tensors.{name}") in named:
            raise StructureError(f"{full} names a loose tensor and one of the model: export to .pt")
        named[full] = value
    for name, value in named.items():
        lazy = isinstance(value, UninitializedParameter | UninitializedBuffer)
        if not isinstance(value, Tensor) or lazy or value.layout != torch.strided:
            raise StructureError(f"{name} is no plain tensor, as safetensors needs: export to .pt")
        dense = value.resolve_conj().resolve_neg().contiguous()
        storage = dense.untyped_storage()
        # The format holds no two names for the same bytes: tied weights are written twice.
        if dense.numel() and (storage.nbytes() != dense.nbytes or storage.data_ptr() in taken):
            dense = dense.clone()
        taken.add(storage.data_ptr())
        weights[name] = dense
    return weights


def _named(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    models = state["model"]
    by_name = models.keys() == state["modes"].keys()
    if not by_name or not all(isinstance(model, dict) for model in models.values()):
        yield from models.items()
        return
    for name, model in models.items():
        yield from ((f"{name}.{key}", value) for key, value in model.items())


_WRITERS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    ".pt": _write_torch,
    ".pth": _write_torch,
    ".safetensors": _write_safetensors,
}
