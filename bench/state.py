"""A training state as bytes: how many there are, whether two are the same, and how to spoil one."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def leaves(state: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of everything in *state* that is no dict."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*at, str(key)))
    else:
        yield at, state


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of *state* by path, each storage once (tied weights have two names)."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, int, int]] = set()
    for path, value in leaves(state):
        if isinstance(value, Tensor):
            where = (value.data_ptr(), value.storage_offset(), value.numel())
            if value.numel() == 0 or where not in seen:
                seen.add(where)
                found["/".join(path)] = value
    return found


def state_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of the tensors of *state*, each storage once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state).values())


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _tensor_digest(tensor: Tensor) -> bytes:
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hashed.update(_bytes_of(tensor))
    return hashed.digest()


def digest(state: dict[str, Any]) -> str:
    """Return a digest of *state*: all tensors' bytes, all else by its words, in order of path."""
    tensors = tensors_of(state)
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        found = dict(zip(names, pool.map(_tensor_digest, map(tensors.get, names)), strict=True))
    whole = hashlib.sha256()
    others = {
        "/".join(path): value for path, value in leaves(state) if not isinstance(value, Tensor)
    }
    for name in names:
        whole.update(name.encode() + found[name])
    for name in sorted(others):
        # As JSON, which knows no tuples: what went through it trains the same.
        whole.update(f"{name} {json.dumps(others[name], default=repr)}".encode())
    return whole.hexdigest()


def scramble(state: dict[str, Any]) -> None:
    """Overwrite the tensors of *state*, but for the generator's, which takes only its own kind."""
    with torch.no_grad():
        for name, tensor in tensors_of(state).items():
            if name != "random":
                tensor.zero_()
