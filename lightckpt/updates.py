"""Updates: what has changed a run since its last boundary, told by hooks or seen without them.

A boundary makes a version where there was an update. Without one it still does where

1. there is nothing to tell: no optimizer, gradients that are captured, an optimizer without hooks
   whose parameters' counters moved;
2. an update is part of a CUDA graph: its replays tell nobody. One that was captured before there
   was anybody to tell is an optimizer on a GPU that never fired while no gradient waited;
3. a scaler skipped the update and changed its scale;
4. a captured tensor was changed by hand (batch norm calibrated, weights averaged or loaded), and no
   gradient waits for an update: within a sum of gradients no version without them is exact.

Which gradients wait, gradients.py says. Those that an update has left behind do not: the next
``zero_grad`` takes them.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from . import gpus
from .capture import Run, scaler_marks, update_counters
from .errors import CheckpointWarning
from .gradients import Cut, Left, by_device, counters_of, is_plain
from .structure import Structure

CUT = (
    "optimizer {} adds gradients up over several iterations, in which others are updated: versions "
    "from in between do not have its sums, and are not exact; use grads=True"
)


class Updates:
    """What hooks told since the last boundary, and what things were like at it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seen = False  # an update, since the last boundary
        self.captured: set[str] = set()  # optimizers whose updates a CUDA graph replays, unseen
        self.order: list[str] = []  # optimizers in the order in which they last fired
        self._stepping: set[str] = set()  # optimizers whose step is running
        self._firing: list[str] = []  # those that fired since the last boundary
        self._scalers: dict[str, Any] = {}
        self._counters: dict[str, list[int]] = {}  # of optimizers that never fired
        # At the last boundary with an update: gradients, and counters of the captured tensors.
        self._left = Left([])
        self._tensors: list[int] | None = None
        # Of the newest structure, to be quick: its tensors, and what no optimizer updates of them.
        self._watched: Structure | None = None
        self._all: list[Tensor] = []
        self._unowned: list[Tensor] = []
        self._unsaved = False  # count the tensors as changed, whatever their counters say
        # By optimizer: what versions did without since its last update; what updates had of that.
        self._cuts: dict[str, list[Cut]] = {}
        self._used: list[tuple[str, Cut, set[int]]] = []
        self._told: set[str] = set()  # optimizers of which that was said
        self.forget(None)

    # -- told ----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Is an optimizer's step running?"""
        return bool(self._stepping)

    def begin(self, name: str) -> None:
        if name in self._stepping:
            self._stepping.clear()  # its last step, and those within it, ended in an exception
        self._stepping.add(name)

    def end(self, name: str) -> None:
        self._stepping.discard(name)
        self.seen = True
        if name not in self._firing:
            self._firing.append(name)

    # -- seen ----------------------------------------------------------------------------------

    def any(self) -> bool:
        """Is there a version to make, but for tensors that were changed by hand?"""
        run = self._run
        if self.seen or self.captured or not run.optimizers or run.grads or self.scaler_moved():
            return True
        silent = self._silent()
        if any(self._counters.get(name) != update_counters(run, name) for name in silent):
            return True
        return any(map(self._on_gpu, silent)) and not self.waiting()

    def _on_gpu(self, name: str) -> bool:
        groups = self._run.optimizers[name].param_groups
        return any(gpus.ordinal_of(p) != gpus.HOST for group in groups for p in group["params"])

    def scaler_moved(self) -> bool:
        """Has a scaler's state changed since the last boundary?"""
        return bool(self._run.scalers) and self._scalers != scaler_marks(self._run)

    def waiting(self) -> bool:
        """Does a gradient wait for an update? Asked last: the answer may lie on a GPU."""
        came, moved = self._left.moved(self._gradients())
        if any(gpus.ordinal_of(grad) != gpus.HOST for grad in came):
            return True
        return _is_any(came + moved)

    def edit(self) -> None:
        """Note a change that no counter shows. It counts until there is a version."""
        self._unsaved = True

    def edited(self, structure: Structure | None) -> bool:
        """Was a tensor of *structure*, which is as it was, changed?"""
        if self._unsaved or structure is None or self._tensors is None:
            return self._unsaved
        return self._tensors != self._counters_of(structure)

    def _counters_of(self, structure: Structure) -> list[int]:
        if self._watched is not structure:
            self._watched = structure
            self._all = [leaf.tensor for leaf in (*structure.leaves, *structure.walk.loose)]
            owned = set().union(*structure.walk.owners.values())
            self._unowned = [
                tensor
                for tensor in self._all
                if id(tensor) not in owned and tensor.requires_grad and tensor.is_leaf
            ]
        return counters_of(self._all)

    def _gradients_of(self, name: str) -> list[Tensor]:
        groups = self._run.optimizers[name].param_groups
        return [g for group in groups for p in group["params"] if (g := p.grad) is not None]

    def _gradients(self) -> list[Tensor]:
        owned = [grad for name in self._run.optimizers for grad in self._gradients_of(name)]
        return owned + [g for p in self._unowned if (g := p.grad) is not None]

    def _silent(self) -> list[str]:
        return [name for name in self._run.optimizers if name not in self.order]

    # -- boundaries ----------------------------------------------------------------------------

    def forget(self, structure: Structure | None, *, unsaved: bool = False) -> bool:
        """Begin anew, at a boundary with an update; True if the order of optimizers changed."""
        changed = False
        if self._firing:
            order = [*self._firing, *(n for n in self.order if n not in self._firing)]
            self.order, changed = order, order != self.order
        self._firing, self.seen, self._unsaved = [], False, unsaved
        self._scalers = scaler_marks(self._run)
        self._counters = {name: update_counters(self._run, name) for name in self._silent()}
        self._tensors = None if structure is None else self._counters_of(structure)
        self._left = Left([] if self._run.grads else self._gradients())
        if unsaved:
            self._cuts, self._used = {}, []
        return changed

    def note_cut(self) -> None:
        """Note the gradients that the version of this boundary, with an update, does without."""
        if self._run.grads or len(self._run.optimizers) == 1:
            return
        for name in self._run.optimizers:
            if name in self._firing or name in self._told:
                continue
            grads = self._gradients_of(name)
            # Those that were taken away, or have turned out to be zero, count for nothing.
            found = [(cut, cut.was_any(cut.held_by(grads))) for cut in self._cuts.get(name, ())]
            self._cuts[name] = [cut for cut, was_any in found if was_any is not False]
            came, moved = self._left.moved(grads)
            if (came or moved) and not any(was_any for _, was_any in found):
                self._cuts[name].append(Cut(came + moved))

    def note_use(self, name: str) -> None:
        """Note what *name*, which begins an update, has of gradients that versions did without.

        What was taken away in between it has not: then others are in its place.
        """
        if cuts := self._cuts.pop(name, ()):
            grads = self._gradients_of(name)
            self._used += [(name, cut, held) for cut in cuts if (held := cut.held_by(grads))]

    def warn_of_cuts(self) -> None:
        """Warn of optimizers that updated with a sum that a version did without; of each once.

        Where a GPU has not said yet whether it was one, a later call hears of it.
        """
        used, self._used = self._used, []
        for name, cut, held in used:
            was_any = cut.was_any(held)
            if was_any is None:
                self._used.append((name, cut, held))
            elif was_any and name not in self._told:
                self._told.add(name)
                warnings.warn(CUT.format(name), CheckpointWarning, 7)


def _is_any(grads: list[Tensor]) -> bool:
    """Is one of *grads* not all zero? Each GPU that they are on is waited for, once."""
    if any(grad.layout != torch.strided for grad in grads):
        return True
    for device, places in sorted(by_device(grads).items()):
        asked = [grads[at] for at in places]
        if device == gpus.HOST or not all(map(is_plain, asked)):
            found = any(bool(grad.any()) for grad in asked)
        else:
            found = bool(gpus.are_nonzero(asked).any())
        if found:
            return True
    return False
