"""Loading: the state dict of a version, without a model or an optimizer.

Tensors lie where the store has them, in a private mapping: nothing is copied until one is written
to, and then only this process's pages change. The store stays open, and the version pinned, until
the last tensor is gone. So a version can be loaded beside the trainer that goes on saving.
"""

import os
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ._core import Store, Version
from .archive import open_any
from .collect import MISFITS, read_host
from .errors import CheckpointWarning, CorruptError, FormatError
from .manifest import Manifest, Path, TensorEntry, name_of
from .reader import identity, missing, open_reader, pin_newest, read_manifest, verify
from .tensors import dtype_of
from .transfer import stored_view

OPEN_TRIES = 3


def load(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    allow_pickle: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Return the state of a version, its tensors zero-copy until they are written to.

    The keys; a kind that was given as one object is not nested by name:

        step           iterations done
        model          what ``load_state_dict`` of the model takes, under names without wrappers
        nonpersistent  its buffers that ``state_dict`` leaves out
        optimizer      what ``load_state_dict`` of the optimizer takes
        nested         optimizers within a single optimizer, by the path of the attribute
        members        optimizer -> per group the names of its parameters: what the indexes mean
        scheduler, scaler, extra    what their ``state_dict`` returned
        tensors, unnamed, grads     loose tensors; parameters that no model holds; gradients
        modes          model -> the names of its modules in evaluation mode
        rng, loop      random generators; where ``iterate`` stood

    Tensors are on the cpu, wherever they were, but for those within pickles. A tensor subclass with
    inner tensors comes as a dict of these: its class is not known here.
    A compressed archive is expanded into a temporary file first.

    Args:
        step: which; None takes the newest. If that is damaged the next older one is taken, and a
            warning says so.
        allow_pickle: unpickle state that was saved so: that runs code of whoever wrote the store.
        verify: compare all data with their checksums. It reads every byte, though it copies none;
            without, only what is touched is read, and a damaged tensor goes unnoticed.

    Raises:
        NotFoundError: no store, or no version of *step*; the message lists those there are.
        CorruptError, FormatError: what there is, is damaged; the message names it.
        UnsafeStateError: the state holds a pickle, and *allow_pickle* is false.
    """
    with open_any(path) as place:
        for tries_left in reversed(range(OPEN_TRIES)):
            store = open_reader(place, workers=0 if verify else 1)
            try:
                return _load(store, place, step, allow_pickle=allow_pickle, check=verify)
            except _GrownError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")


class _GrownError(FormatError):
    """A version cannot be read, and the file has grown since it was mapped: it may lie behind."""


class _Holder:
    """Keeps a store open; the last reference to it closes the store.

    Of a device DAX node a reader maps the writer's own bytes, and may not write to them: then
    ``shared`` is true, and what is given away must be copied.
    """

    def __init__(self, store: Store, *, shared: bool) -> None:
        self.store, self.shared = store, shared
        weakref.finalize(self, store.close).atexit = False

    def locate(self, version: int, extent: int) -> Any:
        """Return an extent as a buffer that keeps this holder, and so the mapping, alive."""
        buffer = self.store.locate(version, extent)
        # A finalizer holds its arguments for as long as the object lives.
        weakref.finalize(buffer, _let_go, self).atexit = False
        return buffer


def _let_go(holder: _Holder) -> None:
    """Drop the last argument of a buffer's finalizer."""


def _load(
    store: Store, path: FilePath, step: int | None, *, allow_pickle: bool, check: bool
) -> dict[str, Any]:
    holder = _Holder(store, shared=path.is_char_device())
    damage: list[str] = []
    seen: set[tuple[int, int]] = set()
    kind: type[CorruptError | FormatError] = FormatError
    while (version := pin_newest(store, step, without=seen)) is not None:
        seen.add(identity(version))
        try:
            state = _read(holder, version, allow_pickle=allow_pickle, check=check)
        except (CorruptError, FormatError) as error:
            if os.stat(path).st_size > store.info().bytes:
                raise _GrownError(str(error)) from error
            kind = type(error)
            damage.append(f"step {version.step}: {error}")
            if not version.damaged:
                store.pin(version.version, pinned=False)
            continue
        except BaseException:
            # The error's frames keep the store open; the version need not stay for them.
            store.pin(version.version, pinned=False)
            raise
        if damage:
            warnings.warn(
                f"loaded step {version.step} instead of a newer one: {'; '.join(damage)}",
                CheckpointWarning,
                stacklevel=3,
            )
        return state
    if damage:
        raise kind(f"no version of {path} is whole: {'; '.join(damage)}")
    raise missing(store, path, step)


def _read(holder: _Holder, version: Version, *, allow_pickle: bool, check: bool) -> dict[str, Any]:
    store = holder.store
    manifest = read_manifest(store, version)
    host = read_host(store.view(version.version)[1], allow_pickle=allow_pickle)
    if check and (bad := verify(store, version, manifest)):
        raise CorruptError(f"bytes of {', '.join(bad)} differ from their checksums")
    try:
        return _Builder(holder, version, manifest, host).state()
    except MISFITS as error:
        raise FormatError(f"manifest and host state do not fit: {error!r}") from error


@dataclass
class _Builder:
    """Brings what a version holds into the shape that torch's own state dicts have."""

    holder: _Holder
    version: Version
    manifest: Manifest
    host: dict[str, Any]
    extents: dict[int, Tensor] = field(default_factory=dict)
    inner: dict[Path, dict[str, TensorEntry]] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)  # by path, without inner tensors
    hidden: set[Path] = field(default_factory=set)  # buffers that state_dict leaves out

    def state(self) -> dict[str, Any]:
        host = self.host
        self._gather()
        optimizers = {name: self._optimizer(name) for name in self.manifest.groups}
        single = "optimizer" in self.manifest.single
        nested = {n: o for n, o in optimizers.items() if single and n != "optimizer"}
        models = host["modes"].keys()
        members = {
            name: [[name_of(path) for path in group] for group in groups]
            for name, groups in self.manifest.groups.items()
        }
        return {
            "step": self.version.step,
            "model": self._single("model", {name: self._model(name) for name in models}),
            "nonpersistent": self._single("model", {name: self._hidden(name) for name in models}),
            "optimizer": self._single("optimizer", optimizers),
            "nested": nested,
            "members": members,
            **{k: self._single(k, host[k]) for k in ("scheduler", "scaler", "extra")},
            "tensors": {path[1]: value for path, value in self._of_kind("tensor")},
            "unnamed": {name_of(path[1:]): value for path, value in self._of_kind("group")},
            "grads": {name_of(path[1:]): value for path, value in self._of_kind("grad")},
            "modes": host["modes"],
            "rng": host["rng"],
            "loop": host["loop"],
        }

    def _single(self, kind: str, by_name: dict[str, Any]) -> Any:
        return by_name[kind] if kind in self.manifest.single and kind in by_name else by_name

    def _of_kind(self, *start: str) -> list[tuple[Path, Any]]:
        return [(p, v) for p, v in self.values.items() if p[: len(start)] == start]

    def _gather(self) -> None:
        wrappers = {e.path for e in self.manifest.entries if e.subclass}
        for entry in self.manifest.entries:
            if entry.path[:-1] in wrappers and entry.path[-1].startswith("<"):
                self.inner.setdefault(entry.path[:-1], {})[entry.path[-1][1:-1]] = entry
            else:
                self.values[entry.path] = None  # keeps the place
        for entry in self.manifest.entries:
            if entry.path in self.values:
                self.values[entry.path] = self._value(entry)
                if entry.buffer and not entry.persistent:
                    self.hidden.add(entry.path)
        for path, tensor in self.host["loose"]:
            self.values[tuple(path)] = tensor.detach()

    def _value(self, entry: TensorEntry) -> Any:
        if entry.subclass:
            inner = self.inner.get(entry.path, {})
            return {name: self._value(tensor) for name, tensor in inner.items()}
        dtype = dtype_of(entry.dtype)
        if entry.uninitialised:
            kind: Any = UninitializedParameter if entry.parameter else UninitializedBuffer
            return kind(requires_grad=entry.requires_grad, dtype=dtype, device="cpu")
        if entry.extent < 0:
            return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="cpu")
        if entry.extent not in self.extents:
            buffer = self.holder.locate(self.version.version, entry.extent)
            if len(buffer) != self.manifest.extents[entry.extent]:
                raise FormatError(
                    f"extent {entry.extent} has {len(buffer)} bytes; the manifest says "
                    f"{self.manifest.extents[entry.extent]}"
                )
            mapped = torch.frombuffer(buffer, dtype=torch.uint8)
            self.extents[entry.extent] = mapped.clone() if self.holder.shared else mapped
        return stored_view(self.extents[entry.extent], entry)

    def _model(self, model: str) -> dict[str, Any]:
        found = {p[2]: v for p, v in self._of_kind("model", model) if p not in self.hidden}
        for module, extra in self.host["module"].get(model, {}).items():
            found[f"{module}._extra_state".removeprefix(".")] = extra
        for module, state in self.host.get("shown", {}).get(model, {}).items():
            found |= {f"{module}.{key}".removeprefix("."): value for key, value in state.items()}
        return found

    def _hidden(self, model: str) -> dict[str, Any]:
        return {p[2]: v for p, v in self._of_kind("model", model) if p in self.hidden}

    def _optimizer(self, name: str) -> dict[str, Any]:
        """Return what ``Optimizer.state_dict`` would: parameters by index, in the groups' order.

        A group's names ("param_names") are there if the optimizer had them, and not otherwise:
        an optimizer that loads them would then refuse groups without.
        """
        numbers: dict[Path, int] = {}
        groups: list[dict[str, Any]] = []
        start = 0
        for members, options in zip(
            self.manifest.groups[name], self.host["groups"][name], strict=True
        ):
            for number, path in enumerate(members, start):
                numbers.setdefault(path, number)
            groups.append({**options, "params": [numbers[path] for path in members]})
            start += len(members)
        state: dict[Any, Any] = {}
        for path, value in self._of_kind("state", name):
            state.setdefault(numbers[path[3:]], {})[path[2]] = value
        for path, value in self._of_kind("shared", name):
            state[path[2]] = value
        for optimizer, owner, key, value in self.host["state"]:
            if optimizer != name:
                continue
            if not owner:
                state[key] = value
            elif key is None:
                state[numbers[tuple(owner)]] = value
            else:
                state.setdefault(numbers[tuple(owner)], {})[key] = value
        return {"state": state, "param_groups": groups}
