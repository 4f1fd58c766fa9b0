"""The six models on a GPU, a checkpoint in every step: what it adds, beside what copying allows.

    python bench/gpu.py [--models NAMES] [--results FILE] [--dir DIR] [--steps N]

Batch sizes are in workloads.SHAPES, the last of each, and the precision is there too. Blocks of
steps alternate as in harness.py. A block is timed whole, from a device that is idle to the moment
the training stream is: to wait for the device in every step would also wait for copies, which is
what a step must not do. Recovery is as in kills.py.

Without a GPU nothing is measured and nothing is written.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

import figures
import kills
import ours
import record
from arguments import ROOT, default_folder
from peers import DcpStager
from state import state_bytes
from strategies import (
    Strategy,
    TorchSave,
    UnavailableError,
    empty,
    restore_over_zeros,
    saved_step,
)
from styles import CheckFreq
from workloads import Workload, build

RESULTS = ROOT / "bench" / "results" / "gpu.ndjson"
MODELS = ("resnet18", "vgg16", "inception_v3", "alexnet", "gpt2", "bert")
LIMIT_BYTES = 256 << 20
WARMUP, ROUNDS = 7, 3
LOOK_MS = 50


STRATEGIES: tuple[type[Strategy], ...] = (
    *ours.GPU_STRATEGIES, TorchSave, DcpStager, CheckFreq,
)  # fmt: skip


class Busy:
    """How busy the GPU is, as nvidia-smi says, until stopped."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._tool = None
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=utilization.gpu", "-lms", str(LOOK_MS)]
            form = "--format=csv,noheader,nounits"
            self._tool = subprocess.Popen([*command, form], stdout=subprocess.PIPE, text=True)
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()

    def _read(self) -> None:
        for line in self._tool.stdout:
            if line.strip().isdigit():
                self._samples.append(float(line))

    def stop(self) -> list[float]:
        """Return the samples, in percent; none where the tool is missing."""
        if self._tool is not None:
            self._tool.terminate()
            self._tool.wait()
            self._thread.join()
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

    def block(self, kind: type[Strategy], *, first: bool) -> dict[str, Any]:
        self.folder.mkdir(exist_ok=True)
        empty(self.folder)
        strategy = kind(self.folder, self.workload, 1)
        strategy.open()
        base, self.step = self.step, self.step
        try:
            for _ in range(WARMUP):
                self._one(strategy, base)
            strategy.drain()
            torch.cuda.synchronize()
            strategy.stall()
            busy = Busy()
            begin = time.perf_counter()
            stall = sum(self._one(strategy, base) for _ in range(self.steps))
            torch.cuda.current_stream().synchronize()
            step = (time.perf_counter() - begin) / self.steps
            found = {"step_s": step, "stall_s": stall / self.steps, "gpu_percent": busy.stop()}
            strategy.drain()
            if first:
                found["alone"] = self._alone(strategy, base)
        finally:
            strategy.close()
        empty(self.folder)
        return found

    def _one(self, strategy: Strategy, base: int) -> float:
        """Train one step with *strategy*; return the seconds that the host waited for it."""
        self.step += 1
        return saved_step(strategy, self.step - base)

    def _alone(self, strategy: Strategy, base: int) -> dict[str, float]:
        """Save with an idle device, three times, and restore what was saved."""
        persists = []
        for _ in range(3):
            self.step += 1
            self.workload.step(strategy.before_update)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            strategy.after_step(self.step - base)
            strategy.drain()
            persists.append(time.perf_counter() - begin)
        restore = restore_over_zeros(strategy, self.step - base)
        return {"persist_s": median(persists), "restore_s": restore}


def measure(bench: GpuBench, limit: float, seed: int, say: Any) -> dict[str, Any]:
    """Return the figures of every strategy, by name."""
    samples: dict[str, list[dict[str, Any]]] = {kind.name: [] for kind in STRATEGIES}
    missing: dict[str, str] = {}
    order = random.Random(seed)
    plain = bench.plain()
    for number in range(ROUNDS):
        kinds = [kind for kind in STRATEGIES if kind.name not in missing]
        order.shuffle(kinds)
        for kind in kinds:
            try:
                found = bench.block(kind, first=number == 0)
            except (UnavailableError, TypeError, ValueError, RuntimeError, OSError) as error:
                # What this release or this device cannot do is told, with its own words.
                missing[kind.name] = f"{type(error).__name__}: {error}"[:300]
                say(f"{kind.name}: not run: {missing[kind.name]}")
                continue
            after = bench.plain()
            found["plain_s"] = (plain + after) / 2
            plain = after
            samples[kind.name].append(found)
            say(f"{kind.name}: {1e3 * (found['step_s'] - found['plain_s']):+.1f} ms a step")
    return {
        name: {"missing": missing[name]}
        if name in missing
        else summarise(blocks, bytes_of=bench.bytes, limit=limit)
        for name, blocks in samples.items()
    }


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


def run_model(model: str, options: argparse.Namespace, folder: Path, say: Any) -> dict[str, Any]:
    """Measure *model* and return its line."""
    limit = limit_bytes_s()
    workload = build(model, device="cuda", seed=options.seed)
    bench = GpuBench(workload, folder / "block", options.steps)
    plain = [bench.plain() for _ in range(3)]
    found = measure(bench, limit, options.seed, say)
    facts, size = workload.facts, bench.bytes
    del bench, workload
    torch.cuda.empty_cache()
    for name in (kind.name for kind in STRATEGIES if "missing" not in found[kind.name]):
        job = kills.Job(model, name, folder / name, smoke=False, seed=options.seed, device="cuda")
        job.folder.mkdir()
        parts = kills.recover(job)
        found[name]["recovery"] = parts
        found[name]["recovery_s"] = sum(parts[part] for part in kills.RECOVERY_PARTS)
        empty(job.folder)
    return record.make_line(
        "gpu", f"python bench/gpu.py --models {model}", model=model,
        device=torch.cuda.get_device_name(), cuda=torch.version.cuda,
        parameters={**facts, "state_bytes": size},
        plain_step_s=figures.spread(plain), device_to_host_bytes_s=limit, strategies=found,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, by commas")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dir", type=Path, default=None, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a block")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    models = options.models.split(",")
    if unknown := set(models) - set(MODELS):
        parser.error(f"no model {sorted(unknown)}; there are {', '.join(MODELS)}")
    console = Console(highlight=False)
    if not torch.cuda.is_available():
        console.print("bench: torch finds no GPU here; nothing was measured, nothing written")
        return 2
    import_s = {model: kills.start_server(model) for model in models}
    for model in models:
        console.print(f"{model}:")
        base = options.dir or default_folder()
        with tempfile.TemporaryDirectory(dir=base, prefix="lightckpt-bench-") as folder:
            line = run_model(model, options, Path(folder), console.print)
        for found in line["strategies"].values():
            if "recovery_s" in found:  # from the start of a process, so with its imports
                found["recovery_s"] += import_s[model]
        line["import_s"] = import_s[model]
        record.append(options.results, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
