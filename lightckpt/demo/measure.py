"""The trainer's third role: what a checkpoint per step costs, beside the same steps without.

One process trains on and on. Blocks of steps alternate: without checkpoints, with lightckpt, with
torch.save. So all three meet the same noise, memory and batches; a round is one block of each, and
each round starts with another method. A step is timed from the call that trains it to the return
of whatever makes it durable. The first step of a block is not counted: only from the second on does
the copy of the step before run beside it, which is what lightckpt makes a step pay for.

torch.save is used as a careful training script would: into a temporary file, fsync, rename.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import lightckpt

from .job import Job, Reporter
from .results import METHODS
from .train import Run, open_checkpointer

ROUNDS_MIN = 3
ROUNDS_MAX = 20
COUNTED_STEPS = 3
# The engine watches a run for some versions before it copies beside it; those are not counted.
WARM_UP_STEPS = {"plain": 2, "lightckpt": 8, "torch.save": 1}


def measure(job: Job, run: Run, report: Reporter) -> None:
    """Report a sample per counted step, and the timeline of the last lightckpt block."""
    # Not "auto", which would try both ways on these very steps.
    checkpointer = open_checkpointer(job, run, mode="overlap")
    batches = _endless(run)
    ends: dict[str, Callable[[], Any]] = {
        "plain": lambda: None,
        "lightckpt": checkpointer.mark,
        "torch.save": lambda: _save_with_torch(run, os.path.join(job.folder, "torch.pt")),
    }
    for method in METHODS:
        for _ in range(WARM_UP_STEPS[method]):
            _timed_step(run, batches, ends[method])
        checkpointer.wait()
    begin_ns = time.monotonic_ns()
    block: dict[str, Any] = {}
    for number in range(ROUNDS_MAX):
        if number >= ROUNDS_MIN and time.monotonic_ns() - begin_ns > job.measure_s * 1e9:
            break
        for turn in range(len(METHODS)):
            method = METHODS[(number + turn) % len(METHODS)]
            block_ns = time.monotonic_ns()
            for index in range(1 + COUNTED_STEPS):
                step_ns = _timed_step(run, batches, ends[method])
                if index > 0:
                    report.send("sample", method=method, round=number, step_ns=step_ns)
            checkpointer.wait()
            if method == "lightckpt":
                block = _timeline(checkpointer, run, block_ns, time.monotonic_ns())
    report.send("timeline", **block)
    checkpointer.close()


def _timed_step(run: Run, batches: Iterator[Tensor], end: Callable[[], Any]) -> int:
    batch = next(batches)
    begin_ns = time.monotonic_ns()
    run.update(batch)
    end()
    return time.monotonic_ns() - begin_ns


def _endless(run: Run) -> Iterator[Tensor]:
    while True:
        yield from run.loader


def _save_with_torch(run: Run, path: str) -> None:
    state = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    temporary = path + ".tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _timeline(
    checkpointer: lightckpt.Checkpointer, run: Run, begin_ns: int, end_ns: int
) -> dict[str, Any]:
    """Return what happened between *begin_ns* and *end_ns*, as the timeline report has it."""
    versions = [
        {
            "step": record.step,
            "mode": record.mode,
            "boundary_ns": record.boundary_ns,
            "copies": list(record.copies),
            "guard_ns": list(record.guard_ns),
            "landing_ns": record.landing_ns,
            "commit_ns": record.commit_ns,
        }
        for record in list(checkpointer.timeline)
        if begin_ns <= record.boundary_ns[0] < end_ns
    ]
    phases = [phase for phase in run.phases if begin_ns <= phase[0] < end_ns]
    return {"phases": phases, "versions": versions}
