"""Loop: the training loop's iterations, and where in the data each of them stands.

Asking for the next batch ends an iteration; exhaustion ends the last one; ``break`` and exceptions
end none. The position in the data is the epoch, the batches taken from it, and the random
generators as they were before the epoch's iterator was made: making one draws from them (a
DataLoader takes its base seed from torch's global generator), and a shuffling sampler its
permutation. The extras belong to that moment too: samplers, datasets and transforms may draw from
a generator that one of them holds. To resume, that moment is set again, the iterator made, the
batches taken are drawn once more, and then extras and generators get the values of the boundary.

Where worker processes persist, only a loader's first iterator draws a base seed; the same is seen
to on resuming. The workers' own generators start anew.

A loader with ``state_dict`` that is registered as an ``extra`` keeps its own position instead.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .capture import Run
from .collect import encode_extras, load_extras
from .rng import State, apply_rng, capture_rng


class Loop:
    """The position of one ``iterate``; its ``state`` is part of every version.

    Args:
        source: what is iterated, once per epoch.
        epochs: how often; None for once.
        run: whose generators and extras may decide the order.
        own_position: the source keeps its position itself.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        epochs: int | None,
        run: Run,
        own_position: bool,
    ) -> None:
        self._source, self._epochs, self._run = source, epochs, run
        self._generators = {**run.generators, **_generators_of(source)}
        self._own_position = own_position
        self._before: State = {}
        self.epoch = 0
        self.position = 0

    @property
    def state(self) -> dict[str, Any]:
        """Epoch, position in it, generators before it and now; plain values and tensors."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "before": self._before,
            "now": capture_rng(_generators_of(self._source), everything=False),
        }

    def batches(self, resume: tuple[dict[str, Any], State] | None) -> Iterator[Any]:
        """Yield the batches; *resume* is the saved state and the generators of the boundary."""
        last = 1 if self._epochs is None else self._epochs
        if resume is not None:
            saved, now = resume
            yield from self._resumed(saved, now)
        while self.epoch < last:
            self.position = 0
            yield from self._epoch()

    def _resumed(self, saved: dict[str, Any], now: State) -> Iterator[Any]:
        self.epoch, self._before = saved["epoch"], saved["before"]
        extras = encode_extras(self._run)
        if self._before:
            _set_persistent(self._source, self._before.get("persistent", False))
            load_extras(self._run, self._before.get("extras", b""))
            apply_rng(self._before, self._generators)
        self._set_epoch()
        iterator = iter(self._source)
        self.position = 0
        while self.position < saved["position"]:
            # An epoch that is shorter than it was ends early, like any other.
            if not self._own_position and next(iterator, _END) is _END:
                break
            self.position += 1
        if self._before:
            load_extras(self._run, extras)
        apply_rng(saved["now"], self._generators)
        apply_rng(now, self._generators)
        yield from self._take(iterator)

    def _epoch(self) -> Iterator[Any]:
        self._set_epoch()
        self._before = {}
        if not self._own_position:
            self._before = {
                **capture_rng(self._generators, everything=self._run.rng),
                "persistent": _has_workers(self._source),
                "extras": encode_extras(self._run),
            }
        yield from self._take(iter(self._source))

    def _take(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self.position += 1
            yield batch
        self.epoch += 1

    def _set_epoch(self) -> None:
        """Tell a distributed sampler which epoch it is, as its users otherwise forget to."""
        sampler = getattr(self._source, "sampler", None)
        for owner in (sampler, getattr(self._source, "batch_sampler", None)):
            set_epoch: Callable[[int], None] | None = getattr(owner, "set_epoch", None)
            if set_epoch is not None and self._epochs is not None:
                set_epoch(self.epoch)


_END = object()


def _has_workers(source: Any) -> bool:
    """Does *source* keep an iterator, with its worker processes, for all epochs?"""
    return getattr(source, "_iterator", None) is not None


def _set_persistent(source: Any, wanted: bool) -> None:
    """Give *source* its lasting iterator, or take it away, as it was when the epoch began."""
    if getattr(source, "persistent_workers", False) and wanted != _has_workers(source):
        source._iterator = None
        if wanted:
            iter(source)


def _generators_of(source: Any) -> dict[str, torch.Generator]:
    """Return the private generators of a DataLoader and its sampler."""
    found: dict[str, torch.Generator] = {}
    for name in ("generator", "sampler.generator", "batch_sampler.sampler.generator"):
        owner: Any = source
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if isinstance(owner, torch.Generator) and all(owner is not g for g in found.values()):
            found[f"loader.{name}"] = owner
    return found
