"""The demo from its options to its exit code: the three runs in order, then what they showed."""

import argparse
import importlib.util
import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from .drill import plan_kills, run_golden, run_killed, run_measured
from .job import Job
from .options import Options, resolve
from .process import DemoError
from .report import Results, as_json, show
from .results import METHODS, Life, compare, costs, count_kills, persisted
from .timeline import draw

EXIT_OK, EXIT_FAILED, EXIT_NOT_RUN = 0, 1, 2
NEEDED = ("torch", "matplotlib")


def main(arguments: argparse.Namespace) -> int:
    """Run the demo as *arguments* say, and return its exit code."""
    console = Console(stderr=arguments.json)
    try:
        options = resolve(arguments)
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise DemoError(f"no {' and no '.join(missing)}: pip install 'lightckpt[demo]'")
        with _folder(options, console) as folder:
            results = _run_all(options, folder, console)
    except KeyboardInterrupt:
        console.print("stopped", style="bold red")
        return EXIT_NOT_RUN
    except DemoError as error:
        console.print("the demo could not be run:", style="bold red")
        console.print(str(error), markup=False, soft_wrap=True)
        return EXIT_NOT_RUN
    show(console, results, options)
    if options.json:
        Console().print_json(json.dumps(as_json(results, options)))
    return EXIT_FAILED if results.failures(options) else EXIT_OK


@contextmanager
def _folder(options: Options, console: Console) -> Iterator[Path]:
    """Make the folder for stores, and remove it whatever happens; SIGTERM acts as Ctrl-C does."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if here else None
    folder = Path(tempfile.mkdtemp(prefix="lightckpt-demo-", dir=options.folder))
    try:
        yield folder
    finally:
        if options.keep_store:
            console.print(f"The stores are left in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        if here:
            signal.signal(signal.SIGTERM, before)


def _run_all(options: Options, folder: Path, console: Console) -> Results:
    begin_s = time.monotonic()
    job = Job(
        role="plain",
        quick=options.quick,
        steps=options.steps,
        seed=options.seed,
        threads=options.threads,
        folder=str(folder),
        report_fd=-1,
        measure_s=options.measure_s,
    )
    moments = plan_kills(steps=options.steps, kills=options.kills, seed=options.seed)
    with Stages(console, options) as stages:
        stages.start("plain")
        golden = run_golden(job, stages.notify)
        stages.describe(golden)
        stages.start("checkpointed")
        lives = run_killed(job, moments, stages.notify)
        if not options.keep_store:
            for path in folder.glob("checkpointed.lightckpt*"):
                path.unlink()
        stages.start("measure")
        measured = run_measured(job, stages.notify)
    for said in sorted(folder.glob("*.stderr")):
        if text := said.read_text(errors="replace").strip():
            console.print(f"{said.stem} trainer said:", style="yellow")
            console.print(text, markup=False, soft_wrap=True)
    draw(options.picture, lives, measured.timeline, total_steps=options.steps)
    return Results(
        parameters=golden.parameters,
        kills=count_kills(lives),
        costs=costs(measured.samples),
        identity=compare(golden, lives),
        persisted=persisted(lives),
        picture=options.picture,
        elapsed_s=time.monotonic() - begin_s,
    )


class Stages:
    """Shows the three runs while they go on; leave its ``with`` block before printing tables."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console, self._options = console, options
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._kills = 0

    def start(self, role: str) -> None:
        """Show that the trainer with *role* is starting."""
        steps = self._options.steps
        description, total = {
            "plain": ("left alone, no checkpoints", steps),
            "checkpointed": ("checkpointed and killed", steps),
            "measure": ("measuring a step", None),
        }[role]
        self._tasks[role] = self._progress.add_task(description, total=total, note="starting")

    def notify(self, role: str, report: dict[str, Any]) -> None:
        """Show one *report* of the trainer with *role*."""
        task = self._tasks[role]
        match report:
            case {"event": "ready"}:
                self._progress.update(task, note=f"{self._kills} kills" if self._kills else "")
            case {"event": "finished", "step": step}:
                self._progress.update(task, completed=step)
            case {"event": "killed"}:
                self._kills += 1
                self._progress.update(task, note=f"kill {self._kills}, restarting")
            case {"event": "restored", "step": step} if self._kills:
                self._progress.update(task, completed=step)
            case {"event": "sample", "method": method, "round": number}:
                self._progress.update(task, advance=1, note=f"round {number + 1}, {method}")
            case {"event": "timeline"}:
                count = self._progress.tasks[task].completed
                self._progress.update(task, total=count, note=f"{len(METHODS)} methods")

    def describe(self, golden: Life) -> None:
        """Say what is being trained, now that it is known."""
        options = self._options
        self._console.print(
            f"A byte-level GPT of {golden.parameters / 1e6:.1f} M parameters, AdamW, "
            f"{options.steps} steps, {options.threads} threads; stores in {options.folder}; "
            f"{options.kills} kills with seed {options.seed}.",
            soft_wrap=True,
        )

    def __enter__(self) -> "Stages":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()
