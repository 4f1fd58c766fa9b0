"""Snapshots: which way bytes leave a GPU. As asked, or as measured on the run's first versions.

The ways are LightCheck's three (its variants D, C and G): *direct*, the copy engine writes into the
store; *host*, through pinned staging; *device*, aside on the GPU first. What a machine allows is
found by trying. ``auto`` takes turns on the first versions, and then keeps the quicker of direct
and host; or takes *device* where that one still needs most of an iteration, so that the guard would
hold the next update back for it, if the GPU has room to spare: that memory is not torch's, and
what is taken can fail training that needs it later.
"""

from dataclasses import dataclass, field
from statistics import median

from . import gpus
from ._core import Device, Snapshot, Store
from .errors import NoSpaceError

SNAPSHOTS = ("auto", *(way.name.lower() for way in Snapshot))
TRIAL_VERSIONS = 3  # of each way
ASIDE_SHARE = 0.8  # of an iteration, that a copy may take before it is put aside
SPARE_SHARE = 0.1  # of a GPU's memory, that a copy aside must leave to training


@dataclass
class _Trial:
    """What was measured on one GPU: seconds per byte by way, and seconds of whole versions."""

    device: Device
    ways: list[Snapshot]
    rates: dict[Snapshot, list[float]] = field(default_factory=dict)
    versions: int = 0
    total: int = 0  # bytes of the last version
    chosen: Snapshot | None = None
    why: str = ""


class Snapshots:
    """Chooses the way for each GPU of a run; a GPU is opened when it is first asked for.

    Args:
        wanted: one of ``SNAPSHOTS``.
    """

    def __init__(self, store: Store, wanted: str = "auto") -> None:
        self._store, self._wanted = store, wanted
        self._trials: dict[int, _Trial] = {}

    def way(self, ordinal: int) -> Snapshot:
        """Return the way for the version that is being made.

        Raises:
            NotFoundError: no CUDA driver, or no such device.
        """
        trial = self._trials.get(ordinal) or self._open(ordinal)
        if trial.chosen is not None:
            return trial.chosen
        return trial.ways[trial.versions % len(trial.ways)]

    def _open(self, ordinal: int) -> _Trial:
        device = self._store.open_device(ordinal)
        trial = self._trials[ordinal] = _Trial(device, [Snapshot.HOST])
        if self._wanted != "auto":
            trial.chosen, trial.why = Snapshot[self._wanted.upper()], "as asked for"
        elif device.direct:
            trial.ways = [Snapshot.DIRECT, Snapshot.HOST]
        else:
            trial.why = f"its copy engines do not reach the store: {device.why_not}"
        return trial

    def note(self, ordinal: int, way: Snapshot, rates: list[float], total: int) -> None:
        """Take the seconds per byte of a version's batches, *total* bytes in all."""
        trial = self._trials[ordinal]
        if trial.chosen is None and rates:
            trial.rates.setdefault(way, []).append(max(rates))
            trial.versions += 1
            trial.total = total

    def decide(self, iteration: float) -> None:
        """Choose, where enough was measured; *iteration* is one's seconds."""
        for ordinal, trial in self._trials.items():
            if trial.chosen is not None or trial.versions < TRIAL_VERSIONS * len(trial.ways):
                continue
            medians = {way: median(rates) for way, rates in trial.rates.items()}
            best = min(medians, key=lambda way: medians[way])
            seconds = medians[best] * trial.total
            measured = ", ".join(
                f"{way.name.lower()} {1 / rate / 1e9:.1f} GB/s" for way, rate in medians.items()
            )
            trial.chosen = best
            if seconds > ASIDE_SHARE * iteration:
                measured += f"; a copy takes {seconds:.3f} s of an iteration's {iteration:.3f} s"
                free, whole = gpus.memory_of(ordinal)
                if free - trial.total >= SPARE_SHARE * whole:
                    trial.chosen = Snapshot.DEVICE
                else:
                    measured += f", but of {whole:,} bytes of memory {free:,} are free"
            trial.why = f"{measured}. {trial.why}".strip(" .")

    def failed(self, ordinal: int, error: Exception) -> None:
        """Where a way that was not asked for has failed, take the next best from now on."""
        trial = self._trials[ordinal]
        aside = trial.chosen is Snapshot.DEVICE
        if self._wanted != "auto" or not (aside or Snapshot.DIRECT in trial.ways):
            return
        no_room = aside and isinstance(error, NoSpaceError)
        trial.chosen = Snapshot.DIRECT if no_room and trial.device.direct else Snapshot.HOST
        trial.ways = [trial.chosen]
        trial.why = f"{trial.why}; the way before it failed: {error}".lstrip("; ")

    def report(self) -> list[str]:
        """Say which way each GPU has, and why."""
        return [
            f"cuda:{ordinal} ({trial.device.name}): "
            f"{trial.chosen.name.lower() if trial.chosen is not None else 'being measured'}"
            f"{': ' + trial.why if trial.why else ''}"
            for ordinal, trial in sorted(self._trials.items())
        ]
