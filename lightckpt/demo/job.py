"""What the supervisor tells a trainer, and what the trainer reports back.

The job goes in as one JSON argument. Reports come out of a pipe, one JSON object a line, each
written by one write call: a trainer that is killed leaves whole lines, and everything it reported
before the kill stays in the pipe for the supervisor to read.

    ready      the model is built                       at_ns, parameters
    restored   restore() has returned                   step, begin_ns, end_ns
    finished   iteration `step` has ended               step, loss (float32 bits), at_ns,
                                                        persisted_bytes, persisted_versions
                                                        (of this process, so far)
    digests    sha256 of the final state, by part       digests
    sample     one measured step                        method, round, step_ns
    timeline   what one block of steps did, and when    phases, versions

Times are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share.
"""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

EPOCHS = 3

Role = Literal["plain", "checkpointed", "measure"]


@dataclass(frozen=True)
class Shape:
    """Size of a model and of the batch it is fed; ``context`` in bytes of text."""

    width: int
    heads: int
    depth: int
    context: int
    batch: int
    dropout: float = 0.1


FULL = Shape(width=384, heads=6, depth=6, context=96, batch=4)
QUICK = Shape(width=64, heads=4, depth=2, context=64, batch=8)


@dataclass(frozen=True)
class Job:
    """One trainer's work.

    Args:
        steps: iterations of the whole run; a multiple of ``EPOCHS``.
        seed: of every random number, and so of the initial weights.
        threads: of torch; sums are rounded by thread, so equal runs need equal counts.
        folder: where stores and files go.
        report_fd: the pipe's writing end.
        measure_s: how long to measure, in seconds; at least three rounds are made.
    """

    role: Role
    quick: bool
    steps: int
    seed: int
    threads: int
    folder: str
    report_fd: int
    measure_s: float

    @property
    def shape(self) -> Shape:
        return QUICK if self.quick else FULL

    @property
    def store(self) -> str:
        return os.path.join(self.folder, f"{self.role}.lightckpt")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        return Job(**json.loads(text))


class Reporter:
    """The trainer's end of the pipe; raises BrokenPipeError when the supervisor is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, event: str, **fields: Any) -> None:
        """Write one report, whole."""
        line = memoryview((json.dumps({"event": event, **fields}) + "\n").encode())
        while line:
            line = line[os.write(self._fd, line) :]
