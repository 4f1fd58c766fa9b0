"""One life of a training process: restore, train, and perhaps die.

A job comes in over the connection; reports go out, so that whoever kills this process knows what
it had promised:

    ("restored", k, fingerprint)   ("begin", i)   ("end", i, loss, durable)
    ("done", fingerprint)          ("error", traceback)

`durable` is what `wait()` answered, at steps chosen by the job's seed, else None. A report is in
the pipe, hence survives the process, before the next statement runs.

Run with a descriptor number as its argument, or forked by zygote.py.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import cases
import harness

DURABLE_SECONDS = 60  # deadline of one wait()
LIFE_SECONDS = 240  # after this a life ends by itself, whatever happened to everyone else


@dataclass(frozen=True)
class Job:
    """What one life is to do.

    Attributes:
        build_seed: initialisation seed of the run.
        options: for the Checkpointer.
        die_in: step in which this process kills itself; None: it does not.
        die_at: where in that step, as a fraction of its Python and C calls, below 1.
        immortal: trains to the end and closes; else it waits, once trained, to be killed.
    """

    case: str
    path: str
    build_seed: int
    seed: int
    options: dict[str, Any]
    die_in: int | None = None
    die_at: float = 0.0
    immortal: bool = False


class SelfKill:
    """SIGKILL at a chosen call of a chosen step.

    The interpreter reports every Python and C call and return: those of a step are counted, and
    the next one ends at a fraction of that number. So each torch operation, each hook and each
    part of mark() is a place to die, whatever its duration.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._seen = 0
        self._last: int | None = None

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        if os.getpid() != self._owner:  # a loader's worker, forked in the middle of a step
            sys.setprofile(None)
            return
        self._seen += 1
        if self._seen == self._last:
            os.kill(self._owner, signal.SIGKILL)

    def count_this_step(self) -> None:
        self._seen, self._last = 0, None
        sys.setprofile(self._on_event)

    def die_in_this_step(self, fraction: float) -> None:
        self._seen, self._last = 0, 1 + int(fraction * self._seen)
        sys.setprofile(self._on_event)

    def step_is_over(self) -> None:
        sys.setprofile(None)
        if self._last is not None:  # the step was shorter than the one that was counted
            os.kill(self._owner, signal.SIGKILL)


def live(connection: Connection) -> None:
    signal.alarm(LIFE_SECONDS)
    job: Job = connection.recv()
    try:
        _live(job, connection)
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise


def _live(job: Job, connection: Connection) -> None:
    case = harness.case_named(job.case)
    total = harness.total_steps(case)
    chance = random.Random(job.seed)  # not the global generator: that one is the case's own
    with (
        harness.checkpoint_warnings_are_errors(case),
        harness.built(case, job.build_seed) as run,
        harness.attach(run, job.path, **job.options) as ckpt,
    ):
        start = harness.restore(case, run, ckpt)
        connection.send(("restored", start, _portable(cases.fingerprint(run))))
        die_in = None if job.die_in is None else max(job.die_in, start + 1)
        killer = SelfKill()
        for i in range(start, total):
            connection.send(("begin", i))
            wait = chance.random() < 1 / 3
            if die_in is not None and i == die_in - 1:
                killer.count_this_step()
            elif i == die_in:
                killer.die_in_this_step(job.die_at)
            loss = cases.bits(run.step(i))
            ckpt.mark()
            killer.step_is_over()
            durable = ckpt.wait(timeout=DURABLE_SECONDS) if wait else None
            connection.send(("end", i, loss, durable))
        if not job.immortal:
            connection.poll(None)  # until killed
        final = _portable(cases.fingerprint(run))
    connection.send(("done", final))


def _portable(fp: cases.FP) -> tuple[dict[str, Any], dict[str, Any]]:
    return fp.val, fp.lay


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    live(connection)


if __name__ == "__main__":
    # Jobs are pickled by the name this module has when imported, not as __main__.
    import victim

    victim.main()
