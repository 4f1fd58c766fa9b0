"""Capture: all that a version of a training run must hold, found by walking the live objects.

The walk finds tensors by path, in update order (each parameter, then its optimizer state,
optimizers in the order given; then the rest), and the places to look at again later: containers
that may grow, names that hold nothing yet, values that are no tensors. It reads and never writes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import gpus
from .errors import UnsafeStateError
from .manifest import Path, name_of
from .names import held_tensors, named_modules, wrappers_in
from .tensors import inner_tensors, is_uninitialised


@dataclass(frozen=True)
class Run:
    """The objects of a training run, each kind by name. ``optimizers`` includes nested ones."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    given: tuple[str, ...] = ()  # names of the optimizers that are not inside another one
    schedulers: dict[str, Any] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    rng: bool = True
    grads: bool = False
    allow_pickle: bool = False
    single: tuple[str, ...] = ()


def with_nested(optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
    """Return *optimizers* and those that they hold in attributes, named ``outer.attribute``."""
    found: dict[str, Optimizer] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, Optimizer):
            if any(value is known for known in found.values()):
                return
            found[name] = value
            for attribute, inner in vars(value).items():
                visit(f"{name}.{attribute}", inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                if isinstance(inner, Optimizer):
                    visit(f"{name}.{index}", inner)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, Optimizer):
                    visit(f"{name}.{key}", inner)

    for name, optimizer in optimizers.items():
        visit(name, optimizer)
    return found


@dataclass(slots=True)
class Leaf:
    """A tensor of the run and where it is held: ``holder[key]``, or attribute *key* of *holder*."""

    path: Path
    tensor: Tensor
    holder: Any = None
    key: Any = None
    buffer: bool = False
    persistent: bool = True
    subclass: str = ""  # qualified name, for a wrapper whose inner tensors follow
    dtype: torch.dtype = torch.float32
    shape: torch.Size = field(default_factory=torch.Size)
    stride: tuple[int, ...] = ()
    requires_grad: bool = False
    address: int = 0
    extent: int = -1
    device: int = gpus.HOST

    def __post_init__(self) -> None:
        tensor = self.tensor
        if tensor.is_nested:  # its shape cannot be read
            raise UnsafeStateError(f"{name_of(self.path)} cannot be saved: it is a nested tensor")
        self.dtype, self.requires_grad = tensor.dtype, tensor.requires_grad
        self.device = gpus.ordinal_of(tensor)
        if not is_uninitialised(tensor):
            self.shape = tensor.shape
            if tensor.layout == torch.strided:
                self.stride = tensor.stride()


def getter_of(holder: Any, key: Any) -> Callable[[Any], Any]:
    """Return a function of *key* that says what *holder* holds there now; None for nothing."""
    if isinstance(holder, dict):
        return holder.get
    return lambda key, holder=holder: getattr(holder, key, None)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Value:
    """Optimizer state that is no tensor, now ``holder[at]``.

    ``path`` is () for state under a string key; ``key`` is None where a parameter's whole state is
    one value.
    """

    optimizer: str
    path: Path
    key: Any
    holder: dict[Any, Any]
    at: Any


@dataclass
class Walk:
    """All that one walk over a run finds."""

    leaves: list[Leaf] = field(default_factory=list)
    loose: list[Leaf] = field(default_factory=list)  # layouts that travel in the host state
    values: list[Value] = field(default_factory=list)
    absent: list[tuple[Any, Any]] = field(default_factory=list)  # places that hold None
    containers: list[tuple[Any, int]] = field(default_factory=list)
    groups: dict[str, list[list[Path]]] = field(default_factory=dict)
    # Sequences that may change: holder and key of each, and the ids of what it held.
    members: list[tuple[Any, Any, tuple[int, ...]]] = field(default_factory=list)
    # Objects that may be replaced whole, so that what was found in them would be out of date.
    anchors: list[tuple[Any, Any, Any]] = field(default_factory=list)
    modules: dict[str, list[tuple[str, nn.Module]]] = field(default_factory=dict)
    wrappers: dict[str, list[str]] = field(default_factory=dict)  # names in ``modules``
    # Those of ``modules`` that have their own way of saving.
    showing: dict[str, list[tuple[str, nn.Module]]] = field(default_factory=dict)
    graded: list[Tensor] = field(default_factory=list)  # what ``manifest.graded`` names, in order
    owners: dict[str, set[int]] = field(default_factory=dict)  # optimizer -> ids of its tensors

    def add(self, leaf: Leaf) -> None:
        """File *leaf*, and the inner tensors of a wrapper subclass behind it."""
        inner = None if is_uninitialised(leaf.tensor) else inner_tensors(leaf.tensor)
        if inner is not None:
            leaf.subclass = type(leaf.tensor).__qualname__
            self.leaves.append(leaf)
            for name, tensor in inner.items():
                for owned in self.owners.values():
                    if id(leaf.tensor) in owned:
                        owned.add(id(tensor))
                self.add(Leaf((*leaf.path, f"<{name}>"), tensor, leaf.tensor, name, leaf.buffer))
        elif leaf.tensor.layout == torch.sparse_coo:
            self.loose.append(leaf)
        else:
            self.leaves.append(leaf)


def parameter_paths(run: Run) -> dict[int, Path]:
    """Return id -> path of every tensor that an optimizer of *run* may own."""
    paths: dict[int, Path] = {}
    for name, model in run.models.items():
        for held in held_tensors(model):
            paths.setdefault(id(held.tensor), ("model", name, held.name))
    for name, tensor in run.tensors.items():
        paths.setdefault(id(tensor), ("tensor", name))
    for name, optimizer in run.optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                paths.setdefault(id(parameter), ("group", name, str(g), str(i)))
    return paths


def _walk_models(run: Run, walk: Walk) -> Iterator[Leaf]:
    for name, model in run.models.items():
        modules = walk.modules[name] = list(named_modules(model))
        walk.showing[name] = [item for item in modules if shows_own_state(item[1])]
        if wrappers := wrappers_in(model):
            walk.wrappers[name] = list(wrappers)
        for _, module in modules:
            for holder in (module._parameters, module._buffers, module._modules):
                walk.containers.append((holder, len(holder)))
                walk.absent += [(holder, key) for key, value in holder.items() if value is None]
            walk.anchors += [(module._modules, *item) for item in module._modules.items()]
        for held in held_tensors(model):
            path = ("model", name, held.name)
            yield Leaf(path, held.tensor, held.holder, held.key, held.buffer, held.persistent)
    walk.containers.append((run.tensors, len(run.tensors)))  # it may be the caller's own dict
    for name, tensor in run.tensors.items():
        if type(name) is not str or not isinstance(tensor, Tensor):
            what = type(tensor).__qualname__
            raise UnsafeStateError(f"tensors[{name!r}] is a {what}, not a tensor by name")
        yield Leaf(("tensor", name), tensor, run.tensors, name)


def _walk_state(run: Run, walk: Walk, paths: dict[int, Path]) -> Iterator[Leaf]:
    for name, optimizer in run.optimizers.items():
        walk.containers.append((optimizer.state, len(optimizer.state)))
        walk.anchors.append((optimizer, "state", optimizer.state))
        for owner, state in optimizer.state.items():
            if not isinstance(owner, Tensor):
                yield from _shared_state(name, optimizer, owner, state, walk)
                continue
            path = paths.get(id(owner))
            if path is None:
                raise UnsafeStateError(f"optimizer {name} has state of a tensor in no group")
            if not isinstance(state, dict):
                walk.values.append(Value(name, path, None, optimizer.state, owner))
                continue
            walk.containers.append((state, len(state)))
            walk.anchors.append((optimizer.state, owner, state))
            for key, value in state.items():
                if isinstance(value, Tensor) and type(key) is str:
                    yield Leaf(("state", name, key, *path), value, state, key)
                else:
                    walk.values.append(Value(name, path, key, state, key))


def _shared_state(
    name: str, optimizer: Optimizer, key: Any, value: Any, walk: Walk
) -> Iterator[Leaf]:
    if type(key) is not str:
        raise UnsafeStateError(f"optimizer {name} has state under {key!r}, which is no string")
    if isinstance(value, Tensor):
        yield Leaf(("shared", name, key), value, optimizer.state, key)
    else:
        walk.values.append(Value(name, (), key, optimizer.state, key))


def _in_update_order(run: Run, leaves: list[Leaf], states: list[Leaf]) -> Iterator[Leaf]:
    """Yield each optimizer's parameters with their state behind them, then what remains."""
    by_id: dict[int, list[Leaf]] = {}
    for leaf in leaves:
        by_id.setdefault(id(leaf.tensor), []).append(leaf)
    by_owner: dict[tuple[str, Path], list[Leaf]] = {}
    for leaf in states:
        by_owner.setdefault((leaf.path[1], leaf.path[3:]), []).append(leaf)
    done: set[int] = set()
    for name, optimizer in run.optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not (held := by_id.get(id(parameter))):
                    continue
                if id(parameter) not in done:
                    done.add(id(parameter))
                    yield from held
                yield from by_owner.pop((name, held[0].path), ())
    for held in by_id.values():
        if id(held[0].tensor) not in done:
            yield from held
    for rest in by_owner.values():
        yield from rest


def shows_own_state(module: nn.Module) -> bool:
    """May *module* show in its state_dict what is neither a parameter nor a buffer?"""
    return type(module)._save_to_state_dict is not nn.Module._save_to_state_dict


def walk_run(run: Run) -> Walk:
    """Walk *run* whole.

    Raises:
        UnsafeStateError: a tensor or a piece of optimizer state has no safe place in a version.
    """
    walk = Walk()
    paths = parameter_paths(run)
    held = list(_walk_models(run, walk))
    known = {id(leaf.tensor) for leaf in held}
    for name, optimizer in run.optimizers.items():
        walk.groups[name] = []
        walk.owners[name] = set()
        walk.members.append((optimizer, "param_groups", tuple(map(id, optimizer.param_groups))))
        for group in optimizer.param_groups:
            members = group["params"]
            walk.members.append((group, "params", tuple(map(id, members))))
            walk.groups[name].append([paths[id(p)] for p in members])
            walk.owners[name].update(map(id, members))
            for parameter in members:
                if id(parameter) not in known:
                    known.add(id(parameter))
                    held.append(Leaf(paths[id(parameter)], parameter))
    states = list(_walk_state(run, walk, paths))
    for leaf in states:
        walk.owners[leaf.path[1]].add(id(leaf.tensor))
    if run.grads:
        held += _walk_gradients(walk, held)
    for leaf in _in_update_order(run, held, states):
        walk.add(leaf)
    return walk


def _walk_gradients(walk: Walk, held: list[Leaf]) -> list[Leaf]:
    owned = {member for _, key, ids in walk.members if key == "params" for member in ids}
    found = []
    for leaf in held:
        tensor = leaf.tensor
        if is_uninitialised(tensor) or not tensor.is_leaf:
            continue
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad or id(tensor) in owned:
            if tensor.grad is None:
                walk.absent.append((tensor, "grad"))
            else:
                found.append(Leaf(("grad", *leaf.path), tensor.grad, tensor, "grad"))
    return found


def scaler_marks(run: Run) -> dict[str, Any]:
    """Return by name what shows whether a scaler's state has changed: mostly that state."""
    return {name: _mark_of(scaler) for name, scaler in run.scalers.items()}


def _mark_of(scaler: Any) -> Any:
    scale = getattr(scaler, "_scale", None)
    ours = getattr(type(scaler), "state_dict", None) is torch.amp.GradScaler.state_dict
    if not ours or not isinstance(scale, Tensor) or gpus.ordinal_of(scale) == gpus.HOST:
        return dict(scaler.state_dict())
    # To read a scale on a GPU is to wait for it; each update of torch's own moves this counter.
    numbers = {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)}
    return id(scale), scale._version, numbers


def update_counters(run: Run, name: str) -> list[int]:
    """Return the version counters of what optimizer *name* updates."""
    return [p._version for group in run.optimizers[name].param_groups for p in group["params"]]


def swaps_weights(run: Run, name: str) -> bool:
    """Does optimizer *name* exchange weights between steps, as schedule-free ones do?"""
    optimizer = run.optimizers[name]
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )
