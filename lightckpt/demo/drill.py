"""The supervisor: one run left alone, one killed again and again, one measured.

A kill is SIGKILL at a random moment: after a step that is drawn, a fraction of a step's time that
is drawn. The trainer gets no warning and does not take part. The steps and fractions are a function
of the seed; which instruction the signal meets is up to the machine.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from .job import Job
from .process import DemoError, Trainer
from .results import Finished, Life

# A store holds a version only after the first steps; a kill before that would show nothing.
FIRST_KILL_STEP = 2
STEPS_AFTER_LAST_KILL = 3

Notify = Callable[[str, dict[str, Any]], None]


class KillMoment(NamedTuple):
    """When to kill: *fraction* of a step after step *after_step* was reported finished."""

    after_step: int
    fraction: float


@dataclass(frozen=True)
class Measured:
    """Samples as (method, round, step in nanoseconds), and the timeline report."""

    samples: list[tuple[str, int, int]]
    timeline: dict[str, Any]


def steps_min(kills: int) -> int:
    """Return the fewest steps in which *kills* kills find room."""
    return FIRST_KILL_STEP + 2 * kills + STEPS_AFTER_LAST_KILL


def plan_kills(*, steps: int, kills: int, seed: int) -> list[KillMoment]:
    """Draw one moment from each of *kills* equal parts of a run, in order."""
    assert steps >= steps_min(kills), f"{steps} steps have no room for {kills} kills"
    draw = random.Random(seed)
    room = steps - FIRST_KILL_STEP - STEPS_AFTER_LAST_KILL
    edges = [FIRST_KILL_STEP + room * index // max(1, kills) for index in range(kills + 1)]
    return [
        KillMoment(draw.randrange(low, high), draw.random())
        for low, high in itertools.pairwise(edges)
    ]


def run_golden(job: Job, notify: Notify) -> Life:
    """Run *job* without checkpoints and without kills: what the other run must equal."""
    return run_life(replace(job, role="plain"), None, notify)


def run_killed(job: Job, moments: list[KillMoment], notify: Notify) -> list[Life]:
    """Run *job* with a checkpoint every step, kill it at *moments*, and restart it each time."""
    lives: list[Life] = []
    pending: list[KillMoment | None] = [*moments, None]
    for moment in pending:
        # Nothing of a restarted trainer's seed may be left once it has restored.
        life_job = replace(job, role="checkpointed", seed=job.seed + len(lives))
        lives.append(run_life(life_job, moment, notify))
        if lives[-1].killed_ns is None:
            break
    return lives


def run_life(job: Job, moment: KillMoment | None, notify: Notify) -> Life:
    """Run one trainer to its end, or kill it at *moment*, and return what it reported."""
    with Trainer(job) as trainer:
        life = Life(started_ns=trainer.started_ns)

        def take(report: dict[str, Any]) -> None:
            _take(life, report)
            notify(job.role, report)

        for report in trainer.reports():
            take(report)
            if moment is not None and _reached(report, moment):
                wait_ns = int(moment.fraction * _step_ns(life))
                for late in trainer.reports_until(report["at_ns"] + wait_ns):
                    take(late)
                if not life.digests:
                    life.killed_ns = trainer.kill()
                    notify(job.role, {"event": "killed"})
                break
        # Invariant 3 of a trainer: what it reported before it died is still in the pipe.
        for report in trainer.reports():
            take(report)
        if life.killed_ns is None:
            trainer.finish()
            if not life.digests:
                raise DemoError("the trainer ended without saying what it has")
    return life


def run_measured(job: Job, notify: Notify) -> Measured:
    """Measure *job*'s steps with and without checkpoints."""
    samples: list[tuple[str, int, int]] = []
    timeline: dict[str, Any] = {}
    with Trainer(replace(job, role="measure")) as trainer:
        for report in trainer.reports():
            if report["event"] == "sample":
                samples.append((report["method"], report["round"], report["step_ns"]))
            if report["event"] == "timeline":
                timeline = report
            notify("measure", report)
        trainer.finish()
    if not samples or not timeline.get("versions"):
        raise DemoError("the measured trainer ended without a measurement")
    return Measured(samples, timeline)


def _reached(report: dict[str, Any], moment: KillMoment) -> bool:
    return report["event"] == "finished" and int(report["step"]) >= moment.after_step


def _step_ns(life: Life) -> float:
    """Return the typical time of a step, from one report to the next."""
    times = [life.restore_ns[1], *(report.at_ns for report in life.finished)]
    return median(later - earlier for earlier, later in itertools.pairwise(times))


def _take(life: Life, report: dict[str, Any]) -> None:
    match report:
        case {"event": "ready", "at_ns": at_ns, "parameters": parameters}:
            life.ready_ns, life.parameters = at_ns, parameters
        case {"event": "restored", "step": step, "begin_ns": begin_ns, "end_ns": end_ns}:
            life.resumed_step, life.restore_ns = step, (begin_ns, end_ns)
        case {"event": "finished", **fields}:
            life.finished.append(Finished(**fields))
        case {"event": "digests", "digests": digests}:
            life.digests = digests
