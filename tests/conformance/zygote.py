"""Processes that live one victim.Job each: forked from a warm parent, or started afresh.

Importing torch takes seconds, a fork milliseconds. So one process, the zygote, imports everything,
never computes anything (a fork copies only the calling thread, so there must be no other), and
forks a child per job. Children share the zygote's hash seed and address layout, which real
restarts do not: a few cases also run in fresh processes.

Protocol, one message per packet: ("spawn", ) with the child's end of a pipe attached, answered by
its pid; ("reap", pid, seconds), answered by its exit code, negative for a signal, or None if it
still runs. The zygote ends, and its children with it, when the other side closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Protocol

HERE = Path(__file__).resolve().parent
START_SECONDS = 180  # imports on a busy machine
REAP_SECONDS = 60
PR_SET_PDEATHSIG = 1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Life:
    """A running process: its pid, a descriptor that is readable once it has ended, a connection."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self.connection = pid, connection
        self.pidfd = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self.pidfd)

    def reap(self) -> int | None:
        """Wait until it is gone, locks and all; its exit code, or None after a minute."""
        raise NotImplementedError


class Nursery(Protocol):
    """Where lives come from."""

    def spawn(self) -> Life: ...

    def log(self) -> str:
        """What the processes have written to stderr, for a message."""


class ForkedLife(Life):
    def __init__(self, pid: int, connection: Connection, zygote: Zygote) -> None:
        super().__init__(pid, connection)
        self._zygote = zygote

    def reap(self) -> int | None:
        return self._zygote.ask("reap", self.pid, REAP_SECONDS)


class Zygote:
    """The parent's side."""

    def __init__(self, log: Path, script: Path = HERE / "zygote.py") -> None:
        self._log = log
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        with theirs, log.open("wb") as stderr:
            self._process = _python(script, theirs.fileno(), stderr)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, *message: object, fds: tuple[int, ...] = ()) -> int | None:
        self._control.settimeout(REAP_SECONDS + START_SECONDS)
        socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        return self._answer()

    def _answer(self) -> int | None:
        packet = self._control.recv(1 << 12)  # or the deadline passes
        assert packet, f"the zygote died: {self.log()}"
        return json.loads(packet)

    def spawn(self) -> ForkedLife:
        ours, theirs = Pipe()
        with theirs:
            pid = self.ask("spawn", fds=(theirs.fileno(),))
        assert pid is not None
        return ForkedLife(pid, ours, self)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        self._control.close()
        self._process.wait(REAP_SECONDS)


class FreshLife(Life):
    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        super().__init__(process.pid, connection)
        self._process = process

    def reap(self) -> int | None:
        try:
            return self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return None


class FreshProcesses:
    """A new interpreter for every life, as after a real crash."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def spawn(self) -> FreshLife:
        ours, theirs = Pipe()
        with theirs, self._log.open("ab") as stderr:
            process = _python(HERE / "victim.py", theirs.fileno(), stderr)
        return FreshLife(process, ours)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def _python(script: Path, fd: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(script), str(fd)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


# The zygote's side.


def serve(control: socket.socket, live: Callable[[Connection], None]) -> None:
    """Fork children that run *live*, until the other side closes. Imports are the caller's."""
    faulthandler.enable()
    children: set[int] = set()
    control.send(json.dumps(None).encode())
    while True:
        packet, fds, _, _ = socket.recv_fds(control, 1 << 12, 1)
        if not packet:
            break
        command, *arguments = json.loads(packet)
        if command == "spawn":
            pid = _fork(fds[0], control, live)
            children.add(pid)
            answer: int | None = pid
        else:
            answer = _reap(*arguments)
            if answer is not None:
                children.discard(arguments[0])
        control.send(json.dumps(answer).encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # an orderly end of all that was imported takes seconds


def _fork(fd: int, control: socket.socket, live: Callable[[Connection], None]) -> int:
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose all but one"
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    code = 1
    try:
        control.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(EOFError, BrokenPipeError):
            live(Connection(fd))
        code = 0
    finally:
        os._exit(code)


def _reap(pid: int, seconds: float) -> int | None:
    """Wait for the end of a child. Only then are its locks free; its pipe may close before."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return None
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    import victim

    importlib.import_module("torch._dynamo")  # for the case that compiles its model
    importlib.import_module("lightckpt.checkpointer")
    serve(socket.socket(fileno=int(sys.argv[1])), victim.live)
