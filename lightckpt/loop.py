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

A program may iterate several sources, one after the other. A call with ``epochs`` is a *phase* of
it, unless its source is that of the call before. After a restore, the phases before the version's
were complete and yield nothing. A call without ``epochs`` is one pass, of many in a loop of the
caller's, which itself begins where it was: it is never passed over.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .capture import Run
from .collect import encode_extras, load_extras
from .errors import CheckpointWarning
from .rng import State, apply_rng, capture_rng, generators_of

_END = object()
_WRAPPED = ("iterable", "loader", "dataloader")  # where progress bars and the like have a loader
_PARTS = ("sampler", "batch_sampler", "dataset")
_DEPTH_MAX = 5  # of parts within parts: some objects make an attribute up for every name


class Loop:
    """The position of one ``iterate``; its ``state`` is part of every version.

    Args:
        source: what is iterated, once per epoch.
        epochs: how often; None for once.
        phase: phases of the program before this one.
        run: whose generators and extras may decide the order.
    """

    def __init__(self, source: Iterable[Any], *, epochs: int | None, phase: int, run: Run) -> None:
        self.source, self.epochs, self.phase, self._run = source, epochs, phase, run
        within = list(_unwrapped(source))
        self.loader = within[-1]
        # One that keeps its position itself.
        self.own_position = any(at is item for at in within for item in run.extras.values())
        self._parts = _parts_of(source)
        self._before: State = {}
        self.epoch = 0
        self.position = 0

    @property
    def state(self) -> dict[str, Any]:
        """Phase, epoch, position in it, generators before it and now; plain values and tensors."""
        return {
            "phase": self.phase,
            "epoch": self.epoch,
            "position": self.position,
            "before": self._before,
            "now": capture_rng(_generators_of(self._parts), everything=False),
        }

    def batches(self, resume: tuple[dict[str, Any], State] | None) -> Iterator[Any]:
        """Yield the batches; *resume* is the saved state and the generators of the boundary."""
        last = 1 if self.epochs is None else self.epochs
        if resume is not None:
            saved, now = resume
            yield from self._resumed(saved, now)
        while self.epoch < last:
            self.position = 0
            yield from self._epoch()

    def _resumed(self, saved: dict[str, Any], now: State) -> Iterator[Any]:
        self.epoch, self._before = saved["epoch"], saved["before"]
        self._parts = _parts_of(self.source)
        extras = encode_extras(self._run)
        if self._before:
            _set_persistent(self.loader, self._before.get("persistent", False))
            load_extras(self._run, self._before.get("extras", b""))
            apply_rng(self._before, self._generators())
        self._set_epoch()
        iterator = iter(self.source)
        self.position = 0
        while self.position < saved["position"]:
            # An epoch that is shorter than it was ends early, like any other.
            if not self.own_position and next(iterator, _END) is _END:
                break
            self.position += 1
        if self._before:
            load_extras(self._run, extras)
        apply_rng(saved["now"], self._generators())
        apply_rng(now, self._generators())
        yield from self._take(iterator)

    def _epoch(self) -> Iterator[Any]:
        self._set_epoch()
        self._parts = _parts_of(self.source)
        self._before = {}
        if not self.own_position:
            self._before = {
                **capture_rng(self._generators(), everything=self._run.rng),
                "persistent": _has_workers(self.loader),
                "extras": encode_extras(self._run),
            }
        yield from self._take(iter(self.source))

    def _take(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self.position += 1
            yield batch
        self.epoch += 1

    def _generators(self) -> dict[str, Any]:
        return {**self._run.generators, **_generators_of(self._parts)}

    def _set_epoch(self) -> None:
        """Tell a distributed sampler which epoch it is, as its users otherwise forget to."""
        sampler = getattr(self.loader, "sampler", None)
        for owner in (sampler, getattr(self.loader, "batch_sampler", None)):
            set_epoch: Callable[[int], None] | None = getattr(owner, "set_epoch", None)
            if set_epoch is not None and self.epochs is not None:
                set_epoch(self.epoch)


class Loops:
    """The ``iterate`` calls of one checkpointer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loop: Loop | None = None  # of the newest call since construction or restore
        self._begun = 0  # phases since then
        self._resume: tuple[dict[str, Any], State] | None = None  # until a call takes it up
        self._last: Loop | None = None  # of the newest call
        self._once: list[Loop] = []  # over what can be gone through once only

    @property
    def state(self) -> dict[str, Any] | None:
        return None if self._loop is None else self._loop.state

    def restored(self, state: dict[str, Any] | None, rng: State) -> None:
        """Let the next calls go on at *state*, of a version with the generators *rng*."""
        self._resume = None if state is None else (state, rng)
        self._loop, self._begun = None, 0

    def went_on(self) -> None:
        """At a boundary: from here on, a position that was restored is out of date."""
        self._resume = None

    def begin(self, source: Iterable[Any], epochs: int | None) -> Iterator[Any]:
        """Return the batches of one call.

        Raises:
            ValueError: *source* is not the one that was restored, or would have to go back.
        """
        phase, last = self._phase_of(source, epochs), self._last
        if self._resume is not None:
            saved = self._resume[0].get("phase", 0)
            # The phase that *source* was in before this process went back.
            before = last.phase if last is not None and last.source is source else None
            if epochs is not None and phase < saved and before != saved:
                self._begun = phase + 1
                warnings.warn(
                    f"iterate() yields nothing for this source: it is number {phase + 1} of those "
                    f"given with epochs=, and number {saved + 1} was reached. A loop of your own "
                    "over epochs calls iterate() without epochs=",
                    CheckpointWarning,
                    stacklevel=3,
                )
                return iter(())
            if before is not None and before > saved:
                raise ValueError(
                    f"the version is from source number {saved + 1} of those given to iterate() "
                    f"with epochs=, and this is number {before + 1}"
                )
            phase = saved
        loop = Loop(source, epochs=epochs, phase=phase, run=self._run)
        if self._resume is not None:
            self._check_fresh(loop.loader)
        if hasattr(type(loop.loader), "__next__") and not loop.own_position:
            self._once.append(loop)
        self._begun = max(self._begun, phase + (epochs is not None))
        resume, self._resume = self._resume, None
        self._loop = self._last = loop
        return loop.batches(resume)

    def _phase_of(self, source: Iterable[Any], epochs: int | None) -> int:
        loop = self._loop
        if epochs is not None and loop is not None and loop.epochs is not None:
            return loop.phase if loop.source is source else self._begun
        return self._begun

    def _check_fresh(self, source: Iterable[Any]) -> None:
        used = any(loop.loader is source and loop.epoch + loop.position for loop in self._once)
        if used and iter(source) is source:
            raise ValueError(
                f"batches were taken from this {type(source).__name__} before, and it cannot go "
                "back to where the restored step was: give iterate() a new one"
            )


def _unwrapped(source: Any) -> Iterator[Any]:
    """Yield *source*, and the loaders that it wraps, from the outside in."""
    for _ in range(_DEPTH_MAX):
        yield source
        inner = (getattr(source, name, None) for name in _WRAPPED)
        found = next((at for at in inner if hasattr(type(at), "__iter__")), None)
        if found is None or found is source:
            return
        source = found


def _has_workers(source: Any) -> bool:
    """Does *source* keep an iterator, with its worker processes, for all epochs?"""
    return getattr(source, "_iterator", None) is not None


def _set_persistent(source: Any, wanted: bool) -> None:
    """Give *source* its lasting iterator, or take it away, as it was when the epoch began."""
    if getattr(source, "persistent_workers", False) and wanted != _has_workers(source):
        source._iterator = None
        if wanted:
            iter(source)


def _parts_of(source: Any) -> list[tuple[str, Any]]:
    """Return a loader, what it wraps and what it is made of, each once and with its path."""
    parts: list[tuple[str, Any]] = []
    level: list[tuple[str, Any]] = [("loader", source)]
    for _ in range(_DEPTH_MAX):
        parts += level
        inner = [
            (f"{path}.{name}", getattr(owner, name, None))
            for path, owner in level
            for name in (*_WRAPPED, *_PARTS)
        ]
        level = [
            (path, part)
            for path, part in inner
            if part is not None and all(part is not known for _, known in parts)
        ]
    return parts


def _generators_of(parts: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the private generators that *parts* have now, each once and with its path."""
    found: dict[str, Any] = {}
    for path, owner in parts:
        for name, generator in generators_of(owner).items():
            if all(generator is not known for known in found.values()):
                found[f"{path}.{name}"] = generator
    return found
