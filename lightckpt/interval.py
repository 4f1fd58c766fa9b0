"""How often to checkpoint, and how: decided from measured times by pure functions.

The interval is the smallest that keeps the measured overhead within a budget, after CheckFreq
(Mohan et al., FAST 2021); unlike there it is adjusted both ways, and measured by comparing
iterations that carried a checkpoint with ones that did not, since overlap and contention show in
no single stall. The mode is the one whose iterations are shorter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 16  # latest iterations of each kind that count
INTERVAL_MAX = 10_000
PROBE_EVERY = 64  # at an interval of 1, one boundary in so many makes no version, to measure
TRIAL_BLOCK = 4  # iterations per turn when modes are compared
TRIAL_BLOCKS = 4  # turns: overlap, stop, stop, overlap


@dataclass(frozen=True)
class Choice:
    """An interval in iterations, and in words how it came about."""

    interval: int
    why: str


def choose_interval(plain: Sequence[float], loaded: Sequence[float], budget: float) -> Choice:
    """Return the smallest interval whose overhead stays within *budget*.

    With c the extra seconds of an iteration that carries a checkpoint and t the seconds of a plain
    one, checkpointing every n iterations costs c / (n t); so n = ceil(c / (budget t)).

    Args:
        plain: seconds of iterations without a checkpoint.
        loaded: seconds of iterations with one.
        budget: allowed overhead as a fraction, above 0.
    """
    if not budget > 0:
        raise ValueError(f"overhead={budget} must be above 0")
    if not plain or not loaded:
        return Choice(1, "not measured yet")
    t, c = median(plain), max(0.0, median(loaded) - median(plain))
    interval = min(INTERVAL_MAX, max(1, math.ceil(c / (budget * t) - 1e-9)))
    return Choice(
        interval,
        f"a checkpoint adds {c * 1e3:.2f} ms to iterations of {t * 1e3:.2f} ms: every {interval} "
        f"costs {c / (interval * t):.1%} of the {budget:.1%} allowed",
    )


@dataclass
class IntervalTuner:
    """Feeds :func:`choose_interval` with the newest measurements; adjusts both ways.

    The first boundaries alternate, so that both kinds are measured before anything is decided.
    """

    budget: float
    plain: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    choice: Choice = Choice(1, "not measured yet")
    _since: int = 0  # boundaries since the last version
    _boundaries: int = 0

    def record(self, seconds: float, *, with_version: bool) -> None:
        """Take the seconds of an iteration that did or did not carry a version."""
        times = self.loaded if with_version else self.plain
        times.append(seconds)
        del times[:-WINDOW]
        if len(self.plain) >= WINDOW // 4 and len(self.loaded) >= WINDOW // 4:
            self.choice = choose_interval(self.plain, self.loaded, self.budget)

    def is_due(self) -> bool:
        """Should the boundary that has been reached make a version?"""
        self._boundaries += 1
        self._since += 1
        if len(self.plain) < WINDOW // 4 or len(self.loaded) < WINDOW // 4:
            due = self._boundaries % 2 == 1
        elif self.choice.interval == 1:
            due = self._boundaries % PROBE_EVERY != 0
        else:
            due = self._since >= self.choice.interval
        if due:
            self._since = 0
        return due


@dataclass
class ModeTrial:
    """Compares overlapped with stop-and-copy versions on the run itself, in alternating turns."""

    times: dict[str, list[float]] = field(default_factory=lambda: {"overlap": [], "stop": []})
    turn: int = 0
    decided: str = ""
    why: str = "not measured yet"

    def mode(self) -> str:
        """Return the mode for the next version."""
        if self.decided:
            return self.decided
        return ("overlap", "stop", "stop", "overlap")[self.turn // TRIAL_BLOCK % TRIAL_BLOCKS]

    def record(self, mode: str, seconds: float) -> None:
        """Take the seconds of an iteration whose version was made in *mode*."""
        if self.decided:
            return
        # The first of a turn still pays for the turn before it.
        if self.turn % TRIAL_BLOCK:
            self.times[mode].append(seconds)
        self.turn += 1
        if self.turn < TRIAL_BLOCK * TRIAL_BLOCKS:
            return
        overlap, stop = median(self.times["overlap"]), median(self.times["stop"])
        self.decided = "overlap" if overlap <= stop else "stop"
        self.why = (
            f"iterations take {overlap * 1e3:.2f} ms when copying overlaps, "
            f"{stop * 1e3:.2f} ms when training stops to copy"
        )
