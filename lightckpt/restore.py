"""Restore: a version back into live objects, in place, all or nothing.

Everything that can be wrong is found before anything is touched: slot, manifest, record, host
state, names, shapes, dtypes, and which tensors share memory. Then, in this order: structure (lazy
modules, param groups, optimizer state), tensors, optimizer values, schedulers, scalers, extras,
random generators last. Only bytes that a captured tensor reaches are written, and torch's version
counters are moved. ``Optimizer.load_state_dict`` is not used: it casts state to the parameter's
dtype and mangles strings.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._core import Store
from .capture import Run, parameter_paths
from .collect import MISFITS, STATEFUL, read_host
from .errors import FormatError, StructureError
from .manifest import Manifest, Path, TensorEntry, decode_manifest, graded, name_of
from .modules import check_modules, load_module_states, missing_modules
from .names import held_tensors
from .placement import Placement
from .reader import check_extents
from .remake import MADE, fill_loose, fillable, remake
from .rng import apply_rng
from .sharing import Tie, check_ties, find_ties
from .tensors import inner_tensors, is_uninitialised
from .transfer import Target, write_targets

_SHOWN_MAX = 8  # differences spelled out in a message


@dataclass
class Restoration:
    """A version that has been read and compared with a run, but not applied."""

    manifest: Manifest
    host: dict[str, Any]
    places: dict[Path, Tensor]  # live tensors by path; parameters only by their own paths
    ties: list[Tie] = field(default_factory=list)
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
    with _plain_tensors():
        host = read_host(
            bytes(host_bytes), allow_pickle=run.allow_pickle, leaf=Placement(run).decode
        )
    check_extents(store, version, manifest)
    restoration = Restoration(manifest, host, _live_tensors(run))
    try:
        _compare_all(restoration, run)
    except MISFITS as error:
        raise FormatError(f"manifest and host state do not fit: {error!r}") from error
    if found := restoration.differences:
        shown = "; ".join(found[:_SHOWN_MAX])
        more = f"; and {len(found) - _SHOWN_MAX} more" if len(found) > _SHOWN_MAX else ""
        raise StructureError(f"the store holds the state of another run: {shown}{more}")
    try:
        restoration.ties = find_ties(manifest)
        check_ties(manifest, restoration.ties, restoration.places)
    except MISFITS as error:
        raise FormatError(f"the manifest contradicts itself: {error!r}") from error
    return restoration


def _compare_all(restoration: Restoration, run: Run) -> None:
    manifest, host = restoration.manifest, restoration.host
    groups = {name: len(options) for name, options in host["groups"].items()}
    if groups != {name: len(members) for name, members in manifest.groups.items()}:
        raise ValueError(f"the manifest has other param groups than {groups}")
    check_modules(host)
    _check_gradients(manifest, host.get("grads", b""))
    _compare_tensors(restoration, *fillable(manifest, host, run))
    _compare_optimizers(restoration, run)
    _compare_names(restoration, "model", host["modes"].keys(), run.models.keys())
    restoration.differences += [
        f"module {name} has state of its own in the store only"
        for name in missing_modules(host, run)
    ]
    for kind, attribute in STATEFUL.items():
        _compare_names(restoration, kind, host[kind].keys(), getattr(run, attribute).keys())


def _check_gradients(manifest: Manifest, forms: bytes) -> None:
    shapes = {entry.path: entry.shape for entry in manifest.entries}
    if type(forms) is not bytes or (forms and len(forms) != len(graded(manifest))):
        raise ValueError("the gradients are those of other tensors")
    for path, form in zip(graded(manifest), forms, strict=False):
        if form > 1 + len(shapes[path]):
            raise ValueError(f"a gradient of {name_of(path)} has {form - 1} sparse dimensions")


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make ordinary tensors on the cpu, whatever the caller has set for its own."""
    cpu = torch.device("cpu")
    # Only where it changes something: inside, each call of torch takes two microseconds more, which
    # was a third of the time to restore a hundred megabytes.
    device = nullcontext() if torch.empty(0).device == cpu else cpu
    with torch.inference_mode(False), device:
        yield


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


def _compare_tensors(restoration: Restoration, empty: set[Path], emptied: set[Path]) -> None:
    places, differences = restoration.places, restoration.differences
    saved: dict[Path, TensorEntry | Tensor] = {
        entry.path: entry for entry in restoration.manifest.entries if entry.path[0] not in MADE
    }
    for path, tensor in restoration.host["loose"]:
        if path[0] not in MADE:
            saved[tuple(path)] = tensor
    differences += [
        f"{name_of(path)} is in the store only" for path in saved.keys() - places.keys() - empty
    ]
    for path, tensor in places.items():
        if path in saved:
            if difference := _difference(saved[path], tensor):
                differences.append(f"{name_of(path)} {difference}")
        elif path not in emptied:
            differences.append(f"{name_of(path)} is in the run only")


def _difference(saved: TensorEntry | Tensor, tensor: Tensor) -> str:
    """Say in what *tensor* differs from what was saved in its place; "" if in nothing."""
    if isinstance(saved, TensorEntry):
        if saved.uninitialised:
            return "" if is_uninitialised(tensor) else "was saved before it was initialised"
        if is_uninitialised(tensor) or (saved.subclass and not tensor.is_nested):
            return ""
        form = saved.dtype, list(saved.shape)
    else:
        form = str(saved.dtype).removeprefix("torch."), list(saved.shape)
    layouts = [_layout(one) for one in (saved, tensor)]
    if layouts[0] != layouts[1]:
        return f"is {layouts[0]} in the store and {layouts[1]} in the run"
    live = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if live == form:
        return ""
    return f"has {form[0]} {form[1]} in the store and {live[0]} {live[1]} in the run"


def _layout(tensor: TensorEntry | Tensor) -> str:
    if isinstance(tensor, TensorEntry):
        return "strided"
    if is_uninitialised(tensor):
        return "uninitialised"
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")


def _compare_optimizers(restoration: Restoration, run: Run) -> None:
    manifest, differences = restoration.manifest, restoration.differences
    _compare_names(restoration, "optimizer", manifest.groups.keys(), run.optimizers.keys())
    for name, groups in manifest.groups.items():
        for members in groups:
            for path in members:
                if path not in restoration.places:
                    differences.append(f"optimizer {name} owns {name_of(path)}, the run has none")
    for name, optimizer in run.optimizers.items():
        # What each group needs: others come and go, with schedulers and as users like.
        needed = set(optimizer.defaults).intersection(*optimizer.param_groups)
        for options in restoration.host["groups"].get(name, ()):
            if missing := sorted(map(str, needed - options.keys() - {"params"})):
                differences.append(
                    f"optimizer {name} ({type(optimizer).__qualname__}) needs the options "
                    f"{missing}, which are not in the store"
                )
                break


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
    with torch.no_grad(), _plain_tensors():
        remake(manifest, host, run, places, restoration.ties)
        write_targets(store, version, manifest.extents, _targets(restoration, places))
        fill_loose(host, run, places)
    load_module_states(host, run)
    for kind, attribute in STATEFUL.items():
        for name, item in getattr(run, attribute).items():
            item.load_state_dict(host[kind][name])
    # Loading a loader's state may draw random numbers, so the generators come after it.
    apply_rng(host["rng"], run.generators)
