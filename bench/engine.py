"""The engine against the machine's own copy: what a version costs, in ratios, in one run.

    python bench/engine.py [--quick] [--dir /dev/shm] [--rounds N]

M is the time of one plain non-temporal copy of the whole state between warm buffers, by as many
threads as the store has workers; T is the plain training step. Both are measured in the same run
and in turns with what they are compared with, since any number here is only as good as the moment:
the line that is recorded has medians with their tenth and ninetieth percentiles. Appends one line
to bench/results/engine.ndjson (or --results). The models beside other libraries are in harness.py.

Workload: the demo's byte-level GPT with AdamW (10.8 M parameters, 130 MB of state), batch 4 x 96.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import lightckpt
from lightckpt import _core
from lightckpt._core import Op, Store
from lightckpt.demo.job import FULL, QUICK
from lightckpt.demo.model import ByteGPT

ROOT = Path(__file__).resolve().parent.parent
Samples = dict[str, list[float]]

# The instructions that decide how quickly a checksum comes, as Linux names them.
FOLDING = ("pclmulqdq", "vpclmulqdq", "avx2", "avx512vl")

# What each figure should reach; None: reported only.
TARGETS: dict[str, tuple[str, float] | None] = {
    "persist_over_copy": (">=", 0.95),  # on a processor with VPCLMULQDQ
    "overlap_stall_over_M": ("<=", 0.15),
    "stop_over_M": ("<=", 1.15),
    "overlap_added_over_allowed": ("<=", 1.0),
    "stop_added_over_allowed": ("<=", 1.0),
    "restore_over_memcpy": (">=", 0.9),
    "restore_verified_over_memcpy": (">=", 0.85),
    "fresh_restore_over_populate_and_copy": ("<=", 1.15),
    "python_us_per_tensor": ("<=", 2.0),
    "page_faults_per_save": ("<=", 0.0),
    "rss_growth_mb_over_saves": ("<=", 1.0),
    "fd_growth_over_saves": ("<=", 0.0),
    "commit_us": ("<=", 20.0),
    "extra_memory_mb_over_allowed": ("<=", 1.0),
    "plain_step_ms": None,
    "copy_ms": None,
    "overlap_added_percent": None,
    "stop_added_percent": None,
}


def seconds_of(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def remove_store(path: Path) -> None:
    for suffix in ("", ".lock", ".tmp"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def bench_store(path: Path, size: int, rounds: int, samples: Samples) -> None:
    """The core alone: save, restore and verify one large state, in turns with plain copies."""
    parts = [size // 4] * 4
    live = [np.full(n, 7, np.uint8) for n in parts]
    target = [np.empty_like(a) for a in live]
    for array in target:
        array[:] = 1
    with Store(path, create=True) as store:
        workers = store.info().workers
        spans = _core.make_spans([(a.ctypes.data, i) for i, a in enumerate(live)])
        back = _core.make_spans([(a.ctypes.data, i) for i, a in enumerate(target)])
        sizes = _core.make_sizes(parts)

        def save() -> None:
            store.begin(step=1, keep=1, extents=sizes, blob=b"{}", host_bytes=64)
            store.wait(store.submit(Op.WRITE, spans))
            store.wait(store.commit(b"h" * 64))

        def read(op: Op) -> None:
            store.wait(store.submit(op, back, version=store.versions()[0].version))

        save(), save(), read(Op.READ)
        for _ in range(rounds):
            copy = _core.calibrate(size, workers) / 1e9
            samples["copy_ms"].append(copy * 1e3)
            saved = seconds_of(save)
            samples["stop_over_M"].append(saved / copy)
            samples["persist_over_copy"].append(copy / saved)
            samples["commit_us"].append(store.info().commit_ns / 1e3)
            samples["restore_over_memcpy"].append(copy / seconds_of(lambda: read(Op.COPY)))
            samples["restore_verified_over_memcpy"].append(copy / seconds_of(lambda: read(Op.READ)))
    assert all(np.array_equal(a, b) for a, b in zip(live, target, strict=True))


FRESH = """
import sys, time, os, threading
import numpy as np
from lightckpt import _core
from lightckpt._core import Op, Store
path, first = sys.argv[1], sys.argv[2]
with Store(path, read_only=True) as store:
    version = store.versions()[0]
    size = sum(len(store.locate(version.version, i)) for i in range(version.extent_count))
    target = np.ones(size, np.uint8)
    def by_pread():
        fd, half = os.open(path, os.O_RDONLY), size // store.info().workers + 1
        begin = time.perf_counter()
        def part(at):
            view = memoryview(target)[at:at + half]
            while view:
                n = os.preadv(fd, [view], at)
                assert n > 0, "the file is longer than this"
                view, at = view[n:], at + n
        threads = [threading.Thread(target=part, args=(at,)) for at in range(0, size, half)]
        [t.start() for t in threads], [t.join() for t in threads]
        return time.perf_counter() - begin
    def by_store():
        pairs, at = [], 0
        for i in range(version.extent_count):
            pairs.append((target.ctypes.data + at, i))
            at += len(store.locate(version.version, i))
        spans = _core.make_spans(pairs)
        begin = time.perf_counter()
        store.wait(store.submit(Op.READ, spans, version=version.version))
        return time.perf_counter() - begin
    # The same number of bytes of the same file, from its beginning: as warm, as unmapped.
    if first == "pread":
        pread = by_pread(); read = by_store()
    else:
        read = by_store(); pread = by_pread()
    copy = _core.calibrate(size, store.info().workers) / 1e9
print(pread, copy, read)
"""


def bench_fresh(path: Path, rounds: int, samples: Samples) -> None:
    """A fresh process: read a version whose pages are not mapped yet, into touched memory."""
    for index in range(rounds):
        first = ("pread", "store")[index % 2]
        ran = subprocess.run(
            [sys.executable, "-c", FRESH, str(path), first],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        pread, copy, read = map(float, ran.stdout.split())
        samples["fresh_restore_over_populate_and_copy"].append(read / (pread + copy))


class Trainer:
    """The demo's model on random bytes; ``step`` is one plain iteration."""

    def __init__(self, quick: bool) -> None:
        torch.manual_seed(0)
        shape = QUICK if quick else FULL
        self.model = ByteGPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(256, (shape.batch, shape.context + 1))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).backward()
        self.optimizer.step()


def bench_training(folder: Path, quick: bool, rounds: int, samples: Samples) -> dict[str, Any]:
    """Whole steps: plain, overlapped and stop-and-copy blocks in turns on one model."""
    trainer = Trainer(quick)
    stores = {mode: folder / f"bench-{mode}" for mode in ("overlap", "stop")}
    checkpointers = {
        mode: lightckpt.Checkpointer(
            path, model=trainer.model, optimizer=trainer.optimizer, mode=mode, on_error="raise"
        )
        for mode, path in stores.items()
    }
    for checkpointer in checkpointers.values():  # until every layer is trusted and rechecked
        for _ in range(8):
            trainer.step()
            checkpointer.mark()
        checkpointer.wait()
    info = checkpointers["stop"].info()
    size = sum(c[2] for c in checkpointers["stop"].timeline[-1].copies)
    block, steps = 5, {"plain": [], "overlap": [], "stop": []}
    for _ in range(rounds):
        copy = min(_core.calibrate(size, info.workers) for _ in range(2)) / 1e9
        medians = {}
        for mode in ("plain", "overlap", "stop", "plain"):
            checkpointer = checkpointers.get(mode)
            before = (checkpointer.stats.boundary_seconds, checkpointer.stats.guard_seconds) if (
                checkpointer) else (0.0, 0.0)  # fmt: skip
            times = []
            for _ in range(block):
                begin = time.perf_counter()
                trainer.step()
                if checkpointer is not None:
                    checkpointer.mark()
                times.append(time.perf_counter() - begin)
            if checkpointer is not None:
                stats = checkpointer.stats
                stall = stats.boundary_seconds + stats.guard_seconds - sum(before)
                samples[f"{mode}_stall_over_M"].append(stall / block / copy)
                checkpointer.wait()
            steps[mode] += times
            medians.setdefault(mode, []).extend(times)
        plain = float(np.median(medians["plain"]))
        samples["plain_step_ms"].append(plain * 1e3)
        for mode in ("overlap", "stop"):
            added = float(np.median(medians[mode])) - plain
            samples[f"{mode}_added_percent"].append(100 * added / plain)
            samples[f"{mode}_added_over_allowed"].append(added / (1.3 * copy + 0.01 * plain))
    for mode, checkpointer in checkpointers.items():
        checkpointer.close()
        remove_store(stores[mode])
    return {"state_bytes": size, "parameters": sum(p.numel() for p in trainer.model.parameters())}


def bench_steady(folder: Path, saves: int, samples: Samples) -> None:
    """Many saves of many small tensors: Python, page faults, memory and descriptors."""
    count = 2000
    tensors = {f"t{i:04}": torch.ones(16) for i in range(count)}
    path = folder / "bench-steady"
    with lightckpt.Checkpointer(path, tensors=tensors, rng=False, mode="stop") as checkpointer:
        for _ in range(20):
            checkpointer.mark()
        checkpointer.wait()
        fds = len(os.listdir("/proc/self/fd"))
        rss = resident_mb()
        for _ in range(saves):
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            begin = time.perf_counter()
            checkpointer.mark()
            elapsed = time.perf_counter() - begin
            samples["page_faults_per_save"].append(
                resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            )
            # The whole boundary, copies of all tensors included, so an upper bound for Python.
            samples["python_us_per_tensor"].append(elapsed * 1e6 / count)
        checkpointer.wait()
        samples["rss_growth_mb_over_saves"].append(resident_mb() - rss)
        samples["fd_growth_over_saves"].append(len(os.listdir("/proc/self/fd")) - fds)
    remove_store(path)


def bench_extra_memory(folder: Path, quick: bool, samples: Samples) -> None:
    """Private memory that checkpointing adds to training, against what it may add."""
    trainer = Trainer(quick)
    for _ in range(4):
        trainer.step()
    before = private_mb()
    path = folder / "bench-memory"
    with lightckpt.Checkpointer(
        path, model=trainer.model, optimizer=trainer.optimizer, mode="overlap"
    ) as checkpointer:
        for _ in range(10):
            trainer.step()
            checkpointer.mark()
        checkpointer.wait()
        grown = private_mb() - before
    largest = sorted(p.numel() * 4 * 3 for p in trainer.model.parameters())[-2:]
    samples["extra_memory_mb_over_allowed"].append(grown / (64 + sum(largest) / 2**20))
    remove_store(path)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def private_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def summarise(samples: Samples) -> dict[str, dict[str, Any]]:
    rows = {}
    for name, target in TARGETS.items():
        values = samples[name]
        row: dict[str, Any] = {
            "median": float(np.median(values)),
            "p10": float(np.percentile(values, 10)),
            "p90": float(np.percentile(values, 90)),
            "n": len(values),
        }
        if target is not None:
            compare, limit = target
            met = row["median"] <= limit if compare == "<=" else row["median"] >= limit
            row |= {"target": f"{compare} {limit:g}", "met": bool(met)}
        rows[name] = row
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--dir", type=Path, default=None, help="where the stores lie")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results/engine.ndjson")
    options = parser.parse_args()
    console = Console()
    base = options.dir or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    rounds = options.rounds or (3 if options.quick else 15)
    pairs = 3 if options.quick else max(31, 2 * rounds)
    samples: Samples = {name: [] for name in TARGETS} | {"stop_stall_over_M": []}
    with tempfile.TemporaryDirectory(dir=base, prefix="lightckpt-bench-") as name:
        folder = Path(name)
        facts = bench_training(folder, options.quick, rounds, samples)
        bench_store(folder / "store", facts["state_bytes"], pairs, samples)
        bench_fresh(folder / "store", max(3, rounds // 2), samples)
        bench_steady(folder, 50 if options.quick else 1000, samples)
        bench_extra_memory(folder, options.quick, samples)
        media = str(options.dir or base)
    rows = summarise(samples)
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False)
    line = {
        "bench": "engine",
        "command": "python bench/engine.py" + (" --quick" if options.quick else ""),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "folds_by": [flag for flag in FOLDING if flag in cpu_flags()],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": {**facts, "dir": media, "rounds": rounds},
        "load": os.getloadavg()[0],
        "results": rows,
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as results:
        results.write(json.dumps(line) + "\n")
    table = Table("figure", "median", "p10", "p90", "n", "target", "met")
    for name, row in rows.items():
        met = {None: "", True: "yes", False: "no"}[row.get("met")]
        numbers = [f"{row[k]:.3g}" for k in ("median", "p10", "p90")]
        table.add_row(name, *numbers, str(row["n"]), row.get("target", ""), met)
    console.print(table)
    return 0


def cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
