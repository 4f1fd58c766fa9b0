"""Restore: a version back into live objects, in place, all or nothing.

Everything that can be wrong is found before anything is touched: slot, manifest, record, host
state, names, shapes, dtypes, and which tensors share memory. Then, in this order: structure (lazy
modules, param groups, optimizer state), tensors, optimizer values, schedulers, scalers, extras,
random generators last. Only bytes that a captured tensor reaches are written, and torch's version
counters are moved. ``Optimizer.load_state_dict`` is not used: it casts state to the parameter's
dtype and mangles strings.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._core import Store
from .capture import Run, parameter_paths
from .collect import STATEFUL, has_extra_state, read_host
from .errors import StructureError
from .manifest import Manifest, Path, decode_manifest, name_of
from .names import held_tensors, named_modules
from .remake import MADE, fill_loose, fillable, remake
from .rng import apply_rng
from .tensors import inner_tensors, is_uninitialised
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
    with _plain_tensors():
        host = read_host(bytes(host_bytes), allow_pickle=run.allow_pickle)
    restoration = Restoration(manifest, host, _live_tensors(run))
    _compare_tensors(restoration, *fillable(manifest, run))
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


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make ordinary tensors on the cpu, whatever the caller has set for its own."""
    with torch.inference_mode(False), torch.device("cpu"):
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
    saved = {e.path: e for e in restoration.manifest.entries if e.path[0] not in MADE}
    loose = {tuple(path) for path, _ in restoration.host["loose"]}
    differences += [
        f"{name_of(path)} is in the store only" for path in saved.keys() - places.keys() - empty
    ]
    for path, tensor in places.items():
        entry = saved.get(path)
        if entry is None:
            if path not in loose and path not in emptied:
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
    with torch.no_grad(), _plain_tensors():
        remake(manifest, host, run, places)
        write_targets(store, version, _targets(restoration, places))
        fill_loose(host, run, places)
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
