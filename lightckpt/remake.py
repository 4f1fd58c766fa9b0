"""Remake: bring a run's structure to what it was, so that bytes have a place to go.

A fresh run lacks what appears in training: optimizer state, param groups of layers that were
unfrozen, parameters of lazy modules, buffers that were empty, gradients. Objects that others hold
on to (group dicts, learning rates held as tensors, state tensors that fit) are kept and changed in
place. Nothing is read from the media here, and nothing is refused: that was done before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import gpus
from .capture import Run
from .manifest import Manifest, Path, TensorEntry, graded
from .modules import set_modes
from .names import Empty, empty_buffers, held_tensors
from .placement import beside
from .sharing import Job, Tie, make_all
from .tensors import dtype_of, empty_gradient, gradient_form, inner_tensors, is_uninitialised

# Kinds of tensors that a fresh run need not have.
MADE = ("state", "shared", "grad")


def remake(
    manifest: Manifest, host: dict[str, Any], run: Run, places: dict[Path, Tensor], ties: list[Tie]
) -> None:
    """Make *run* hold every tensor of *manifest*; *places* gets those that it lacked."""
    _empty_buffers(manifest, host, run, places)
    _materialise(manifest, places)
    _set_flags(manifest, places)
    set_modes(host, run)
    _set_groups(manifest, host, run, places)
    _set_gradients(manifest, host, places)
    _make_state(manifest, host, run, places, ties)


def fill_loose(host: dict[str, Any], run: Run, places: dict[Path, Tensor]) -> None:
    """Set the tensors that have no bytes of their own in a version (sparse ones)."""
    empty = _empty(run) if host["loose"] else {}
    for path, saved in host["loose"]:
        kind, *rest = path
        if kind == "grad":
            owner = places[tuple(rest)]
            owner.grad = saved.to(owner.device)
        elif kind == "state":
            owner = places[tuple(rest[2:])]
            run.optimizers[rest[0]].state[owner][rest[1]] = saved.to(owner.device)
        elif kind == "shared":
            shared: dict[Any, Any] = run.optimizers[rest[0]].state
            shared[rest[1]] = saved
        elif tuple(path) in places:
            places[tuple(path)].copy_(saved)
        else:
            place = empty[tuple(path)]
            place.holder[place.key] = saved


def fillable(manifest: Manifest, host: dict[str, Any], run: Run) -> tuple[set[Path], set[Path]]:
    """Return the buffers that *run* has empty and the store has not, and the other way round."""
    saved = {entry.path for entry in manifest.entries if entry.buffer and entry.path[0] == "model"}
    saved |= {tuple(path) for path, _ in host["loose"] if path[0] == "model"}
    return _empty(run).keys() & saved, set(manifest.absent) - saved


def _empty(run: Run) -> dict[Path, Empty]:
    return {
        ("model", name, place.name): place
        for name, model in run.models.items()
        for place in empty_buffers(model)
    }


def _empty_buffers(
    manifest: Manifest, host: dict[str, Any], run: Run, places: dict[Path, Tensor]
) -> None:
    if not manifest.absent:
        return
    _, to_empty = fillable(manifest, host, run)
    for name, model in run.models.items():
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


def _set_flags(manifest: Manifest, places: dict[Path, Tensor]) -> None:
    for entry in manifest.entries:
        tensor = places.get(entry.path)
        if (
            tensor is not None
            and tensor.requires_grad != entry.requires_grad
            and isinstance(tensor, nn.Parameter) == entry.parameter
            and tensor.is_leaf
        ):
            tensor.requires_grad = entry.requires_grad


def _set_groups(
    manifest: Manifest, host: dict[str, Any], run: Run, places: dict[Path, Tensor]
) -> None:
    """Bring groups, membership and options to what they were, keeping list and dicts as objects.

    Schedulers and wrapping optimizers hold on to them.
    """
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for name, optimizer in run.optimizers.items():
        members = [[places[path] for path in paths] for paths in manifest.groups[name]]
        groups = _matching_groups(optimizer, members)
        pairs += zip(groups, host["groups"][name], strict=True)
        for group, parameters in zip(groups, members, strict=True):
            group["params"] = parameters
        optimizer.param_groups[:] = groups
    _set_options(pairs)


def _matching_groups(optimizer: Optimizer, members: list[list[Tensor]]) -> list[dict[str, Any]]:
    """Return a live group for each list of members: one with members in common, or a new one."""
    live = list(optimizer.param_groups)
    groups: list[dict[str, Any]] = []
    for parameters in members:
        wanted = {id(parameter) for parameter in parameters}

        def common(at: int, wanted: set[int] = wanted) -> int:
            return len(wanted & {id(parameter) for parameter in live[at]["params"]})

        at = max(range(len(live)), key=common, default=None)
        if at is None or (wanted and not common(at)):
            groups.append({})
        else:
            groups.append(live.pop(at))
    return groups


def _set_options(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Give each group the options saved for it.

    A tensor is kept and changed in place, for others to see. One that several groups had in common
    (it was decoded once) they have in common again, and no other group has it.
    """
    now: dict[int, Tensor] = {}  # by id of the saved tensor
    taken: set[int] = set()
    for group, saved in pairs:
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        for key, value in saved.items():
            if not isinstance(value, Tensor):
                group[key] = value
                continue
            held: Any = group.get(key)
            if id(value) not in now:
                fits = (
                    isinstance(held, Tensor)
                    and id(held) not in taken
                    and (held.shape, held.dtype) == (value.shape, value.dtype)
                )
                now[id(value)] = held.copy_(value) if fits else beside(value, group["params"])
                taken.add(id(now[id(value)]))
            group[key] = now[id(value)]


def _set_gradients(manifest: Manifest, host: dict[str, Any], places: dict[Path, Tensor]) -> None:
    """Leave no gradient where there was none, and zeros where there was one that is not saved."""
    forms = dict(zip(graded(manifest), host.get("grads", b""), strict=False))
    saved = {entry.path[1:] for entry in manifest.entries if entry.path[0] == "grad"}
    for path, tensor in places.items():
        if not tensor.is_leaf or is_uninitialised(tensor) or path in saved:
            continue
        if not (form := forms.get(path, 0)):
            if tensor.grad is not None:
                tensor.grad = None
        elif tensor.grad is not None and gradient_form(tensor.grad) == form:
            tensor.grad.zero_()
        elif inner_tensors(tensor) is None:
            tensor.grad = empty_gradient(tensor, form)


def _make_state(
    manifest: Manifest,
    host: dict[str, Any],
    run: Run,
    places: dict[Path, Tensor],
    ties: list[Tie],
) -> None:
    """Make what the run lacks, reusing live tensors that fit; bytes come later."""
    wanted: dict[str, dict[Any, dict[Any, Any]]] = {name: {} for name in run.optimizers}
    whole: dict[str, dict[Any, Any]] = {name: {} for name in run.optimizers}
    jobs = _jobs(manifest, run, places)
    empty = _empty(run) if any(job.entry.path[0] not in MADE for job in jobs) else {}
    for job, tensor in zip(jobs, make_all(jobs, ties, places), strict=True):
        kind, *rest = path = job.entry.path
        if kind == "state":
            wanted[rest[0]].setdefault(job.owner, {})[rest[1]] = tensor
        elif kind == "shared":
            whole[rest[0]][rest[1]] = tensor
        elif kind == "grad":
            places[tuple(rest)].grad = tensor
        else:
            empty[path].holder[empty[path].key] = tensor
        _place(places, path, tensor)
    for name, path, key, value in host["state"]:
        if not path:
            whole[name][key] = value
        elif key is None:
            whole[name][places[tuple(path)]] = value
        else:
            wanted[name].setdefault(places[tuple(path)], {})[key] = value
    for name, optimizer in run.optimizers.items():
        for owner in optimizer.state.keys() - wanted[name].keys() - whole[name].keys():
            del optimizer.state[owner]
        for owner, state in wanted[name].items():
            held = optimizer.state.setdefault(owner, {})
            held.clear()
            held.update(state)
        optimizer.state.update(whole[name])


def _jobs(manifest: Manifest, run: Run, places: dict[Path, Tensor]) -> list[Job]:
    """Return what a run need not have: state, gradients, and buffers whose places are empty."""
    wrappers = {entry.path for entry in manifest.entries if entry.subclass}
    on_gpu = {entry.path for entry in manifest.entries if entry.device}
    jobs = []
    for entry in manifest.entries:
        kind, *rest = entry.path
        if wrappers and entry.path[:-1] in wrappers:  # they bring their inner tensors
            continue
        if kind == "state":
            owner = places[tuple(rest[2:])]
            held = run.optimizers[rest[0]].state.get(owner, {})
            found = held.get(rest[1]) if isinstance(held, dict) else None
            device = _device(entry, owner, tuple(rest[2:]) in on_gpu)
            jobs.append(Job(entry, found, owner, device))
        elif kind == "shared":
            shared: dict[Any, Any] = run.optimizers[rest[0]].state
            jobs.append(Job(entry, shared.get(rest[1]), device=_device(entry)))
        elif kind == "grad":
            owner = places[tuple(rest)]
            jobs.append(Job(entry, owner.grad, owner, owner.device))
        elif entry.path not in places:
            jobs.append(Job(entry, device=_device(entry)))
    return jobs


def _device(
    entry: TensorEntry, owner: Tensor | None = None, with_owner: bool = False
) -> torch.device:
    """Return where the state of *entry* belongs now, perhaps on another kind of device than it was.

    What lay where its parameter did lies there again; but scalars of the cpu (the count of Adam's
    steps) stay on it, where optimizers look for them.
    """
    if owner is None:
        return gpus.some_device() if entry.device else torch.device("cpu")
    beside = bool(entry.device) == with_owner
    return owner.device if beside and (entry.device or entry.shape) else torch.device("cpu")


def _place(places: dict[Path, Tensor], path: Path, tensor: Tensor) -> None:
    places[path] = tensor
    for name, inner in (inner_tensors(tensor) or {}).items():
        _place(places, (*path, f"<{name}>"), inner)
