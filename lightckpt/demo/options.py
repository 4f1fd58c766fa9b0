"""The demo's options: one place where they are declared, checked, and filled in."""

import argparse
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .drill import steps_min
from .job import EPOCHS
from .process import DemoError

SHARED_MEMORY = Path("/dev/shm")
# A store with two versions and room to spare, and torch.save's file beside its successor.
FULL_BYTES = 800 << 20
QUICK_BYTES = 32 << 20
THREADS_MAX = 4


@dataclass(frozen=True)
class Options:
    """What to do. ``steps`` is a multiple of ``EPOCHS``; ``folder`` has room for the stores."""

    steps: int
    kills: int
    seed: int
    folder: Path
    picture: Path
    json: bool
    quick: bool
    keep_store: bool
    threads: int
    measure_s: float


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on *parser*."""
    parser.add_argument("--steps", type=int, help="training steps (default 24; --quick: 45)")
    parser.add_argument("--kills", type=int, help="times to kill it (default 4; --quick: 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the training and of the kills")
    parser.add_argument("--dir", type=Path, help="where the stores go (default /dev/shm)")
    parser.add_argument(
        "--out", type=Path, default=Path("lightckpt-demo.png"), help="picture to write"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model, some seconds")
    parser.add_argument("--keep-store", action="store_true", help="leave the stores in place")


def resolve(arguments: argparse.Namespace) -> Options:
    """Fill in and check what was given.

    Raises:
        DemoError: a value cannot be used; the message says which would do.
    """
    quick: bool = arguments.quick
    kills = _or(arguments.kills, 2 if quick else 4)
    steps = _or(arguments.steps, 45 if quick else 24)
    if kills < 0 or steps < steps_min(kills):
        raise DemoError(f"{kills} kills need --steps {steps_min(max(kills, 0))} or more")
    picture: Path = arguments.out.absolute()
    if not os.access(picture.parent, os.W_OK):
        raise DemoError(f"cannot write the picture: no writable folder {picture.parent}")
    return Options(
        steps=-(-steps // EPOCHS) * EPOCHS,
        kills=kills,
        seed=arguments.seed,
        folder=_choose_folder(arguments.dir, QUICK_BYTES if quick else FULL_BYTES),
        picture=picture,
        json=arguments.json,
        quick=quick,
        keep_store=arguments.keep_store,
        threads=min(len(os.sched_getaffinity(0)), THREADS_MAX),
        measure_s=0.0 if quick else 25.0,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _choose_folder(asked: Path | None, need_bytes: int) -> Path:
    candidates = [asked.absolute()] if asked else [SHARED_MEMORY, Path(tempfile.gettempdir())]
    problems: list[str] = []
    for folder in candidates:
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            problems.append(f"{folder} is no writable folder")
        elif (free_bytes := shutil.disk_usage(folder).free) < need_bytes:
            problems.append(f"{folder} has {free_bytes:,} bytes free, {need_bytes:,} are needed")
        else:
            return folder
    raise DemoError("; ".join(problems) + " (see --dir)")
