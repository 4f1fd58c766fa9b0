"""A trainer process as its supervisor sees it: started, read from, killed, always ended.

Invariants:

1. A process is ended by its own handle, never by name, and is always waited for.
2. No wait is without a deadline: a trainer that stays silent too long is an error.
3. Reports written before a kill are read after it: the pipe outlives the process.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from .job import Job

SILENCE_S_MAX = 180.0
READ_BYTES = 1 << 16
STDERR_LINES = 15
# The count of torch's threads stays as the job has it, since sums are rounded by thread. And they
# sleep where they wait: spinning, they keep the core from whoever they wait for, and a step on a
# shared machine takes 0.7 s or 2.7 s by chance.
THREADING = {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}


class DemoError(Exception):
    """The demo could not be run to its end; says nothing about the checkpoints."""


class Trainer:
    """A running trainer; leaving its ``with`` block kills it if it still lives.

    Args:
        job: what to do; the pipe is made here.
    """

    def __init__(self, job: Job) -> None:
        self._stderr_path = Path(job.folder) / f"{job.role}.stderr"
        self._read_fd, write_fd = os.pipe()
        self._buffer, self._closed = b"", False
        environment = os.environ | THREADING
        arguments = replace(job, report_fd=write_fd).to_json()
        try:
            with open(self._stderr_path, "ab") as stderr:
                self.started_ns = time.monotonic_ns()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", f"{__package__}.trainer", arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(write_fd,),
                    env=environment,
                )
        except BaseException:
            os.close(self._read_fd)
            raise
        finally:
            os.close(write_fd)

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yield reports until the trainer has closed its pipe.

        Raises:
            DemoError: it neither reports nor ends.
        """
        while (report := self._next(SILENCE_S_MAX)) is not None:
            yield report
        if not self._closed:
            raise DemoError(f"the trainer has reported nothing for {SILENCE_S_MAX:.0f} s")

    def reports_until(self, deadline_ns: int) -> Iterator[dict[str, Any]]:
        """Yield reports until CLOCK_MONOTONIC reaches *deadline_ns* or the pipe is closed."""
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if (report := self._next(left_ns / 1e9)) is None:
                return
            yield report

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next report; None if there is none in time, or will be none."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                report: dict[str, Any] = json.loads(line)
                return report
            if self._closed or not select.select([self._read_fd], [], [], timeout_s)[0]:
                return None
            data = os.read(self._read_fd, READ_BYTES)
            self._closed = not data
            self._buffer += data

    def kill(self) -> int:
        """Send SIGKILL, wait until the process is gone, and return the moment it was sent."""
        now_ns = time.monotonic_ns()
        self._process.kill()
        self._process.wait(SILENCE_S_MAX)
        return now_ns

    def finish(self) -> None:
        """Wait for the process to end by itself.

        Raises:
            DemoError: it failed, or does not end; with the end of what it wrote to stderr.
        """
        try:
            code = self._process.wait(SILENCE_S_MAX)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the trainer has not ended after {SILENCE_S_MAX:.0f} s") from None
        if code != 0:
            lines = self._stderr_path.read_text(errors="replace").splitlines()[-STDERR_LINES:]
            raise DemoError("\n".join([f"the trainer failed with exit code {code}:", *lines]))

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        os.close(self._read_fd)
