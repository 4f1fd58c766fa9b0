"""Restore: a version back into live objects, in place, all or nothing.

Everything that can be wrong is found before anything is touched: slot, manifest, record, host
state, names, shapes, dtypes, and which tensors share memory. Then, in this order: structure (lazy
modules, param groups, optimizer state), tensors, optimizer values, schedulers, scalers, extras,
random generators last. Only bytes that a captured tensor reaches are written, and torch's version
counters are moved. ``Optimizer.load_state_dict`` is not used: it casts state to the parameter's
dtype and mangles strings.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._core import Store
from .capture import Run, parameter_paths
from .collect import STATEFUL, has_extra_state, read_host
from .errors import StructureError
from .manifest import Manifest, Path, TensorEntry, decode_manifest, name_of
from .names import held_tensors, named_modules
from .rng import apply_rng
from .tensors import dtype_of, inner_tensors, is_uninitialised
from .transfer import Target, check_sharing, write_targets

_SHOWN_MAX = 8  # differences spelled out in a message


@dataclass
class Restoration:
    """A version that has been read and compared with a run, but not applied."""

    manifest: Manifest
    host: dict[str, Any]
    places: dict[Path, Tensor]  # live tensors by path; parameters only by their own paths
    differences: list[str] = field(default_factory=list)


def prepare(store: Store, version: int, run: Run) -> Restoration:
    """Read *version* and compare it with *run*; changes nothing.

    Raises:
        FormatError: the version's metadata are damaged.
        UnsafeStateError: its host state holds a pickle that is not allowed.
        StructureError: it is the state of other objects; the message names what differs.
    """
    manifest_bytes, host_bytes = store.view(version)
    manifest = decode_manifest(manifest_bytes)
    host = read_host(bytes(host_bytes), allow_pickle=run.allow_pickle)
    restoration = Restoration(manifest, host, _live_tensors(run))
    _compare_tensors(restoration)
    _compare_optimizers(restoration, run)
    _compare_names(restoration, "model", host["modes"].keys(), run.models.keys())
    for kind, attribute in STATEFUL.items():
        _compare_names(restoration, kind, host[kind].keys(), getattr(run, attribute).keys())
    if found := restoration.differences:
        shown = "; ".join(found[:_SHOWN_MAX])
        more = f"; and {len(found) - _SHOWN_MAX} more" if len(found) > _SHOWN_MAX else ""
        raise StructureError(f"the store holds the state of another run: {shown}{more}")
    check_sharing(store, version, _targets(restoration, restoration.places))
    return restoration


def _live_tensors(run: Run) -> dict[Path, Tensor]:
    places: dict[Path, Tensor] = {}

    def put(path: Path, tensor: Tensor) -> None:
        places[path] = tensor
        if not is_uninitialised(tensor):
            for name, inner in (inner_tensors(tensor) or {}).items():
                put((*path, f"<{name}>"), inner)

    for name, model in run.models.items():
        for held in held_tensors(model):
            put(("model", name, held.name), held.tensor)
    for name, tensor in run.tensors.items():
        put(("tensor", name), tensor)
    paths = parameter_paths(run)
    for optimizer in run.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if paths[id(parameter)][0] == "group":
                    put(paths[id(parameter)], parameter)
    return places


def _compare_names(
    restoration: Restoration, kind: str, saved: Iterable[Any], live: Iterable[Any]
) -> None:
    saved, live = set(saved), set(live)
    restoration.differences += [f"{kind} {n!r} is in the store only" for n in sorted(saved - live)]
    restoration.differences += [f"{kind} {n!r} is in the run only" for n in sorted(live - saved)]


def _compare_tensors(restoration: Restoration) -> None:
    places, differences = restoration.places, restoration.differences
    saved = {e.path: e for e in restoration.manifest.entries if e.path[0] not in _MADE}
    loose = {tuple(path) for path, _ in restoration.host["loose"]}
    differences += [
        f"{name_of(path)} is in the store only" for path in saved if path not in places
    ]
    for path, tensor in places.items():
        entry = saved.get(path)
        if entry is None:
            if path not in loose:
                differences.append(f"{name_of(path)} is in the run only")
        elif entry.uninitialised:
            if not is_uninitialised(tensor):
                differences.append(f"{name_of(path)} was saved before it was initialised")
        elif not is_uninitialised(tensor):
            live = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if live != (entry.shape, entry.dtype) and not entry.subclass:
                differences.append(
                    f"{name_of(path)} has {entry.dtype} {list(entry.shape)} in the store and "
                    f"{live[1]} {list(live[0])} in the run"
                )


# Kinds of tensors that a fresh run need not have: restore makes them.
_MADE = ("state", "shared", "grad")


def _compare_optimizers(restoration: Restoration, run: Run) -> None:
    manifest, differences = restoration.manifest, restoration.differences
    _compare_names(restoration, "optimizer", manifest.groups.keys(), run.optimizers.keys())
    for name, groups in manifest.groups.items():
        for members in groups:
            for path in members:
                if path not in restoration.places:
                    differences.append(f"optimizer {name} owns {name_of(path)}, the run has none")


def _targets(restoration: Restoration, places: dict[Path, Tensor]) -> list[Target]:
    return [
        Target(entry, places[entry.path])
        for entry in restoration.manifest.entries
        if entry.extent >= 0 and entry.path in places and not is_uninitialised(places[entry.path])
    ]


def apply(store: Store, version: int, run: Run, restoration: Restoration) -> None:
    """Write a prepared version into *run*.

    Raises:
        CorruptError: data differ from their checksums; the message names the tensors. What was
            written before that was found has the version's bytes, unverified.
    """
    manifest, host, places = restoration.manifest, restoration.host, restoration.places
    with torch.no_grad():
        _materialise(manifest, places)
        _set_flags(manifest, host, run, places)
        for name, optimizer in run.optimizers.items():
            _set_groups(optimizer, manifest.groups[name], host["groups"][name], places)
        _make_state(manifest, host, run, places)
        write_targets(store, version, _targets(restoration, places))
        for path, saved in host["loose"]:
            places[tuple(path)].copy_(saved)
    for name, model in run.models.items():
        extra = host["module"][name]
        for at, module in named_modules(model):
            if at in extra and has_extra_state(module):
                module.set_extra_state(extra[at])
    for kind, attribute in STATEFUL.items():
        for name, item in getattr(run, attribute).items():
            item.load_state_dict(host[kind][name])
    # Loading a loader's state may draw random numbers, so the generators come after it.
    apply_rng(host["rng"], run.generators)


def _materialise(manifest: Manifest, places: dict[Path, Tensor]) -> None:
    for entry in manifest.entries:
        tensor = places.get(entry.path)
        if tensor is not None and is_uninitialised(tensor) and not entry.uninitialised:
            tensor.materialize(entry.shape, dtype=dtype_of(entry.dtype))  # type: ignore[attr-defined]


def _set_flags(
    manifest: Manifest, host: dict[str, Any], run: Run, places: dict[Path, Tensor]
) -> None:
    for entry in manifest.entries:
        tensor = places.get(entry.path)
        if tensor is not None and isinstance(tensor, nn.Parameter) and entry.parameter:
            tensor.requires_grad_(entry.requires_grad)
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
    for entry in manifest.entries:
        kind = entry.path[0]
        if kind == "state" and not entry.path[-1].startswith("<"):
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
        elif kind == "grad" and not entry.path[-1].startswith("<"):
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
    for name, optimizer in run.optimizers.items():
        for owner in optimizer.state.keys() - wanted[name].keys() - whole[name].keys():
            del optimizer.state[owner]
        for owner, state in wanted[name].items():
            held = optimizer.state[owner]
            held.clear()
            held.update(state)
        optimizer.state.update(whole[name])


def _place(places: dict[Path, Tensor], path: Path, tensor: Tensor) -> None:
    places[path] = tensor
    for name, inner in (inner_tensors(tensor) or {}).items():
        places[*path, f"<{name}>"] = inner


class _Maker:
    """Makes tensors that a fresh run lacks; those that shared an extent share memory again."""

    def __init__(self, manifest: Manifest) -> None:
        self._sizes = manifest.extents
        self._sharing: dict[int, int] = {}
        self._bases: dict[int, Tensor] = {}
        for entry in manifest.entries:
            if entry.path[0] in _MADE:
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
