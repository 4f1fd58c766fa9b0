"""The line that a benchmark leaves: what ran, where, with which versions, and what came out.

One JSON object a line, appended by one write. A line has the samples themselves, so that every
figure made of them can be made again.
"""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from arguments import ROOT

COMMIT_FILE = ROOT / "build" / "gpu-wheels" / "commit"
PACKAGES = (
    "lightckpt", "torch", "torchvision", "transformers", "numpy", "safetensors", "torchsnapshot",
    "torch_checkpointing", "moonclip", "ckpt-chaos", "scikit-learn",
)  # fmt: skip


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions() -> dict[str, str]:
    """Return the releases of what takes part and is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit that runs, marked if files differ from it; "" where nobody knows it.

    Recorded lines do not count: a run of several scripts adds to them itself. Where there is no
    git, or no repository, it is what ``make gpu-wheels`` was run of.
    """
    head = _git("rev-parse", "--short", "HEAD")
    if not head:
        return COMMIT_FILE.read_text(encoding="ascii").strip() if COMMIT_FILE.is_file() else ""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    """Return what git says; "" where it is not installed, or refuses."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def make_line(bench: str, command: str, **fields: Any) -> dict[str, Any]:
    """Return a line of *bench* with the circumstances filled in."""
    return {
        "bench": bench,
        "command": command,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes(),
            "system": f"Linux {platform.release()}",
        },
        "versions": versions(),
        "load": os.getloadavg()[0],
        **fields,
    }


def append(path: Path, line: dict[str, Any]) -> None:
    """Append *line* to *path*, made with its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_rounded(line)) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of *path*, oldest first; none if there is no such file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _rounded(value: Any) -> Any:
    """Return *value* with floats at seven digits, which no clock here exceeds."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
