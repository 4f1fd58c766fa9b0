"""How the cost of a version grows: with the number of tensors, with their bytes, and at the ends.

    python bench/scale.py [--smoke] [--dir DIR] [--results FILE] [--only PART]

    tensors   10 to 100,000 tensors, of the same bytes altogether
    bytes     1 MB to 1 GB in sixteen tensors
    large     one tensor of more than 4 GiB
    billion   1 B parameters, trained with plain SGD, within 24 GB of memory

Each version is saved alone, stop-and-copy, in turns with the plain copy that it is compared with;
"large" and "billion" are restored, and compared with what was saved. Appends a line a part.
"""

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

import figures
import lightckpt
import record
from arguments import ROOT, default_folder
from lightckpt import _core

RESULTS = ROOT / "bench" / "results" / "scale.ndjson"
COUNTS, COUNTS_BYTES = (10, 100, 1_000, 10_000, 100_000), 64 << 20
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
LARGE_BYTES = (4 << 30) + (64 << 20)
BILLION = {"layers": 15, "width": 8192}
ROUNDS, WARMUP = 7, 3
LARGE_SAVES = 5


def copy_seconds(size: int) -> float:
    sample = min(size, 512 << 20)
    return min(_core.calibrate(sample) for _ in range(2)) / 1e9 * size / sample


def saved(path: Path, tensors: dict[str, torch.Tensor], rounds: int) -> dict[str, Any]:
    """Return the figures of saving *tensors* whole, *rounds* times, each beside a copy."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    took, copies = [], []
    one = next(iter(tensors.values()))
    with lightckpt.Checkpointer(path, tensors=tensors, rng=False, mode="stop") as checkpointer:
        for index in range(WARMUP + rounds):
            copy = copy_seconds(size)
            one.zero_()  # or there is nothing new, and no version
            begin = time.perf_counter()
            checkpointer.mark()
            checkpointer.wait()
            if index >= WARMUP:
                took.append(time.perf_counter() - begin)
                copies.append(copy)
    remove(path)
    return {
        "tensors": len(tensors),
        "bytes": size,
        "save_s": figures.spread(took),
        "copy_s": figures.spread(copies),
    }


def remove(path: Path) -> None:
    for suffix in ("", ".lock"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def by_tensors(folder: Path, *, smoke: bool) -> dict[str, Any]:
    points = []
    for count in COUNTS[: 3 if smoke else None]:
        numbers = COUNTS_BYTES // 4 // count
        tensors = {f"t{index:06}": torch.ones(numbers) for index in range(count)}
        points.append(saved(folder / "store", tensors, ROUNDS))
    return {"points": points}


def by_bytes(folder: Path, *, smoke: bool) -> dict[str, Any]:
    points = []
    for size in SIZES[: 3 if smoke else None]:
        tensors = {f"t{index:02}": torch.ones(size // 64) for index in range(16)}
        points.append(saved(folder / "store", tensors, ROUNDS))
    return {"points": points}


def large(folder: Path, *, smoke: bool) -> dict[str, Any]:
    size = (8 << 20) if smoke else LARGE_BYTES
    tensors = {"one": torch.arange(size // 8)}
    path = folder / "store"
    with lightckpt.Checkpointer(path, tensors=tensors, rng=False, mode="stop") as checkpointer:
        times = []
        for _ in range(LARGE_SAVES):
            tensors["one"].add_(1)
            begin = time.perf_counter()
            checkpointer.mark()
            checkpointer.wait()
            times.append(time.perf_counter() - begin)
        tensors["one"].zero_()
        begin = time.perf_counter()
        checkpointer.restore()
        restore = time.perf_counter() - begin
        verified = _counts_on(tensors["one"], first=LARGE_SAVES)
    remove(path)
    return {
        "tensors": 1,
        "bytes": size,
        "save_s": figures.spread(times[2:]),  # the first two make the pages of their areas
        "restore_s": restore,
        "copy_s": figures.spread([copy_seconds(size)]),
        "verified": verified,
    }


def _counts_on(tensor: torch.Tensor, *, first: int) -> bool:
    """Is *tensor* first, first + 1, and so on? Looked at in pieces: there is no room for two."""
    piece = 1 << 24
    return all(
        bool((part == torch.arange(at + first, at + first + len(part))).all())
        for at in range(0, len(tensor), piece)
        for part in [tensor[at : at + piece]]
    )


def billion(folder: Path, *, smoke: bool) -> dict[str, Any]:
    """Train 1 B parameters with a version in each step; no momentum, which has no room here."""
    torch.manual_seed(0)
    shape = {"layers": 3, "width": 64} if smoke else BILLION
    width = shape["width"]
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(shape["layers"])]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
    batch = torch.randn(1, width)

    def step() -> float:
        begin = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    parameters = sum(p.numel() for p in model.parameters())
    plain = [step() for _ in range(3)][1:]
    path = folder / "store"
    steps, peak = [], 0
    # size: the estimate for a new store takes two moments a parameter, and there are none.
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, mode="overlap",
        size=int(8.2 * parameters) + (64 << 20),
    ) as checkpointer:  # fmt: skip
        for _ in range(8):
            begin = time.perf_counter()
            step()
            checkpointer.mark()
            steps.append(time.perf_counter() - begin)
            peak = max(peak, psutil.Process().memory_info().rss)
        checkpointer.wait()
        before = [float(p.detach().double().sum()) for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        begin = time.perf_counter()
        checkpointer.restore()
        restore = time.perf_counter() - begin
        verified = before == [float(p.detach().double().sum()) for p in model.parameters()]
    remove(path)
    plain += [step() for _ in range(3)][1:]
    return {
        "parameters": parameters,
        "bytes": 4 * parameters,
        "plain_step_s": figures.spread(plain),
        "step_s": figures.spread(steps[6:]),  # copies are lazy for good by then
        "copy_s": figures.spread([copy_seconds(4 * parameters)]),
        "restore_s": restore,
        "verified": verified,
        "resident_bytes": peak,
    }


PARTS = {"tensors": by_tensors, "bytes": by_bytes, "large": large, "billion": billion}
# Bytes in memory and files together, at most.
NEEDS = {"tensors": 1 << 30, "bytes": 5 << 30, "large": 14 << 30, "billion": 18 << 30}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--dir", type=Path, default=None, help="where the stores lie")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=PARTS, default=None)
    options = parser.parse_args()
    console = Console(highlight=False)
    torch.set_num_threads(psutil.cpu_count() or 1)
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        free = psutil.virtual_memory().available
        if not options.smoke and free < NEEDS[name]:
            console.print(f"{name}: not run: it takes {NEEDS[name]} bytes, {free} are free")
            continue
        base = options.dir or default_folder()
        with tempfile.TemporaryDirectory(dir=base, prefix="lightckpt-bench-") as folder:
            result = part(Path(folder), smoke=options.smoke)
        gc.collect()
        command = f"python bench/scale.py --only {name}"
        line = record.make_line("scale", command, part=name, smoke=options.smoke, **result)
        record.append(options.results, line)
        for point in result.get("points", [result]):
            console.print(name, {key: value for key, value in point.items() if key != "points"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
