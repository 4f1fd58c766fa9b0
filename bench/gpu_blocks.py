"""Blocks of steps on a GPU: what a strategy adds to plain steps, and what its saves alone take.

Blocks of a strategy alternate with blocks of plain steps, as in harness.py, and are compared with
their neighbours. A block is timed whole, from a device that is idle to the moment the training
stream is: to wait for the device in every step would also wait for copies, which is what a step
must not do.
"""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

import figures
from state import state_bytes
from strategies import Strategy, UnavailableError, empty, restore_over_zeros, saved_step
from workloads import Workload

LIMIT_BYTES = 256 << 20
LOOK_MS = 50
BLOCK_SECONDS_MAX = 8.0  # a strategy that is so slow counts fewer steps, at least one
STRATEGY_SECONDS_MAX = 20.0  # no further round begins after so long
ALONE_MAX, ALONE_SECONDS = 3, 3.0  # saves with nothing beside them, for so long at most
ROOM_SPARE_BYTES = 256 << 20
ENDED_SECONDS = 5.0

Say = Callable[[str], None]


class Busy:
    """How busy the GPU is, as nvidia-smi says, until stopped."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._tool = None
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=utilization.gpu", "-lms", str(LOOK_MS)]
            form = "--format=csv,noheader,nounits"
            with suppress(OSError):  # it cannot be run: then there are no samples
                self._tool = subprocess.Popen([*command, form], stdout=subprocess.PIPE, text=True)
                self._thread = threading.Thread(target=self._read, daemon=True)
                self._thread.start()

    def _read(self) -> None:
        for line in self._tool.stdout:
            if line.strip().isdigit():
                self._samples.append(float(line))

    def stop(self) -> list[float]:
        """End the tool; return the samples, in percent, none where it is missing."""
        if self._tool is not None:
            self._tool.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it
                self._tool.wait(ENDED_SECONDS)
            self._thread.join(ENDED_SECONDS)
            if not self._thread.is_alive():
                self._tool.stdout.close()
            self._tool = None
        return self._samples


def limit_bytes_s() -> float:
    """Return the bytes a second that one large copy from the device into pinned memory makes."""
    source = torch.ones(LIMIT_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(LIMIT_BYTES, dtype=torch.uint8, pin_memory=True)
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, LIMIT_BYTES / (time.perf_counter() - begin))
    return best


class GpuBench:
    """The run on one model."""

    def __init__(self, workload: Workload, folder: Path, steps: int) -> None:
        self.workload, self.folder, self.steps, self.step = workload, folder, steps, 0
        for _ in range(3):
            workload.step()
        self.bytes = state_bytes(workload.state())

    def plain(self) -> float:
        """Return the seconds of a plain step, the mean of a block."""
        self.workload.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(self.steps):
            self.workload.step()
        torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - begin) / self.steps

    def fits(self, kind: type[Strategy]) -> None:
        """Raise UnavailableError where the folder has no room for *kind*."""
        needed = int(kind.copies * self.bytes) + ROOM_SPARE_BYTES
        free = shutil.disk_usage(self.folder.parent).free
        if needed > free:
            raise UnavailableError(
                f"it would take about {needed / 2**30:.1f} GiB in {self.folder.parent}; "
                f"{free / 2**30:.1f} are free"
            )

    def block(self, kind: type[Strategy], *, first: bool) -> dict[str, Any]:
        """Run one block of a strategy; the *first* also has it save alone and restore."""
        self.fits(kind)
        self.folder.mkdir(exist_ok=True)
        empty(self.folder)
        strategy = kind(self.folder, self.workload, 1)
        base = self.step
        strategy.open()
        with closed(strategy):
            for _ in range(kind.warmup):
                self._one(strategy, base)
            strategy.drain()
            torch.cuda.synchronize()
            strategy.stall()
            found = self._counted(strategy, base)
            strategy.drain()
            if first:
                found["alone"] = self._alone(strategy, base)
        empty(self.folder)
        return found

    def _counted(self, strategy: Strategy, base: int) -> dict[str, Any]:
        """Train the counted steps of a block."""
        busy = Busy()
        try:
            stall, steps = 0.0, 0
            begin = time.perf_counter()
            while steps < self.steps:
                stall += self._one(strategy, base)
                steps += 1
                if time.perf_counter() - begin > BLOCK_SECONDS_MAX:
                    break
            torch.cuda.current_stream().synchronize()
            step = (time.perf_counter() - begin) / steps
        finally:
            samples = busy.stop()
        return {"step_s": step, "stall_s": stall / steps, "steps": steps, "gpu_percent": samples}

    def _one(self, strategy: Strategy, base: int) -> float:
        """Train one step with *strategy*; return the seconds that the host waited for it."""
        self.step += 1
        return saved_step(strategy, self.step - base)

    def _alone(self, strategy: Strategy, base: int) -> dict[str, float]:
        """Save with an idle device, some times, and restore what was saved."""
        persists: list[float] = []
        began = time.perf_counter()
        while not persists or (
            len(persists) < ALONE_MAX and time.perf_counter() - began < ALONE_SECONDS
        ):
            self.step += 1
            self.workload.step(strategy.before_update)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            strategy.after_step(self.step - base)
            strategy.drain()
            persists.append(time.perf_counter() - begin)
        restore = restore_over_zeros(strategy, self.step - base)
        return {"persist_s": median(persists), "restore_s": restore}


@contextmanager
def closed(strategy: Strategy) -> Iterator[None]:
    """Close *strategy* at the end; where something failed, that is what is raised."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            strategy.close()
        raise
    strategy.close()


def measure(
    bench: GpuBench, kind: type[Strategy], *, limit: float, rounds: int, say: Say
) -> dict[str, Any]:
    """Return the figures of one strategy, or why there are none; *limit* in bytes a second.

    What fails fails for this strategy alone, and is told with its own words. Whatever was measured
    before that stays with it as samples, without figures.
    """
    blocks: list[dict[str, Any]] = []
    began = time.monotonic()
    try:
        plain = bench.plain()
        for number in range(rounds):
            found = bench.block(kind, first=number == 0)
            after = bench.plain()
            blocks.append(found | {"plain_s": (plain + after) / 2})
            plain = after
            added = found["step_s"] - blocks[-1]["plain_s"]
            say(f"{kind.name}: {1e3 * added:+.1f} ms a step")
            if time.monotonic() - began > STRATEGY_SECONDS_MAX:
                break
    except UnavailableError as reason:
        say(f"{kind.name}: not run: {reason}")
        return {"missing": str(reason), "blocks": blocks}
    except Exception as error:  # noqa: BLE001 - each library raises its own
        words = f"{type(error).__name__}: {error}"[:300]
        say(f"{kind.name}: failed: {words}")
        return {"missing": words, "failed": True, "blocks": blocks}
    return summarise(blocks, bytes_of=bench.bytes, limit=limit)


def summarise(blocks: list[dict[str, Any]], *, bytes_of: int, limit: float) -> dict[str, Any]:
    """Return the figures of one strategy's blocks; *limit* in bytes a second."""
    rates = [bytes_of / block["alone"]["persist_s"] for block in blocks if "alone" in block]
    return {
        "blocks": blocks,
        "added_percent": figures.spread([100 * (b["step_s"] / b["plain_s"] - 1) for b in blocks]),
        "stall_s": figures.spread([block["stall_s"] for block in blocks]),
        "bytes_s": figures.spread(rates),
        "of_limit": figures.spread([rate / limit for rate in rates]),
        "gpu_percent": figures.spread([value for b in blocks for value in b["gpu_percent"]]),
        "restore_s": figures.spread([b["alone"]["restore_s"] for b in blocks if "alone" in b]),
    }
