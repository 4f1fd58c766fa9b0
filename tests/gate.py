"""A gate for the copies of emulated stores: a test holds what must be slow, instead of its size.

See csrc/emulated_media.h. A store that is opened with ``media="emulated"`` while the fixture
``gate`` is there makes no copy while the gate is closed: whatever is copied stays under way until
the test opens it. Close it when nothing is under way: a copy that has passed it is through.
"""

import fcntl
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "LIGHTCKPT_EMULATED_GATE"
DEADLINE_S = 60


class Gate:
    """Open at first, and from the end of its ``with`` block on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def close(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def until(happened: Callable[[], bool], what: str) -> None:
    """Wait for what comes by itself, sooner or later; a hang is a failure that says *what*."""
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, f"in {DEADLINE_S} s: no {what}"
