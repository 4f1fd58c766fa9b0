"""What the demo found out, as data; no process, no torch, nothing drawn.

Definitions, since the numbers are only worth what they mean:

- *Steps lost* by a kill: the last step the trainer had reported finished, less the step its
  successor resumed at, at least 0. The step in flight at the kill was not finished, and is not
  counted; *work lost* counts it: the time from the end of the step resumed at to the kill.
- *Time to resume*: from the start of the new process (interpreter, imports, building the model) to
  the end of its first step. The restore() call alone is given beside it.
- *Added per step*: the median step of a block with checkpoints less the median step of the block
  without, of the same round; then the median over rounds, and the range.
- *Identical*: sha256 of each part of the final state equals the uninterrupted run's, and every loss
  that was reported, those of repeated steps included, has its bits.
"""

import itertools
from dataclasses import dataclass, field
from statistics import median, quantiles

METHODS = ("plain", "lightckpt", "torch.save")
NOISE_MAX = 0.25


@dataclass(frozen=True)
class Finished:
    """A report that iteration ``step`` has ended; ``loss`` as the bits of a float32.

    What was persisted is counted from the start of the process.
    """

    step: int
    loss: str
    at_ns: int
    persisted_bytes: int = 0
    persisted_versions: int = 0


@dataclass
class Life:
    """One trainer process, from its start to its end or its kill; times in nanoseconds."""

    started_ns: int
    ready_ns: int = 0
    parameters: int = 0
    resumed_step: int = 0
    restore_ns: tuple[int, int] = (0, 0)
    finished: list[Finished] = field(default_factory=list)
    killed_ns: int | None = None
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """What one kill cost, in this module's terms; ``build_s`` is the part before restore()."""

    reported_step: int
    resumed_step: int
    steps_lost: int
    work_lost_s: float
    restore_s: float
    build_s: float
    resume_s: float


@dataclass(frozen=True)
class Cost:
    """Step times of one method, in seconds; ``added_s`` has (median, least, most) over rounds."""

    median_s: float
    quartiles_s: tuple[float, float]
    added_s: tuple[float, float, float]
    steps: int


@dataclass(frozen=True)
class Identity:
    """Which parts equal the uninterrupted run's; ``losses`` as (equal, compared)."""

    parts: dict[str, bool]
    digests: dict[str, str]
    losses: tuple[int, int]
    steps_missing: int

    @property
    def holds(self) -> bool:
        equal, compared = self.losses
        return all(self.parts.values()) and equal == compared > 0 and self.steps_missing == 0


def count_kills(lives: list[Life]) -> list[Kill]:
    """Return what each kill of a run cost, given all its *lives* in order."""
    kills: list[Kill] = []
    ended_ns = {0: lives[0].restore_ns[1]}
    reported = 0
    for life, successor in itertools.pairwise(lives):
        assert life.killed_ns is not None, "a life with a successor was killed"
        for report in life.finished:
            ended_ns[report.step], reported = report.at_ns, report.step
        resumed = successor.resumed_step
        # A step that is durable but was never reported ended when the kill came: nothing is lost.
        work_ns = life.killed_ns - ended_ns.get(resumed, life.killed_ns)
        first_ns = successor.finished[0].at_ns if successor.finished else successor.restore_ns[1]
        kills.append(
            Kill(
                reported_step=reported,
                resumed_step=resumed,
                steps_lost=max(0, reported - resumed),
                work_lost_s=work_ns / 1e9,
                restore_s=(successor.restore_ns[1] - successor.restore_ns[0]) / 1e9,
                build_s=(successor.ready_ns - successor.started_ns) / 1e9,
                resume_s=(first_ns - successor.started_ns) / 1e9,
            )
        )
    return kills


def compare(golden: Life, lives: list[Life]) -> Identity:
    """Compare the run that was killed with the *golden* one that was not."""
    expected = {report.step: report.loss for report in golden.finished}
    reports = [report for life in lives for report in life.finished]
    equal = sum(expected.get(report.step) == report.loss for report in reports)
    final = lives[-1].digests
    return Identity(
        parts={part: final.get(part) == digest for part, digest in golden.digests.items()},
        digests=golden.digests,
        losses=(equal, len(reports)),
        steps_missing=len(expected.keys() - {report.step for report in reports}),
    )


def costs(samples: list[tuple[str, int, int]]) -> dict[str, Cost]:
    """Return the cost of each method from *samples* of (method, round, step in nanoseconds)."""
    rounds = sorted({number for _method, number, _ns in samples})
    blocks = {
        (method, number): median(ns for m, n, ns in samples if (m, n) == (method, number))
        for method in METHODS
        for number in rounds
    }
    found: dict[str, Cost] = {}
    for method in METHODS:
        steps = [ns / 1e9 for m, _number, ns in samples if m == method]
        added = [(blocks[method, n] - blocks["plain", n]) / 1e9 for n in rounds]
        low, _middle, high = quantiles(steps, n=4)
        found[method] = Cost(
            median_s=median(steps),
            quartiles_s=(low, high),
            added_s=(median(added), min(added), max(added)),
            steps=len(steps),
        )
    return found


def is_noisy(found: dict[str, Cost]) -> bool:
    """Do plain steps vary so much, by quartiles, that what is added cannot be told from them?"""
    low, high = found["plain"].quartiles_s
    return high - low > NOISE_MAX * found["plain"].median_s


def persisted(lives: list[Life]) -> tuple[int, int]:
    """Return (bytes, versions) that were persisted in *lives*, as each last reported.

    What was persisted between the last report and a kill is not counted.
    """
    last = [life.finished[-1] for life in lives if life.finished]
    return (
        sum(report.persisted_bytes for report in last),
        sum(report.persisted_versions for report in last),
    )
