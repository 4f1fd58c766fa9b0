"""The six models on a GPU, a checkpoint in every step: what it adds, beside what copying allows.

    python bench/gpu.py [--models NAMES] [--strategies NAMES] [--rounds N] [--steps N]
        [--no-recovery] [--budget SECONDS] [--results FILE] [--dir DIR] [--seed N]

Batch sizes are in workloads.SHAPES, the last of each, and the precision is there too. What a block
is stands in gpu_blocks.py; recovery is as in kills.py. Each strategy of each model leaves a line of
its own as soon as it has been measured, and what fails fails alone (gpu_child.py). With a budget,
what says most is done first (gpu_plan.py), and what was not run is said; what has a line in FILE
that was made in the same circumstances is not run again.

Without a GPU nothing is measured and nothing is written.
"""

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import figures
import gpu_child
import gpu_plan
import kills
import ours
import record
from arguments import ROOT, default_folder
from gpu_blocks import GpuBench, Say, limit_bytes_s, measure
from peers import DcpStager
from strategies import Strategy, TorchSave, empty
from styles import CheckFreq
from workloads import TEXT_MODELS, build

RESULTS = ROOT / "bench" / "results" / "gpu.ndjson"
MODELS = ("gpt2", "resnet18", "vgg16", "bert", "inception_v3", "alexnet")
ROUNDS = 3
TASK_SECONDS_MIN = 25.0  # with less left none is begun
END_SECONDS = 8.0  # kept for ending what runs, and removing its files
OURS: tuple[type[Strategy], ...] = ours.GPU_STRATEGIES
PEERS: tuple[type[Strategy], ...] = (TorchSave, DcpStager, CheckFreq)
STRATEGIES = {kind.name: kind for kind in (*OURS, *PEERS)}
SWITCH = "LIGHTCKPT_CUDA_BATCH"  # of the core: circumstances of a line


class OutOfTimeError(BaseException):
    """The budget is spent; no Exception, so that it is not taken for a strategy's failure."""


def run_model(
    model: str,
    options: Any,
    folder: Path,
    say: Say,
    *,
    kinds: Sequence[type[Strategy]] = tuple(STRATEGIES.values()),
    rounds: int = ROUNDS,
    each: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure *kinds* on *model* in this process; return a line with all of them.

    Args:
        each: gets the line of each strategy, once it has been measured.
    """
    limit = limit_bytes_s()
    workload = build(model, device="cuda", seed=options.seed)
    bench = GpuBench(workload, folder / "block", options.steps)
    plain = figures.spread([bench.plain() for _ in range(3)])
    found = {}
    line: dict[str, Any] = {}
    for kind in kinds:
        found[kind.name] = measure(bench, kind, limit=limit, rounds=rounds, say=say)
        line = make_line(
            gpu_plan.Task(model, kind.name, gpu_plan.STEPS),
            found[kind.name],
            cuda=torch.version.cuda,
            parameters={**workload.facts, "state_bytes": bench.bytes},
            plain_step_s=plain,
            device_to_host_bytes_s=limit,
        )
        each(line)
    return line | {"strategies": found}


def make_line(task: gpu_plan.Task, entry: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the line about *task*."""
    return record.make_line(
        "gpu", f"python bench/gpu.py --models {task.model} --strategies {task.strategy}",
        model=task.model, part=task.part, strategy=task.strategy, device=device_name(),
        settings={SWITCH: os.environ.get(SWITCH, "0")}, **more, strategies={task.strategy: entry},
    )  # fmt: skip


def device_name() -> str:
    """Return the first GPU's name, without a context on it; "" if the driver does not tell."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)):
            driver.cuDeviceGetName(name, len(name), device)
            return name.value.decode(errors="replace")
    return ""


class Run:
    """One run of this script: the tasks that are left, and what was recorded."""

    def __init__(self, options: argparse.Namespace, say: Say) -> None:
        self.options, self.say = options, say
        self.lines = record.read(options.results)
        self.here = gpu_plan.Circumstances.of(make_line(gpu_plan.Task("", "", ""), {}))
        asked = options.strategies
        restored = {kind.kind: name for name, kind in reversed(STRATEGIES.items()) if name in asked}
        killed = [restored[kind] for kind in kills.KINDS_OF_LARGE if kind in restored]
        tasks = gpu_plan.plan(
            options.models,
            ours=[kind.name for kind in OURS if kind.name in asked],
            peers=[kind.name for kind in PEERS if kind.name in asked],
            killed=killed if options.recovery else [],
        )
        self.tasks = gpu_plan.left(tasks, self.lines, self.here)
        self.failed: list[str] = []
        self._imports: dict[bool, float] = {}

    def keep(self, line: dict[str, Any]) -> None:
        """Record *line*; what it is about is done."""
        record.append(self.options.results, line)
        self.lines.append(line)
        self.tasks.remove(gpu_plan.task_of(line))
        self.failed += [f"{name}: {words}" for name, words in failures(line)]

    def go_on(self, folder: Path) -> None:
        """Do what one process can do."""
        group = gpu_plan.together(self.tasks)
        if group[0].part == gpu_plan.RECOVERY:
            self.recover(group[0], folder)
        else:
            self.measure(group, folder)

    def measure(self, group: list[gpu_plan.Task], folder: Path) -> None:
        """Have a process measure *group*, until it is through or something in it has failed."""
        names = tuple(task.strategy for task in group)
        options = self.options
        work = gpu_child.Work(
            group[0].model, names, folder, options.seed, options.steps, options.rounds
        )
        empty(folder)
        words = "it ended without a word"
        try:
            with gpu_child.reports(gpu_child.serve, work) as reports:
                for report in reports:
                    if "line" in report:
                        self.keep(report["line"])
                        words = ""
                    elif "say" in report:
                        self.say(report["say"])
                    else:
                        words = report["error"]
        except gpu_child.EndedError as error:
            words = str(error)
        left = [task for task in group if task in self.tasks]
        if left and words:  # it was at the first of these
            self.say(f"{left[0]}: failed: {words}")
            self.keep(make_line(left[0], {"missing": words, "failed": True}))

    def recover(self, task: gpu_plan.Task, folder: Path) -> None:
        """Time how a successor of a killed trainer comes to its first step."""
        of = task.model, task.strategy
        lines = gpu_plan.of_run(self.lines, self.here)
        entries = [line["strategies"][of[1]] for line in lines
                   if (line["model"], line["strategy"]) == of]  # fmt: skip
        if any("missing" in entry for entry in entries):
            self.say(f"{task}: not run: its steps were not")
            self.tasks.remove(task)
            return
        empty(folder)
        job = kills.Job(task.model, task.strategy, folder / "killed", smoke=False,
                        seed=self.options.seed, device="cuda")  # fmt: skip
        entry: dict[str, Any]
        try:
            job.folder.mkdir()
            imports = self.import_seconds(task.model)
            parts = kills.recover(job)
            took = imports + sum(parts[part] for part in kills.RECOVERY_PARTS)
            entry = {"recovery": parts, "recovery_s": took, "import_s": imports}
            self.say(f"{task}: {took:.1f} s from the start to the first step done")
        except Exception as error:  # noqa: BLE001 - told as found, and the next goes on
            entry = {"recovery_missing": f"{type(error).__name__}: {error}"[:300], "failed": True}
            self.say(f"{task}: failed: {entry['recovery_missing']}")
        self.keep(make_line(task, entry))

    def import_seconds(self, model: str) -> float:
        """Return what *model*'s imports take, measured once for each kind of model."""
        text = model in TEXT_MODELS
        if text not in self._imports:
            self._imports[text] = kills.import_seconds(model)
        return self._imports[text]


def failures(line: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what failed in *line*, each with its words."""
    return [
        (name, entry.get("missing") or entry["recovery_missing"])
        for name, entry in line["strategies"].items()
        if entry.get("failed")
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default=",".join(MODELS), help="names, by commas, in order")
    add("--strategies", default=",".join(STRATEGIES), help="names, by commas")
    add("--rounds", type=int, default=ROUNDS, help="at most so many blocks per strategy")
    add("--steps", type=int, default=10, help="counted steps of a block")
    add("--no-recovery", dest="recovery", action="store_false", help="kill nobody")
    add("--budget", type=float, default=None, help="seconds after which it has ended")
    add("--results", type=Path, default=RESULTS, help="the file that gets lines")
    add("--dir", type=Path, default=None, help="where checkpoints go")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.models, options.strategies = (
        tuple(text.split(",")) for text in (options.models, options.strategies)
    )
    for given, known in ((options.models, MODELS), (options.strategies, STRATEGIES)):
        if unknown := set(given) - {*known}:
            parser.error(f"there is no {', '.join(sorted(unknown))}, only {', '.join(known)}")
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps: at least 1")
    return options


def run(options: argparse.Namespace, say: Say, *, began: float) -> int:
    """Measure what is left to measure, within the budget from *began* on; return the status."""
    kills.prepare_server()
    this = Run(options, say)
    ends = began + options.budget if options.budget is not None else float("inf")
    base = options.dir or default_folder()
    try:
        with (
            tempfile.TemporaryDirectory(dir=base, prefix="lightckpt-bench-") as folder,
            alarm_at(ends - END_SECONDS),
        ):
            while this.tasks and ends - time.monotonic() > TASK_SECONDS_MIN:
                this.go_on(Path(folder))
    except OutOfTimeError:
        say(f"the budget of {options.budget:.0f} s is spent")
    finally:
        for child in multiprocessing.active_children():
            kills.kill(child)
    for task in this.tasks:
        say(f"not run, for time: {task}")
    for words in this.failed:
        say(f"failed: {words}")
    return 1 if any(words.startswith("lightckpt") for words in this.failed) else 0


class alarm_at:  # noqa: N801 - reads as a statement
    """Raise OutOfTimeError in this thread at a time of the monotonic clock, unless left before."""

    def __init__(self, at: float) -> None:
        self._seconds = at - time.monotonic()

    def __enter__(self) -> None:
        if self._seconds != float("inf"):
            signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 1e-3))

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _ring(*_: object) -> None:
        raise OutOfTimeError


def main() -> int:
    began = time.monotonic()
    options = parse()
    console = Console(highlight=False, soft_wrap=True)
    if not torch.cuda.is_available():
        console.print("bench: torch finds no GPU here; nothing was measured, nothing written")
        return 2

    def say(words: str) -> None:
        console.print(words, markup=False)
        console.file.flush()  # so that who looks at a log sees it

    # timeout and the like end it as an error would: children are ended, files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run(options, say, began=began)


if __name__ == "__main__":
    sys.exit(main())
