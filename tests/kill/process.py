"""Process: a trainer.py in a fresh interpreter, for faults that a forked one cannot have."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trainer
from series import Series

HERE = Path(__file__).resolve().parent
SECONDS = 60


class Process:
    """One life. Its reports are heard by *series*, but for those that are returned."""

    def __init__(
        self, series: Series, environment: Mapping[str, str] | None = None, **job: Any
    ) -> None:
        self.series = series
        wanted = trainer.Job(path=str(series.path), **job)
        self._process = subprocess.Popen(
            [sys.executable, HERE / "trainer.py", json.dumps(dataclasses.asdict(wanted))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait(SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def reports(self) -> Iterator[list[Any]]:
        """Yield what it says besides ("trying", k) and ("ack", k), until it has ended."""
        for line in self._process.stdout:
            report = json.loads(line)
            if report[0] in ("trying", "ack"):
                self.series.hear(report)
            else:
                yield report

    def hear(self, count: int) -> None:
        """Wait for *count* reports, all of them ("trying", k) or ("ack", k)."""
        for _ in range(count):
            self.series.hear(json.loads(self._process.stdout.readline()))

    def go(self) -> None:
        """Send the message that it waits for."""
        os.write(self._process.stdin.fileno(), b"\n")

    def to(self, point: str, times: int = 1) -> None:
        """Let it go on from point to point, if it talks, until it waits at *point*."""
        for report in self.reports():
            assert report[0] == "at", report
            times -= report[1] == point
            if times == 0:
                return
            self.go()
        raise AssertionError(f"it ended with {self.code()} before {point}")

    def end(self) -> list[Any]:
        """Let it go on to its end, of itself; return its last report."""
        last: list[Any] = []
        for report in self.reports():
            last = report
            if report[0] == "at":
                self.go()
        assert self.code() in (0, 1), f"it ended with {self.code()}: {last}"
        return last

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert not [report for report in self.reports() if report[0] == "error"]
        assert self.code() == -signal.SIGKILL

    def code(self) -> int:
        return self._process.wait(SECONDS)
