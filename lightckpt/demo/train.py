"""Training: the run that nobody interrupts, and the one that may be killed at any instant.

`train_plain` knows nothing of lightckpt. `train_checkpointed` restores, trains on, and makes every
step durable. A restarted trainer is given another seed on purpose: whatever a checkpoint failed to
bring back would differ, and show.

"Step k is finished" is reported when iteration k has ended: with lightckpt, when its boundary has
returned, the first thing after the loop asked for the next batch. Version k-1 is durable then.
"""

import random
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import lightckpt
from lightckpt.arithmetic import prime_arithmetic

from .digest import loss_bits
from .job import EPOCHS, Job, Reporter
from .model import ByteGPT
from .text import make_loader

LEARNING_RATE_MAX = 1e-3
# The measured run has no end of its own; its schedule only has to outlast it.
SCHEDULE_STEPS_MAX = 100_000


@dataclass
class Run:
    """A training run: what it trains, on what, and when each step's phases were.

    ``phases`` has (begin, backward done, update done) per step, in nanoseconds.
    """

    model: ByteGPT
    optimizer: torch.optim.AdamW
    scheduler: OneCycleLR
    loader: DataLoader[Tensor]
    phases: list[tuple[int, int, int]] = field(default_factory=list)

    def update(self, batch: Tensor) -> float:
        """Do one iteration on *batch* and return its loss, a float32."""
        begin_ns = time.monotonic_ns()
        loss: Tensor = self.model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        backward_ns = time.monotonic_ns()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.phases.append((begin_ns, backward_ns, time.monotonic_ns()))
        return loss.item()


def build(job: Job) -> Run:
    """Build the run of *job* from its seed alone."""
    torch.set_num_threads(job.threads)
    torch.use_deterministic_algorithms(True)
    prime_arithmetic()  # Checkpointer does it too; the plain run has none
    torch.manual_seed(job.seed)
    random.seed(job.seed)
    shape = job.shape
    model = ByteGPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE_MAX, weight_decay=0.1)
    total_steps = SCHEDULE_STEPS_MAX if job.role == "measure" else job.steps
    scheduler = OneCycleLR(optimizer, LEARNING_RATE_MAX, total_steps=total_steps)
    loader = make_loader(context=shape.context, batch=shape.batch, batches=job.steps // EPOCHS)
    return Run(model, optimizer, scheduler, loader)


def open_checkpointer(job: Job, run: Run, *, mode: str = "auto") -> lightckpt.Checkpointer:
    """Open the store of *job* for *run*: all that a training script adds, but for the loop."""
    return lightckpt.Checkpointer(
        job.store, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler, mode=mode
    )


def train_plain(job: Job, run: Run, report: Reporter) -> None:
    """Train from the first step to the last, without checkpoints."""
    done = 0
    for _epoch in range(EPOCHS):
        for batch in run.loader:
            loss = run.update(batch)
            done += 1
            _report_finished(report, done, loss, {})


def train_checkpointed(job: Job, run: Run, report: Reporter) -> None:
    """Resume where the store says, and train to the last step, each one durable."""
    checkpointer = open_checkpointer(job, run)
    begin_ns = time.monotonic_ns()
    done = checkpointer.restore()
    report.send("restored", step=done, begin_ns=begin_ns, end_ns=time.monotonic_ns())
    loss: float | None = None
    for _step, batch in checkpointer.iterate(run.loader, start=done, epochs=EPOCHS):
        if loss is not None:
            _report_finished(report, done, loss, _persisted(checkpointer))
        loss = run.update(batch)
        done += 1
    checkpointer.wait()
    if loss is not None:
        _report_finished(report, done, loss, _persisted(checkpointer))
    checkpointer.close()


def _persisted(checkpointer: lightckpt.Checkpointer) -> dict[str, int]:
    info = checkpointer.info()
    return {"persisted_bytes": info.bytes_persisted, "persisted_versions": info.commits}


def _report_finished(report: Reporter, step: int, loss: float, persisted: dict[str, int]) -> None:
    at_ns = time.monotonic_ns()
    report.send("finished", step=step, loss=loss_bits(loss), at_ns=at_ns, **persisted)
