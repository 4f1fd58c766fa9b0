"""Remake: bring a run's structure to what it was, so that bytes have a place to go.

A fresh run lacks what appears in training: optimizer state, param groups of layers that were
unfrozen, parameters of lazy modules, buffers that were empty, gradients. Objects that others hold
on to (group dicts, learning rates held as tensors, state tensors that fit) are kept and changed in
place. Nothing is read from the media here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .capture import Run
from .errors import StructureError
from .manifest import Manifest, Path, TensorEntry, name_of
from .names import empty_buffers, held_tensors, named_modules
from .tensors import dtype_of, inner_tensors, is_uninitialised

# Kinds of tensors that a fresh run need not have.
MADE = ("state", "shared", "grad")


def remake(manifest: Manifest, host: dict[str, Any], run: Run, places: dict[Path, Tensor]) -> None:
    """Make *run* hold every tensor of *manifest*; *places* gets those that it lacked."""
    _set_buffers(manifest, run, places)
    _materialise(manifest, places)
    _set_flags(manifest, host, run, places)
    for name, optimizer in run.optimizers.items():
        _set_groups(optimizer, manifest.groups[name], host["groups"][name], places)
    _make_state(manifest, host, run, places)


def fill_loose(host: dict[str, Any], run: Run, places: dict[Path, Tensor]) -> None:
    """Set the tensors that have no bytes of their own in a version (sparse ones)."""
    for path, saved in host["loose"]:
        kind, *rest = path
        if kind == "grad":
            places[tuple(rest)].grad = saved
        elif kind == "state":
            run.optimizers[rest[0]].state[places[tuple(rest[2:])]][rest[1]] = saved
        elif kind == "shared":
            shared: dict[Any, Any] = run.optimizers[rest[0]].state
            shared[rest[1]] = saved
        else:
            places[tuple(path)].copy_(saved)


def fillable(manifest: Manifest, run: Run) -> tuple[set[Path], set[Path]]:
    """Return the buffers that *run* has empty and the store has not, and the other way round."""
    empty: set[Path] = {
        ("model", name, place.name)
        for name, model in run.models.items()
        for place in empty_buffers(model)
    }
    saved = {entry.path for entry in manifest.entries if entry.buffer and entry.path[0] == "model"}
    return empty & saved, set(manifest.absent) - saved


def _set_buffers(manifest: Manifest, run: Run, places: dict[Path, Tensor]) -> None:
    entries = {entry.path: entry for entry in manifest.entries}
    to_fill, to_empty = fillable(manifest, run)
    for name, model in run.models.items():
        for place in empty_buffers(model):
            path: Path = ("model", name, place.name)
            if path in to_fill:
                entry = entries[path]
                made = torch.empty_strided(entry.shape, entry.stride, dtype=dtype_of(entry.dtype))
                places[path] = place.holder[place.key] = made
        for held in list(held_tensors(model)):
            path = ("model", name, held.name)
            if held.buffer and path in to_empty:
                held.holder[held.key] = None
                places.pop(path, None)


def _materialise(manifest: Manifest, places: dict[Path, Tensor]) -> None:
    for entry in manifest.entries:
        tensor = places.get(entry.path)
        if tensor is not None and is_uninitialised(tensor) and not entry.uninitialised:
            made: Any = tensor
            made.materialize(entry.shape, dtype=dtype_of(entry.dtype))


def _set_flags(
    manifest: Manifest, host: dict[str, Any], run: Run, places: dict[Path, Tensor]
) -> None:
    for entry in manifest.entries:
        tensor = places.get(entry.path)
        if tensor is not None and isinstance(tensor, nn.Parameter) and entry.parameter:
            tensor.requires_grad = entry.requires_grad
    for name, model in run.models.items():
        evaluating = set(host["modes"][name])
        for at, module in named_modules(model):
            module.training = at not in evaluating


def _set_groups(
    optimizer: Optimizer,
    members: list[list[Path]],
    options: list[dict[str, Any]],
    places: dict[Path, Tensor],
) -> None:
    """Bring groups, membership and options to what they were, keeping list and dicts as objects.

    Schedulers and wrapping optimizers hold on to them. A live group is recognised by its members.
    """
    live = list(optimizer.param_groups)
    groups = []
    for paths, saved in zip(members, options, strict=True):
        parameters = [places[path] for path in paths]
        wanted = {id(parameter) for parameter in parameters}

        def common(group: dict[str, Any], wanted: set[int] = wanted) -> int:
            return len(wanted & {id(parameter) for parameter in group["params"]})

        group = max(live, key=common, default=None)
        if group is None or (wanted and not common(group)):
            group = {}
        else:
            live.remove(group)
        _set_options(group, saved)
        group["params"] = parameters
        groups.append(group)
    optimizer.param_groups[:] = groups


def _set_options(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in group.keys() - saved.keys() - {"params"}:
        del group[key]
    for key, value in saved.items():
        held = group.get(key)
        if (
            isinstance(value, Tensor)
            and isinstance(held, Tensor)
            and (held.shape, held.dtype) == (value.shape, value.dtype)
        ):
            held.copy_(value)  # whoever shares the tensor sees the value
        else:
            group[key] = value


def _make_state(
    manifest: Manifest, host: dict[str, Any], run: Run, places: dict[Path, Tensor]
) -> None:
    """Make each optimizer's state what it was, reusing live tensors that fit; bytes come later."""
    wanted: dict[str, dict[Any, dict[Any, Any]]] = {name: {} for name in run.optimizers}
    whole: dict[str, dict[Any, Any]] = {name: {} for name in run.optimizers}
    maker = _Maker(manifest)
    wrappers = {entry.path for entry in manifest.entries if entry.subclass}
    for entry in manifest.entries:
        kind = entry.path[0] if entry.path[:-1] not in wrappers else ""  # they bring their inner
        if kind == "state":
            _, name, key, *path = entry.path
            owner = places[tuple(path)]
            held = run.optimizers[name].state.get(owner, {})
            reuse = held.get(key) if isinstance(held, dict) else None
            tensor = maker.tensor_for(entry, reuse, owner)
            wanted[name].setdefault(owner, {})[key] = tensor
            _place(places, entry.path, tensor)
        elif kind == "shared":
            _, name, key = entry.path
            shared: dict[Any, Any] = run.optimizers[name].state
            tensor = maker.tensor_for(entry, shared.get(key), None)
            whole[name][key] = tensor
            _place(places, entry.path, tensor)
        elif kind == "grad":
            owner = places[entry.path[1:]]
            owner.grad = maker.tensor_for(entry, owner.grad, owner)
            _place(places, entry.path, owner.grad)
    for name, path, key, value in host["state"]:
        if not path:
            whole[name][key] = value
        elif key is None:
            whole[name][places[tuple(path)]] = value
        else:
            wanted[name].setdefault(places[tuple(path)], {})[key] = value
    if run.grads:
        saved = {entry.path[1:] for entry in manifest.entries if entry.path[0] == "grad"}
        for place, tensor in places.items():
            if isinstance(tensor, nn.Parameter) and place not in saved:
                tensor.grad = None
    else:  # a fresh process has no part of a sum of gradients; this one may
        for tensor in places.values():
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                tensor.grad.zero_()
    for name, optimizer in run.optimizers.items():
        for owner in optimizer.state.keys() - wanted[name].keys() - whole[name].keys():
            del optimizer.state[owner]
        for owner, state in wanted[name].items():
            held = optimizer.state.setdefault(owner, {})
            held.clear()
            held.update(state)
        optimizer.state.update(whole[name])


def _place(places: dict[Path, Tensor], path: Path, tensor: Tensor) -> None:
    places[path] = tensor
    for name, inner in (inner_tensors(tensor) or {}).items():
        _place(places, (*path, f"<{name}>"), inner)


class _Maker:
    """Makes tensors that a fresh run lacks; those that shared an extent share memory again."""

    def __init__(self, manifest: Manifest) -> None:
        self._sizes = manifest.extents
        self._sharing: dict[int, int] = {}
        self._bases: dict[int, Tensor] = {}
        for entry in manifest.entries:
            if entry.path[0] in MADE:
                self._sharing[entry.extent] = self._sharing.get(entry.extent, 0) + 1

    def tensor_for(self, entry: TensorEntry, held: Any, owner: Tensor | None) -> Tensor:
        if entry.subclass:
            return self._subclass(entry, held, owner)
        dtype = dtype_of(entry.dtype)
        fits = (
            type(held) is Tensor
            and held.dtype == dtype
            and tuple(held.shape) == entry.shape
            and held.stride() == entry.stride
            and held.layout == torch.strided
        )
        if fits:
            return held  # type: ignore[no-any-return]
        if entry.extent >= 0 and self._sharing[entry.extent] > 1 and not entry.packed:
            base = self._bases.get(entry.extent)
            if base is None:
                base = torch.zeros(self._sizes[entry.extent], dtype=torch.uint8)
                self._bases[entry.extent] = base
            flat = base[entry.offset : entry.offset + entry.span_bytes()].view(dtype)
            return flat.as_strided(entry.shape, entry.stride)
        made = torch.empty_strided(entry.shape, entry.stride, dtype=dtype)
        if entry.conj:
            made = made.conj()
        return made._neg_view() if entry.neg else made

    def _subclass(self, entry: TensorEntry, held: Any, owner: Tensor | None) -> Tensor:
        for candidate in (held, None if owner is None else torch.zeros_like(owner)):
            if isinstance(candidate, Tensor) and type(candidate).__qualname__ == entry.subclass:
                return candidate
        raise StructureError(
            f"{name_of(entry.path)} is a {entry.subclass}; none can be made from its parameter"
        )
