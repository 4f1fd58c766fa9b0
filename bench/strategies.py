"""Ways to checkpoint a training run: the contract, and those that need nothing but torch.

The harness calls, in this order:

    open            once per block, in an empty folder or in one that a killed process left
    restore         brings the workload to the newest checkpoint that loads; 0 if there is none
    before_update   when gradients are there and the next update is about to begin
    after_step      when the update of a step has been made; saves if that step is due
    drain           returns when everything saved so far is as durable as this way makes it
    close           drains, and lets go of everything

``stall`` is what a strategy makes training wait elsewhere than in these calls. A strategy saves
the workload's whole state: parameters, buffers, optimizer, the position in the random input. What
several keep at once, or keep for speed, is what a user who wants it fast would have: each is
configured at its best for one process that saves often.
"""

import json
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from state import digest, scramble, tensors_of
from workloads import Workload

GROUP_TABLE, GROUP_MEDIA, GROUP_GPU = "table", "media", "gpu"


class UnavailableError(Exception):
    """A strategy cannot run here; the message is the reason, and goes into the report."""


class Strategy:
    """A way to checkpoint.

    Args:
        folder: all that it writes lies in here.
        every: a checkpoint each so many steps.
    """

    name: ClassVar[str] = ""
    group: ClassVar[str] = GROUP_TABLE
    kind: ClassVar[str] = ""  # strategies of one kind restore from the same bytes
    warmup: ClassVar[int] = 1  # saves until its buffers and processes are there
    mapped: ClassVar[bool] = False  # its files are mapped into this process
    copies: ClassVar[float] = 2.0  # of the state, in memory and files together, at most
    shared: ClassVar[bool] = True  # saves where all others do

    def __init__(self, folder: Path, workload: Workload, every: int) -> None:
        self.folder, self.workload, self.every = folder, workload, every
        self.durable = 0  # the newest step that is known to be safe

    @classmethod
    def check(cls) -> None:
        """Raise UnavailableError if it cannot run here."""

    def open(self) -> None:
        """Get ready."""

    def before_update(self) -> None:
        """Wait until the update may change the state."""

    def after_step(self, step: int) -> None:
        """Save, if *step* is due."""
        if step % self.every == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Start, or make, the checkpoint of *step*."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until what was saved is durable."""

    def stall(self) -> float:
        """Return the seconds that training waited elsewhere, since this was last asked."""
        return 0.0

    def persists(self) -> list[tuple[int, int]]:
        """Return (begin, end) of the latest copies that ran behind training, in ns, if known."""
        return []

    def close(self) -> None:
        """Drain, and let go of everything."""
        self.drain()

    @classmethod
    def discard(cls, folder: Path) -> None:
        """Remove what a strategy left in *folder*, which is nobody's now."""
        empty(folder)

    def restore(self) -> int:
        """Bring the workload to the newest checkpoint; returns its step, 0 if there is none.

        Raises:
            Exception: whatever the library raises when nothing that is there loads.
        """
        raise NotImplementedError


def saved_step(strategy: Strategy, step: int) -> float:
    """Train a step and save it as *step*; return the seconds that training waited for that."""
    waited = 0.0

    def before_update() -> None:
        nonlocal waited
        begin = time.perf_counter()
        strategy.before_update()
        waited += time.perf_counter() - begin

    strategy.workload.step(before_update)
    begin = time.perf_counter()
    strategy.after_step(step)
    return waited + time.perf_counter() - begin + strategy.stall()


def restore_over_zeros(strategy: Strategy, step: int) -> float:
    """Overwrite all tensors and restore *step*, which was saved; return the seconds that took.

    Raises:
        AssertionError: it was another step, or other bytes.
    """
    state = strategy.workload.state
    saved = digest(state())
    scramble(state())
    begin = time.perf_counter()
    found = strategy.restore()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - begin
    same = digest(state()) == saved
    if not same or found != step:
        raise AssertionError(
            f"{strategy.name} saved step {step} and restored step {found}, "
            f"{'the same' if same else 'other'} bytes"
        )
    return took


def need(module: str, package: str = "") -> None:
    """Raise UnavailableError if *module* is not installed."""
    if find_spec(module) is None:
        raise UnavailableError(f"{package or module} is not installed")


class TorchSave(Strategy):
    """torch.save over the old file, as most scripts do; a crash on the way leaves none."""

    name, kind = "torch.save", "torch.save"
    # Mapped tensors stay in the file, and this one is cut when it is written again.
    maps: ClassVar[bool] = False

    def save(self, step: int) -> None:
        torch.save({"step": step} | self.workload.state(), self.folder / "latest.pt")
        self.durable = step

    def restore(self) -> int:
        path = self.folder / "latest.pt"
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True, mmap=self.maps)
        self.workload.load(state)
        return int(state["step"])


class TorchSaveSafe(TorchSave):
    """torch.save into a temporary file, fsync, rename, fsync of the folder."""

    name, copies, maps = "torch.save-safe", 3.0, True

    def save(self, step: int) -> None:
        with replacing(self.folder / "latest.pt") as temporary:
            torch.save({"step": step} | self.workload.state(), temporary)
        self.durable = step


class replacing:  # noqa: N801 - reads as a statement
    """Write a temporary file in the ``with`` block; at its end it is durably put in place."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_suffix(".tmp")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            sync(self._temporary)
            os.replace(self._temporary, self._path)
            sync(self._path.parent)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Safetensors(Strategy):
    """safetensors.torch.save_file, put in place as TorchSaveSafe does."""

    name, kind, copies = "safetensors", "safetensors", 3.0

    @classmethod
    def check(cls) -> None:
        need("safetensors")

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        state = self.workload.state()
        groups = state["optimizer"]["param_groups"]
        with replacing(self.folder / "latest.safetensors") as temporary:
            words = {"step": str(step), "groups": json.dumps(groups)}
            save_file(tensors_of(state), temporary, metadata=words)
        self.durable = step

    def restore(self) -> int:
        from safetensors import safe_open

        path = self.folder / "latest.safetensors"
        if not path.exists():
            return 0
        with safe_open(path, framework="pt") as file, torch.no_grad():
            words = file.metadata()
            state = self.workload.state()
            # Bytes go straight into the live tensors where those exist; an optimizer that has
            # made no step has no state yet, and gets the tensors as they were read.
            live = tensors_of(state)
            moments: dict[int, dict[str, Tensor]] = {}
            for name in file.keys():  # noqa: SIM118 - no mapping
                part, _, rest = name.partition("/")
                if name in live:
                    live[name].copy_(file.get_tensor(name))
                elif part == "optimizer":
                    _, index, key = rest.split("/")
                    moments.setdefault(int(index), {})[key] = file.get_tensor(name)
                else:
                    raise KeyError(f"{path} has {name}, the model has not")
            if moments:
                groups = json.loads(words["groups"])
                self.workload.optimizer.load_state_dict({"state": moments, "param_groups": groups})
            self.workload.generator.set_state(state["random"])
        return int(words["step"])


def empty(folder: Path) -> None:
    """Remove all that is in *folder*."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
