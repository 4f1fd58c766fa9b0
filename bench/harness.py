"""One benchmark run: every strategy in turn on one model, in one process, and the line it leaves.

The first round is each strategy once, later ones are what is compared: ours, and the two peers that
added least. The order in a round is random, and the seed gives it. A block of a strategy is: open
in an empty folder, steps to warm up that do not count, counted steps, drain, close. Before and
after each block stands one of plain steps, and before that one the copy limit is measured: M is a
plain non-temporal copy of as many bytes as the state has, between warm buffers, by all cores.

In its first round each strategy also saves once alone, with nothing trained beside; then all
tensors are overwritten, it restores, and every byte is compared with what was saved.
"""

import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console

import catalog
import figures
import kills
import record
from arguments import Options
from lightckpt import _core
from memory import Watch, settle
from state import state_bytes
from strategies import Strategy, UnavailableError, empty, restore_over_zeros, saved_step
from workloads import Workload, build

PLAIN_STEPS, PLAIN_WARMUP = 2, 1
WARMUP_STEPS_MAX = 100
COPY_BYTES_MAX = 256 << 20
MEMORY_SPARE_BYTES = 1 << 30
STEPS_SECONDS_MAX = 8.0  # a strategy that is so slow counts fewer steps, at least one
OURS, FINAL_PEERS = ("lightckpt", "lightckpt-stop"), 2
FINAL_SECONDS_MAX = 40.0
FIRST_SECONDS_MAX = 220.0  # after a longer first round none follows: ten runs, one hour
TIMELINE_STEPS = 4
CONSOLE_COLUMNS = 140
ALONE_MAX, ALONE_SECONDS = 5, 1.5  # saves with nothing beside them, for so long at most
PREFIX = "lightckpt-bench-"

Say = Callable[[str], None]


class Bench:
    """A run on one model.

    Args:
        say: told what happens, in one line each.
    """

    def __init__(self, options: Options, folder: Path, workload: Workload, say: Say) -> None:
        self.options, self.folder, self.workload, self.say = options, folder, workload, say
        self.step = 0
        for _ in range(PLAIN_WARMUP + 1):
            self._plain_step()
        self.bytes = state_bytes(workload.state())

    # -- plain steps ---------------------------------------------------------------------------

    def _plain_step(self) -> float:
        self.step += 1
        begin = time.perf_counter()
        self.workload.step()
        return time.perf_counter() - begin

    def plain(self) -> list[float]:
        """Return the seconds of some plain steps, after one that does not count."""
        for _ in range(PLAIN_WARMUP):
            self._plain_step()
        return [self._plain_step() for _ in range(PLAIN_STEPS)]

    def copy_seconds(self) -> float:
        """Return M: the seconds of a plain copy of the whole state, by all cores."""
        size = min(self.bytes, COPY_BYTES_MAX)
        took = min(_core.calibrate(size) for _ in range(2)) / 1e9
        return took * self.bytes / size

    # -- blocks --------------------------------------------------------------------------------

    def fits(self, strategy: type[Strategy]) -> None:
        """Raise UnavailableError where *strategy* would need more memory than there is."""
        needed = int(strategy.copies * self.bytes) + MEMORY_SPARE_BYTES
        free = psutil.virtual_memory().available
        if needed > free:
            raise UnavailableError(
                f"it would take about {needed / 2**30:.1f} GiB of memory and files; "
                f"{free / 2**30:.1f} are free"
            )

    def block(self, kind: type[Strategy], *, alone: bool) -> dict[str, Any]:
        """Run one block of a strategy; *alone* also has it save alone and restore."""
        self.fits(kind)
        self.folder.mkdir(exist_ok=True)
        empty(self.folder)
        strategy = kind(self.folder, self.workload, self.options.every)
        settle()
        watch = Watch(self.folder, mapped=kind.mapped)
        try:
            self._plain_step()
            watch.plain_ends()
            base = self.step
            strategy.open()
            with _closed(strategy):
                for _ in range(self._warmup(kind)):
                    self._saved_step(strategy, base)
                memory = watch.stop()
                block = self._steps(strategy, base)
                strategy.drain()
                if alone:
                    block["alone"] = self._alone(strategy, base)
        finally:
            watch.stop()
        empty(self.folder)
        return block | {"extra_memory_bytes": memory, "media_bytes": watch.media_bytes}

    def _warmup(self, kind: type[Strategy]) -> int:
        """Return the steps before those that count: as many saves as *kind* wants, or nearly."""
        every = self.options.every
        return max(every, min(kind.warmup * every, WARMUP_STEPS_MAX))

    def _steps(self, strategy: Strategy, base: int) -> dict[str, Any]:
        """Train the counted steps of a block."""
        every, counted = self.options.every, self.options.steps
        wanted = counted if every == 1 else max(1, counted // every) * every
        steps, stalls, saves, self.workload.phases = [], [], [], []
        strategy.stall()
        began = time.perf_counter()
        for index in range(wanted):
            took, stall = self._saved_step(strategy, base)
            steps.append(took)
            stalls.append(stall)
            saves.append(time.monotonic_ns())
            late = time.perf_counter() - began > STEPS_SECONDS_MAX
            if late and (index + 1) % every == 0:
                break
        phases = [[*phase, end] for phase, end in zip(self.workload.phases, saves, strict=True)]
        return {"steps": steps, "stalls": stalls, "timeline": _timeline(phases, strategy)}

    def _saved_step(self, strategy: Strategy, base: int) -> tuple[float, float]:
        """Train one step with *strategy*; return its seconds and those that training waited."""
        self.step += 1
        begin = time.perf_counter()
        stalled = saved_step(strategy, self.step - base)
        return time.perf_counter() - begin, stalled

    def _alone(self, strategy: Strategy, base: int) -> dict[str, Any]:
        """Save with nothing beside it, and restore what was saved over scrambled tensors."""
        stalls, persists = [], []
        began = time.perf_counter()
        most = 1 if self.options.smoke else ALONE_MAX
        while not persists or (
            len(persists) < most and time.perf_counter() - began < ALONE_SECONDS
        ):
            stall, persist = self._save_alone(strategy, base)
            stalls.append(stall)
            persists.append(persist)
        restored = restore_over_zeros(strategy, self.step - base)
        return {"stalls": stalls, "persists": persists, "restore_s": restored, "verified": True}

    def _save_alone(self, strategy: Strategy, base: int) -> tuple[float, float]:
        """Save once; return the seconds until the call returned, and until it was durable."""
        while (self.step + 1 - base) % self.options.every:
            self._saved_step(strategy, base)
        self.step += 1
        self.workload.step(strategy.before_update)
        begin = time.perf_counter()
        strategy.after_step(self.step - base)
        returned = time.perf_counter()
        strategy.drain()
        return returned - begin, time.perf_counter() - begin


def _timeline(phases: list[list[int]], strategy: Strategy) -> dict[str, Any]:
    """Return the first steps' phases, and what was persisted beside them, in ms from the first."""
    phases = phases[:TIMELINE_STEPS]
    first, last = phases[0][0], phases[-1][-1]
    beside = [span for span in strategy.persists() if span[1] > first and span[0] < last]
    return {
        "steps": [[(at - first) / 1e6 for at in phase] for phase in phases],
        "persists": [[(at - first) / 1e6 for at in span] for span in beside],
    }


@contextmanager
def _closed(strategy: Strategy) -> Iterator[None]:
    """Close *strategy* at the end, whatever happens."""
    try:
        yield
    finally:
        strategy.close()


def finalists(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Return what later rounds are of, after one block of each: ours, and the best peers.

    A peer whose block took too long is not measured again.
    """
    added = {
        name: median(block["steps"]) - figures.plain_seconds(block)
        for name, entry in entries.items()
        for block in entry.get("blocks", ())[:1]
        if name in OURS or block["seconds"] <= FINAL_SECONDS_MAX
    }
    peers = sorted((n for n in added if not n.startswith(OURS[0])), key=added.__getitem__)
    return [name for name in OURS if name in added] + peers[:FINAL_PEERS]


def measure(bench: Bench) -> dict[str, dict[str, Any]]:
    """Run rounds until there are enough or the time is over; return entries by strategy."""
    options = bench.options
    chosen, missing = catalog.choose(options.strategies, state_bytes=bench.bytes)
    entries: dict[str, dict[str, Any]] = {
        name: {"blocks": []} for name in catalog.NAMES if name in chosen
    } | {name: {"missing": reason} for name, reason in missing.items()}
    order = random.Random(options.seed)
    began = time.monotonic()
    _round(bench, 0, _shuffled(chosen, order), entries)
    rounds = options.rounds if time.monotonic() - began <= FIRST_SECONDS_MAX else 1
    began = time.monotonic()
    for number in range(1, rounds):
        if time.monotonic() - began > options.budget_s:
            break
        kinds = {name: chosen[name] for name in finalists(entries)}
        _round(bench, number, _shuffled(kinds, order), entries)
    for entry in entries.values():
        if entry.get("blocks"):
            entry["figures"] = figures.summarise(
                entry["blocks"], every=options.every, state_bytes=bench.bytes
            )
    return entries


def _shuffled(kinds: dict[str, type[Strategy]], order: random.Random) -> list[type[Strategy]]:
    names = [*kinds]
    order.shuffle(names)
    return [kinds[name] for name in names]


def _round(
    bench: Bench, number: int, kinds: list[type[Strategy]], entries: dict[str, dict[str, Any]]
) -> None:
    """Run a block of each of *kinds*, in this order, between plain steps."""
    plain = bench.plain()
    for kind in kinds:
        entered = time.monotonic()
        copy = bench.copy_seconds()
        # A save alone is of the step that is due, and costs all those before it.
        alone = bench.options.every == 1 and (number == 0 or kind.name in OURS)
        try:
            block = bench.block(kind, alone=alone)
        except UnavailableError as reason:
            entries[kind.name] = {"missing": str(reason)}
            bench.say(f"{kind.name}: not run: {reason}")
            plain = bench.plain()
            continue
        after = bench.plain()
        block |= {
            "seconds": time.monotonic() - entered,
            "round": number,
            "copy_s": copy,
            "plain_before": plain,
            "plain_after": after,
        }
        plain = after
        if number:  # one is enough to look at
            del block["timeline"]
        entries[kind.name]["blocks"].append(block)
        added = median(block["steps"]) - figures.plain_seconds(block)
        took = f"{1e3 * added:+.0f} ms a step; {block['seconds']:.0f} s"
        bench.say(f"round {number + 1}: {kind.name}: {took}")


def run(options: Options) -> int:
    """Run the benchmark of *options* and append its line; returns the exit status."""
    console = Console(highlight=False, width=CONSOLE_COLUMNS)
    if "list" in options.strategies:
        for name, reason in catalog.listing():
            console.print(f"{name}: {reason or 'can run here'}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("bench: --device cuda: torch finds no GPU here; nothing was measured")
        return 2

    def say(words: str) -> None:
        console.print(words)
        console.file.flush()  # so that who looks at a log sees it

    began = time.monotonic()
    # timeout and the like end it as an error would, or gigabytes of files stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is
    torch.set_num_threads(psutil.cpu_count() or 1)
    workload = build(options.model, device=options.device, smoke=options.smoke, seed=options.seed)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix=PREFIX))
    try:
        bench = Bench(options, folder / "block", workload, say)
        entries = measure(bench)
        line = _line(options, bench, entries)
        del bench, workload  # lives need the room
        if options.recovery or options.kills:
            size = line["parameters"]["state_bytes"]
            line |= kills.run_all(options, entries, folder, say, state_bytes=size)
        line["seconds"] = time.monotonic() - began
        record.append(options.results, line)
    finally:
        shutil.rmtree(folder)
    catalog.show(console, line)
    return 0


def _line(options: Options, bench: Bench, entries: dict[str, Any]) -> dict[str, Any]:
    blocks = [block for entry in entries.values() for block in entry.get("blocks", ())]
    plain = [step for block in blocks for step in block["plain_before"]]
    line = record.make_line(
        "model",
        options.command,
        model=options.model,
        smoke=options.smoke,
        parameters={
            "device": options.device,
            "every": options.every,
            "seed": options.seed,
            "folder": str(options.folder),
            "threads": torch.get_num_threads(),
            "state_bytes": bench.bytes,
            **bench.workload.facts,
        },
        plain_step_s=figures.spread(plain),
        copy_s=figures.spread([block["copy_s"] for block in blocks]),
        strategies=entries,
    )
    line["comparison"] = figures.compare(line)
    return line
