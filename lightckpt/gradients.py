"""Gradients: which of them wait for an update, and which a version did without.

A gradient waits if it came, or was added to, since the last boundary with an update, and is not all
zero. That its counter stands where it stood says that it does not; where the counter moved, only
its bytes say whether it was added to or zeroed. To look into those on a GPU is to wait for it, so
that is left until nothing else tells:

1. one that is another tensor than the one that was there has come, and waits. Who takes gradients
   away does not zero them in place as well;
2. those that are the same tensors are asked about at once;
3. what a version did without is asked when the version is made, and read when the answer has come
   and somebody needs it: mostly those gradients are gone by then.
"""

import weakref
from operator import attrgetter

import torch
from torch import Tensor

from . import gpus

_COUNTER = attrgetter("_version")


def counters_of(tensors: list[Tensor]) -> list[int]:
    """Return the version counters; -1 for tensors made in inference mode, which have none."""
    try:
        return list(map(_COUNTER, tensors))
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def is_plain(grad: Tensor) -> bool:
    """Has it bytes of its own, and no class that gives its operations another meaning?"""
    return type(grad) is Tensor and grad.layout == torch.strided


def by_device(tensors: list[Tensor]) -> dict[int, list[int]]:
    """Return the places in *tensors* of those on each device."""
    places: dict[int, list[int]] = {}
    for at, tensor in enumerate(tensors):
        places.setdefault(gpus.ordinal_of(tensor), []).append(at)
    return places


class Left:
    """Gradients as they were at a boundary with an update: those that it has left behind."""

    def __init__(self, grads: list[Tensor]) -> None:
        self._pairs = list(zip(map(weakref.ref, grads), counters_of(grads), strict=True))

    def moved(self, grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return those of *grads* that came since then, and those whose counters moved."""
        left = {id(grad): counter for ref, counter in self._pairs if (grad := ref()) is not None}
        came, moved = [], []
        for grad, counter in zip(grads, counters_of(grads), strict=True):
            if id(grad) not in left:
                came.append(grad)
            elif left[id(grad)] != counter:
                moved.append(grad)
        return came, moved


class Cut:
    """Gradients that a version did without: which of them were not all zero, and are still there.

    Those that are not plain are taken to be not all zero.
    """

    def __init__(self, grads: list[Tensor]) -> None:
        self._refs = list(map(weakref.ref, grads))
        self._known = {at: True for at, grad in enumerate(grads) if not is_plain(grad)}
        self._coming: list[tuple[list[int], gpus.Answer]] = []
        for places in by_device(grads).values():
            if asked := [at for at in places if at not in self._known]:
                self._coming.append((asked, gpus.Answer([grads[at] for at in asked])))

    def held_by(self, grads: list[Tensor]) -> set[int]:
        """Return the places of those that are among *grads*: neither replaced nor taken away."""
        now = set(map(id, grads))
        there = enumerate(ref() for ref in self._refs)
        return {at for at, grad in there if grad is not None and id(grad) in now}

    def was_any(self, places: set[int]) -> bool | None:
        """Was one of those in *places* not all zero? None while a GPU has yet to say."""
        coming, self._coming = self._coming, []
        for asked, answer in coming:
            if (found := answer.get()) is None:
                self._coming.append((asked, answer))
            else:
                self._known |= zip(asked, found, strict=True)
        if any(self._known.get(at) for at in places):
            return True
        return False if places <= self._known.keys() else None
