"""What a run on a GPU is to measure, in which order, and what of that has been measured: pure.

A task is one strategy on one model: its steps, or the recovery of a trainer with it. What says
most comes first, so that a run that is ended by its budget has that: ours on each model, then the
others on each, then recoveries, ours first. A task that has a line in the results file, made in the
same circumstances, is done: so a second run goes on where the first was ended.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

STEPS, RECOVERY = "steps", "recovery"
Line = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A strategy on a model: its steps, or its recovery."""

    model: str
    strategy: str
    part: str

    def __str__(self) -> str:
        return f"{self.part} of {self.model} with {self.strategy}"


@dataclass(frozen=True)
class Circumstances:
    """What two lines must have in common to be of one run."""

    commit: str
    device: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, line: Line) -> "Circumstances":
        return cls(line["commit"], line["device"], tuple(sorted(line["versions"].items())))


def plan(
    models: Sequence[str], *, ours: Sequence[str], peers: Sequence[str], killed: Sequence[str]
) -> list[Task]:
    """Return all tasks in order; *killed* are the strategies whose recovery is timed."""
    steps = [Task(model, name, STEPS) for names in (ours, peers) for model in models
             for name in names]  # fmt: skip
    return steps + [Task(model, name, RECOVERY) for name in killed for model in models]


def task_of(line: Line) -> Task:
    return Task(line["model"], line["strategy"], line["part"])


def left(tasks: Iterable[Task], lines: Iterable[Line], here: Circumstances) -> list[Task]:
    """Return those of *tasks* that no line is about that was made in circumstances like *here*."""
    done = {task_of(line) for line in of_run(lines, here)}
    return [task for task in tasks if task not in done]


def of_run(lines: Iterable[Line], here: Circumstances) -> Iterator[Line]:
    """Yield the lines of this bench that were made in circumstances like *here*."""
    for line in lines:
        if line["bench"] == "gpu" and "part" in line and Circumstances.of(line) == here:
            yield line


def together(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks at the head of *tasks* that one process can do one after the other."""
    _, group = next(groupby(tasks, key=lambda task: (task.model, task.part)))
    return list(group)
