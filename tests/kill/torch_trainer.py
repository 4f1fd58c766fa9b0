"""A trainer with torch and a Checkpointer that can be killed, or asked to finish by a signal.

It draws from torch's global generator in every step, so it goes on bit for bit only if that was
restored too. The reports, in the pipe before the next line runs:

    ("restored", k, digest)   ("middle", k): within step k, where the job asks for it
    ("end", k, digest, latest): of a step that ended, and the newest step known to be durable
    ("told", signal, k, latest, has_frame): the handler of before was called, after k steps
    ("error", class, message)   ("done", latest)

Forked by torch_nursery.py.
"""

import contextlib
import hashlib
import random
import signal
import sys
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import lightckpt
import trainer


@dataclass(frozen=True)
class Job:
    """What one life is to do.

    Attributes:
        style: how iterations end, "iterate", "mark" or "decorate".
        wait: the chance that a step is followed by a wait until it is durable.
        options: for the Checkpointer.
        finish_on: signals to finish on; empty: none.
        before: what SIGTERM does before that, "default", "ignore", "call" or "raise".
        talk: report the middle of each step, and wait there for a message.
        tolerate: versions that are given up are no error.
    """

    path: str
    steps: int
    style: str = "mark"
    wait: float = 0.5
    seed: int = 0
    options: Any = None
    finish_on: tuple[int, ...] = ()
    before: str = "default"
    talk: bool = False
    tolerate: bool = False


class Life:
    """A model, its optimizer and checkpointer, and the step they stand at."""

    def __init__(self, job: Job, connection: Connection) -> None:
        self.job, self.connection = job, connection
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(24, 300), nn.Dropout(0.2), nn.Linear(300, 24))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ended = 0
        self._set_handler()
        self.checkpointer = lightckpt.Checkpointer(
            job.path, model=self.model, optimizer=self.optimizer, **(job.options or {})
        )
        if job.finish_on:
            self.checkpointer.finish_on(*job.finish_on)

    def _set_handler(self) -> None:
        def told(number: int, frame: object) -> None:
            latest = self.checkpointer.latest
            self.connection.send(("told", number, self.ended, latest, frame is not None))
            if self.job.before == "raise":
                sys.exit(7)

        if self.job.before == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif self.job.before != "default":
            signal.signal(signal.SIGTERM, told)

    def digest(self) -> str:
        found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        states = self.optimizer.state_dict()["state"].values()
        for tensor in (*self.model.state_dict().values(), *(t for s in states for t in s.values())):
            found.update(tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    def update(self, step: int, batch: torch.Tensor) -> None:
        loss = (self.model(batch) - batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if self.job.talk:
            self.connection.send(("middle", step))
            self.connection.recv()
        self.optimizer.step()
        self.ended = step

    def train(self) -> None:
        job, checkpointer = self.job, self.checkpointer
        start = checkpointer.restore()
        self.connection.send(("restored", start, self.digest()))
        chance = random.Random(job.seed + start)
        # Its generator is its own, so that the global one is drawn from in each style alike.
        loader = torch.utils.data.DataLoader(
            _Numbers(job.steps), batch_size=4, generator=torch.Generator().manual_seed(5)
        )
        if job.style == "iterate":
            steps = checkpointer.iterate(loader, start=start)
        else:
            steps = ((i, x) for i, x in enumerate(map(_batch, range(job.steps))) if i >= start)
        if job.style == "decorate":
            checkpointer.decorate(self.optimizer.step)
        for done, batch in steps:
            self.update(done + 1, batch)
            if job.style == "mark":
                checkpointer.mark()
                if chance.random() < job.wait:
                    with contextlib.suppress(*([lightckpt.CheckpointError] * job.tolerate)):
                        checkpointer.wait()
            self.connection.send(("end", done + 1, self.digest(), checkpointer.latest))

    def leave(self) -> None:
        if self.job.talk:
            self.connection.send(("middle", 0))
            self.connection.recv()
        self.checkpointer.close()
        self.connection.send(("done", self.checkpointer.latest))


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, steps: int) -> None:
        self._count = 4 * steps

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> torch.Tensor:
        return _batch(i // 4)[i % 4]


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(step))


def live(connection: Connection) -> None:
    signal.alarm(trainer.LIFE_SECONDS)
    torch.set_num_threads(1)
    job = Job(**connection.recv())
    action = "ignore" if job.tolerate else "error"
    warnings.simplefilter(action, lightckpt.CheckpointWarning)
    life = Life(job, connection)
    try:
        life.train()
        life.leave()
    except lightckpt.CheckpointError as error:
        connection.send(("error", type(error).__name__, str(error)))
        raise
