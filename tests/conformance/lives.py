"""What a case must show when its trainer is killed, again and again, and restored.

One chain of processes works on one store. Each restores what the one before left, trains, and is
killed with SIGKILL: by itself at a random call of a random step, or from outside a random time
after a step began. The last one trains to the end. Checked of each, against the gold run:

1. It gets no older step than what the killed one had promised: what `wait()` answered, and the
   step before the last that `mark()` returned from. And no newer step than was begun.
2. The state it restores is the gold run's at that step, bit for bit.
3. Every loss on the way, and the state at the end, are the gold run's.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import cases
import harness
from cases import FP, Case
from registry import MAY_DROP
from victim import Job
from zygote import Life, Nursery

REPORT_SECONDS = 120  # deadline of every report: a step, a restore, or the imports before it
MODES = ("auto", "overlap", "stop")


@dataclass
class Record:
    """What is known of one life: filled as reports come in."""

    start: int | None = None
    begun: int = -1
    marked: int = 0  # steps done whose mark() has returned
    durable: int = 0  # the newest step that wait() vouched for
    final: FP | None = None
    step_seconds: list[float] = field(default_factory=list)  # minus when it began, until it ends

    def promised(self, case: Case) -> int:
        """The oldest step that the next life may find."""
        overlapped = 0 if MAY_DROP in case.care else self.marked - 1
        return max(self.start or 0, overlapped, self.durable)


class Chain:
    """The lives of one case on one store."""

    def __init__(
        self, case: Case, path: Path, nursery: Nursery, seed: int, *, last: Nursery | None
    ) -> None:
        self._case, self._path, self._nursery = case, path, nursery
        self._last_nursery = last or nursery
        self._chance = random.Random(f"{seed} {case.name}")
        self._gold = harness.gold_of(case)
        self._total = harness.total_steps(case)
        self._options = {"mode": self._chance.choice(MODES)}
        self._lives: list[Record] = []
        self._life: Life | None = None
        self.story = [f"options {self._options}"]

    def run(self, *, kills: tuple[str, ...]) -> None:
        """Go through the kills, each "early", "late" (by itself) or "outside"; then finish."""
        n1, total = self._case.n1, self._total
        # Not before step 2: an earlier death may leave no version, and the run would start anew.
        first = n1 - 1 if MAY_DROP in self._case.care else 2
        for kill in kills:
            if kill == "early":
                self._die_by_itself(self._chance.randint(first, n1 - 1))
            elif kill == "late":
                self._die_by_itself(self._chance.randint(n1, total - 2))
            else:
                self._be_killed()
        self._finish()

    def _job(self, **what) -> Job:
        return Job(
            case=self._case.name,
            path=str(self._path),
            build_seed=len(self._lives),
            seed=self._chance.getrandbits(32),
            options=self._options,
            **what,
        )

    def _die_by_itself(self, step: int) -> None:
        job = self._job(die_in=step, die_at=self._chance.random())
        self.story.append(f"kill itself in step {step} at {job.die_at:.3f}")
        record = self._begin(job)
        while self._next_report(record) and record.marked < self._total:
            pass
        self._kill(record)

    def _be_killed(self) -> None:
        record = self._begin(self._job())
        while record.start is None:
            assert self._next_report(record), "it died before it had restored"
        step = self._chance.randint(min(record.start, self._total - 1), self._total - 1)
        while record.begun < step and record.start < self._total:
            assert self._next_report(record), "it died of something else"
        known = [s for r in self._lives for s in r.step_seconds if s > 0]
        delay = 1.5 * self._chance.random() * statistics.median(known or [0.001])
        self.story.append(f"killed {1e3 * delay:.2f} ms into step {step}")
        deadline = time.monotonic() + delay
        while (left := deadline - time.monotonic()) > 0 and self._life.connection.poll(left):
            assert self._next_report(record), "it died of something else"
        self._kill(record)

    def _finish(self) -> None:
        self.story.append("train to the end")
        self._nursery = self._last_nursery
        record = self._begin(self._job(immortal=True))
        while record.final is None:
            assert self._next_report(record), f"it died: {self._nursery.log()}"
        assert self._life.reap() == 0
        self._life = None
        harness.assert_same(self._gold.at[self._total], record.final, "at the end")

    def _begin(self, job: Job) -> Record:
        self._life = self._nursery.spawn()
        self._life.connection.send(job)
        self._lives.append(Record())
        return self._lives[-1]

    def _kill(self, record: Record) -> None:
        os.kill(self._life.pid, signal.SIGKILL)  # harmless if it has: it is not yet reaped
        code = self._life.reap()
        assert code == -signal.SIGKILL, f"exit code {code}, no kill: {self._nursery.log()}"
        while self._life.connection.poll(0) and self._next_report(record):
            pass
        self._life = None
        self.story.append(f"  it had begun {record.begun}, marked {record.marked}")

    def abandon(self) -> None:
        """End what a failed check leaves behind."""
        if self._life is not None:
            os.kill(self._life.pid, signal.SIGKILL)
            self._life.reap()

    def _next_report(self, record: Record) -> bool:
        """Take in one report; False once there are no more."""
        connection, ended = self._life.connection, self._life.pidfd
        # A loader's workers may outlive the trainer and hold the pipe: its end alone says little.
        ready = wait([connection, ended], REPORT_SECONDS)
        assert ready, f"silent for {REPORT_SECONDS} s"
        if connection not in ready and not connection.poll(0):
            return False
        try:
            kind, *rest = connection.recv()
        except (EOFError, ConnectionResetError):
            return False
        if kind == "error":
            raise AssertionError(f"the trainer failed:\n{rest[0]}")
        if kind == "restored":
            self._check_restored(record, *rest)
        elif kind == "begin":
            record.begun = rest[0]
            record.step_seconds.append(-time.monotonic())
        elif kind == "end":
            self._check_step(record, *rest)
        else:
            record.final = _fingerprint(*rest[0])
        return True

    def _check_restored(self, record: Record, start: int, fp: tuple) -> None:
        self.story.append(f"  restored at step {start}")
        record.start = record.durable = start
        if len(self._lives) == 1:
            assert start == 0
        else:
            before = self._lives[-2]
            lowest, highest = before.promised(self._case), max(before.begun + 1, before.start or 0)
            assert lowest <= start <= highest, f"step {start}, not {lowest} to {highest}"
        harness.assert_same(self._gold.at[start], _fingerprint(*fp), f"restored at step {start}")

    def _check_step(self, record: Record, step: int, loss: bytes, durable: int | None) -> None:
        record.marked = step + 1
        record.step_seconds[-1] += time.monotonic()
        assert loss == self._gold.losses[step], f"the loss of step {step} differs"
        if durable is not None:
            allowed_to_drop = MAY_DROP in self._case.care
            vouched = durable == step + 1 or (allowed_to_drop and durable <= step)
            assert vouched, f"after step {step}, wait() answered {durable}"
            record.durable = durable


def _fingerprint(values: dict, layouts: dict) -> FP:
    fp = cases.FP()
    fp.val, fp.lay = values, layouts
    return fp


def check_killed(
    case: Case,
    path: Path,
    nursery: Nursery,
    seed: int,
    *,
    kills: tuple[str, ...],
    last: Nursery | None = None,
) -> None:
    """Run one chain; on failure, tell the story and how to replay it.

    Args:
        kills: of "early", "late", "outside"; see ``Chain.run``.
        last: where the process comes from that trains to the end, if from elsewhere.
    """
    chain = Chain(case, path, nursery, seed, last=last)
    try:
        chain.run(kills=kills)
    except BaseException as error:
        chain.abandon()
        error.add_note("\n".join(chain.story))
        error.add_note(f"replay: SEED={seed} python -m pytest tests/conformance -k '{case.name}'")
        raise
