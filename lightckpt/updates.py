"""Updates: what has changed a run since its last boundary, told by hooks or seen without them.

A boundary makes a version where there was an update. Without one it still does where

1. there is nothing to tell: no optimizer, gradients that are captured, an optimizer without hooks
   whose parameters' counters moved;
2. an update is part of a CUDA graph: its replays tell nobody. One that was captured before there
   was anybody to tell is an optimizer on a GPU that never fired while no gradient waited;
3. a scaler skipped the update and changed its scale;
4. a captured tensor was changed by hand (batch norm calibrated, weights averaged or loaded), and no
   gradient waits for an update: within a sum of gradients no version without them is exact.

A gradient waits if it came, or was added to, since the last boundary with an update, and is not all
zero. Gradients that an update has left behind do not wait: the next ``zero_grad`` takes them.
"""

import weakref
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from . import gpus
from .capture import Run, scaler_states, update_counters
from .structure import Structure

_COUNTER = attrgetter("_version")
Ref = weakref.ReferenceType[Tensor]

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
        self._left: list[tuple[Ref, int]] = []
        self._tensors: list[int] | None = None
        # Of the newest structure, to be quick: its tensors, and what no optimizer updates of them.
        self._watched: Structure | None = None
        self._all: list[Tensor] = []
        self._unowned: list[Tensor] = []
        self._unsaved = False  # count the tensors as changed: there was no version, or a restore
        self._cut: dict[str, list[Ref]] = {}  # by optimizer: gradients that a version did without
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
        return bool(self._run.scalers) and self._scalers != scaler_states(self._run)

    def waiting(self) -> bool:
        """Does a gradient wait for an update?"""
        return bool(self._waiting(self._gradients()))

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
        return _counters(self._all)

    def _gradients_of(self, name: str) -> list[Tensor]:
        groups = self._run.optimizers[name].param_groups
        return [g for group in groups for p in group["params"] if (g := p.grad) is not None]

    def _gradients(self) -> list[Tensor]:
        owned = [grad for name in self._run.optimizers for grad in self._gradients_of(name)]
        return owned + [g for p in self._unowned if (g := p.grad) is not None]

    def _silent(self) -> list[str]:
        return [name for name in self._run.optimizers if name not in self.order]

    def _waiting(self, grads: list[Tensor]) -> list[Ref]:
        left = {id(grad): counter for ref, counter in self._left if (grad := ref()) is not None}
        return [
            weakref.ref(grad)
            for grad, counter in zip(grads, _counters(grads), strict=True)
            if left.get(id(grad)) != counter and _is_any(grad)
        ]

    # -- boundaries ----------------------------------------------------------------------------

    def forget(self, structure: Structure | None, *, unsaved: bool = False) -> bool:
        """Begin anew, at a boundary with an update; True if the order of optimizers changed."""
        changed = False
        if self._firing:
            order = [*self._firing, *(n for n in self.order if n not in self._firing)]
            self.order, changed = order, order != self.order
        self._firing, self.seen, self._unsaved = [], False, unsaved
        self._scalers = scaler_states(self._run)
        self._counters = {name: update_counters(self._run, name) for name in self._silent()}
        self._tensors = None if structure is None else self._counters_of(structure)
        left = [] if self._run.grads else self._gradients()
        self._left = list(zip(map(weakref.ref, left), _counters(left), strict=True))
        if unsaved:
            self._cut = {}
        return changed

    def note_cut(self) -> None:
        """Note the gradients that the version of this boundary, with an update, does without."""
        if self._run.grads or len(self._run.optimizers) == 1:
            return
        for name in self._run.optimizers:
            if name in self._firing or name in self._told or name in self._cut:
                continue
            if waiting := self._waiting(self._gradients_of(name)):
                self._cut[name] = waiting

    def was_cut(self, name: str) -> bool:
        """Does *name* begin an update with gradients that a version did without? True once.

        Where they were taken away in between, it does not: then others are in their place.
        """
        if name not in self._cut:
            return False
        held = {id(grad) for ref in self._cut.pop(name) if (grad := ref()) is not None}
        if found := any(id(grad) in held for grad in self._gradients_of(name)):
            self._told.add(name)
        return found


def _counters(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(_COUNTER, tensors))
    except RuntimeError:  # of tensors made in inference mode, which have none
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _is_any(grad: Tensor) -> bool:
    if grad.layout != torch.strided:
        return True
    return bool(grad.any())
