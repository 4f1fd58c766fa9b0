"""Settings: a checkpointer's arguments, checked and brought into one form; and its store opened."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ._core import Catalog, Media, Store
from .capture import Run, with_nested
from .errors import NoSpaceError
from .hooks import inner_optimizer
from .names import held_tensors
from .snapshots import SNAPSHOTS
from .tensors import is_uninitialised

MODES = ("auto", "overlap", "stop")
BUSY = ("wait", "drop")
ON_ERROR = ("warn", "raise")
MEDIA = {kind.name.lower(): kind for kind in Media}
CATALOG = {kind.name.lower(): kind for kind in Catalog}
KEEP_MAX = 14  # of 16 slots, as older stores have: one more for a new version, one to go back
STATE_PER_PARAMETER = 2  # tensors of its size that an optimizer usually adds: Adam's moments


@dataclass(frozen=True)
class Settings:
    """How to checkpoint; the meaning of each field is ``Checkpointer``'s."""

    every: int | str = 1
    keep: int = 1
    mode: str = "auto"
    busy: str = "wait"
    media: str = "auto"
    catalog: str = "auto"
    size: int | None = None
    timeout: float = 60
    on_error: str = "warn"
    overhead: float = 0.05
    workers: int = 0
    snapshot: str = "auto"
    staging: int = 128 << 20

    def __post_init__(self) -> None:
        if self.every != "auto" and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"every={self.every!r} must be 'auto' or a number of at least 1")
        if type(self.keep) is not int or not 1 <= self.keep <= KEEP_MAX:
            raise ValueError(f"keep={self.keep!r} must be 1 to {KEEP_MAX}")
        for name, allowed in (
            ("mode", MODES), ("busy", BUSY), ("on_error", ON_ERROR), ("media", tuple(MEDIA)),
            ("catalog", tuple(CATALOG)), ("snapshot", SNAPSHOTS),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        if self.size is not None and self.size <= 0:
            raise ValueError(f"size={self.size} must be a number of bytes")
        if type(self.staging) is not int or self.staging <= 0:
            raise ValueError(f"staging={self.staging!r} must be a number of bytes")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be above 0 seconds")
        if not self.overhead > 0:
            raise ValueError(f"overhead={self.overhead} must be above 0")


def _by_name(kind: str, given: Any, wanted: type | tuple[str, ...]) -> tuple[dict[str, Any], bool]:
    """Return objects by name, and whether one came without; checks what each can do."""
    if given is None:
        return {}, False
    # ModuleDict and friends are modules, not dicts; a scheduler is neither.
    single = not isinstance(given, Mapping)
    objects: dict[str, Any] = {kind: given} if single else dict(given)
    for name, value in objects.items():
        where = f"{kind}" if single else f"{kind}[{name!r}]"
        if type(name) is not str or not name:
            raise TypeError(f"{kind} has the name {name!r}; names are non-empty strings")
        if isinstance(wanted, type):
            if not isinstance(value, wanted):
                raise TypeError(
                    f"{where} is a {_full_name(type(value))}, not a {_full_name(wanted)}"
                )
        elif missing := [method for method in wanted if not hasattr(value, method)]:
            hint = ""
            if isinstance(value, torch.utils.data.DataLoader):
                hint = ": give the loader to iterate(), which keeps its position"
            raise TypeError(f"{where} is a {_full_name(type(value))} without {missing}{hint}")
    return objects, single


def _full_name(kind: type) -> str:
    """Name *kind* with its module: numpy has a Generator, too."""
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


_STATEFUL = ("state_dict", "load_state_dict")


def make_run(
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    extra: Any,
    tensors: Any,
    generators: Any,
    rng: bool,
    grads: bool,
    allow_pickle: bool,
) -> Run:
    """Check the objects of a run and gather them.

    Raises:
        TypeError: naming the argument that is not what it should be.
        ValueError: there is nothing to save.
    """
    kinds: dict[str, tuple[Any, Any]] = {
        "model": (model, nn.Module),
        "optimizer": (optimizer, Optimizer),
        "scheduler": (scheduler, _STATEFUL),
        "scaler": (scaler, _STATEFUL),
        "extra": (extra, _STATEFUL),
        "tensors": (tensors, torch.Tensor),
        "generators": (generators, torch.Generator),
    }
    found: dict[str, dict[str, Any]] = {}
    single = []
    for kind, (given, wanted) in kinds.items():
        if kind in ("extra", "tensors", "generators") and not isinstance(given, Mapping | None):
            raise TypeError(f"{kind} is a {type(given).__name__}; it takes a dict by name")
        found[kind], alone = _by_name(kind, given, wanted)
        if alone:
            single.append(kind)
    if not any(found[kind] for kind in ("model", "optimizer", "tensors", "extra")):
        raise ValueError("there is nothing to save: give a model, an optimizer, tensors or extra")
    optimizers = {name: inner_optimizer(item) for name, item in found["optimizer"].items()}
    return Run(
        models=found["model"],
        optimizers=with_nested(optimizers),
        given=tuple(optimizers),
        schedulers=found["scheduler"],
        scalers=found["scaler"],
        extras=found["extra"],
        # The caller's own dict, if it is one: another tensor may take a name in it.
        tensors=tensors if isinstance(tensors, dict) else found["tensors"],
        generators=found["generators"],
        rng=rng,
        grads=grads,
        allow_pickle=allow_pickle,
        single=tuple(single),
    )


def estimate_bytes(run: Run, keep: int) -> int:
    """Estimate the bytes of a store for *run*: optimizer state appears at the first update only."""
    owned = {
        id(p): p.numel() * p.element_size()
        for optimizer in run.optimizers.values()
        for group in optimizer.param_groups
        for p in group["params"]
        if not is_uninitialised(p)
    }
    tensors = {id(t): t for t in run.tensors.values()}
    for model in run.models.values():
        tensors |= {id(held.tensor): held.tensor for held in held_tensors(model)}
    plain: int = sum(
        t.numel() * t.element_size()
        for t in tensors.values()
        if not is_uninitialised(t) and id(t) not in owned
    )
    state: int = sum(owned.values())
    return (plain + state * (1 + STATE_PER_PARAMETER)) * (keep + 1)


def open_store(path: Path, settings: Settings, run: Run) -> Store:
    """Open the store, or make it; checks first that the file system has room for what will come.

    Raises:
        NoSpaceError: with the bytes needed and free.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} does not exist")
    if not path.exists() and settings.size is None and settings.media != "heap":
        import os

        # Where a link leads, even if there is nothing yet: there the store is made.
        home = Path(os.path.realpath(path)).parent
        if not home.is_dir():
            raise FileNotFoundError(f"the folder of {path}, which leads to {home}, does not exist")
        volume = os.statvfs(home)
        free, needed = volume.f_bavail * volume.f_frsize, estimate_bytes(run, settings.keep)
        if needed > free:
            raise NoSpaceError(
                f"{path} will need about {needed} bytes for keep={settings.keep}, estimated with "
                f"two state tensors per parameter; {free} are free. Give size= if you know better"
            )
    return Store(
        path,
        create=True,
        media=MEDIA[settings.media],
        catalog=CATALOG[settings.catalog],
        size_bytes=settings.size or 0,
        workers=settings.workers,
        staging_bytes=settings.staging,
    )
