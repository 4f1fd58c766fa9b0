"""Stats: what checkpointing did to a run, in numbers; and what it chose, in words."""

from dataclasses import dataclass
from typing import Any

from .interval import IntervalTuner, ModeTrial
from .settings import Settings
from .snapshots import Snapshots
from .trust import Trust


@dataclass
class Stats:
    """Counts since the checkpointer was made; seconds are of training waiting.

    ``busy_seconds`` is the part of ``boundary_seconds`` spent on the version before.
    """

    iterations: int = 0
    versions: int = 0
    skipped: int = 0
    dropped: int = 0
    boundary_seconds: float = 0.0
    guard_seconds: float = 0.0
    busy_seconds: float = 0.0


def reasons(
    settings: Settings,
    trial: ModeTrial | None,
    tuner: IntervalTuner | None,
    snapshots: Snapshots,
    trust: Trust,
) -> dict[str, Any]:
    """Return what was chosen and why: mode, interval, each GPU's way, and the volatile tensors."""
    mode, interval = settings.mode, str(settings.every)
    if trial is not None:
        mode = f"{trial.mode()}: {trial.why}"
    if tuner is not None:
        interval = f"{tuner.choice.interval}: {tuner.choice.why}"
    found = {"mode": mode, "every": interval, "volatile": trust.report()}
    if ways := snapshots.report():
        found["snapshot"] = ways
    return found
