"""Preemption: a signal that ends a run at its next boundary, with that step durable.

    a signal comes  ->  noted, no more  ->  the boundary makes a version and waits until it is
    durable  ->  the signal does what it did before

Invariants:
1. The handler only notes the signal: it may interrupt any line of Python, with any lock held.
2. What the signal did before is done in the main thread: only there may Python set a handler, and a
   handler expects it. A boundary on another thread sends the signal to the main one, again. (Where
   another checkpointer's handler is over this one's, that finishes at its next boundary first.)
3. A forked child (a loader's worker, which ``terminate`` must end) has no boundary: there a signal
   does at once what it did before.
"""

import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from .driver import Driver
from .errors import CheckpointError

Action = Callable[[int, FrameType | None], object] | int | None


class Preemption:
    """The signals that one checkpointer finishes on."""

    def __init__(self) -> None:
        self._before: dict[int, Action] = {}  # what each signal did
        self._came: list[int] = []
        self._passed_on: list[int] = []  # sent again, and to be let through
        self._released = False
        self._owner = os.getpid()

    @property
    def asked(self) -> bool:
        """Has a signal come that the next boundary is to finish on?"""
        return bool(self._came)

    def watch(self, signals: Iterable[int]) -> None:
        """Note *signals* from now on. One that is noted already is left as it is.

        Raises:
            ValueError, OSError: as the facade's; those before it in *signals* are watched.
        """
        for number in signals:
            if number in self._before:
                continue
            before = signal.getsignal(number)
            if before is None:
                raise ValueError(f"signal {number} has a handler that Python cannot call")
            self._before[number] = before
            try:
                signal.signal(number, self._handle)
            except BaseException:
                del self._before[number]
                raise

    def finish(self, driver: Driver) -> None:
        """Wait until the newest version is durable, then pass on the signals that came."""
        try:
            driver.land()
        except CheckpointError as error:
            driver.failed(error)
        finally:
            self._pass_on()

    def release(self) -> None:
        """Give the signals back, and pass on those that came after the last boundary."""
        if os.getpid() != self._owner:
            return
        self._released = True
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:  # else another handler is over ours
                    signal.signal(number, before)
        self._pass_on()

    def _pass_on(self) -> None:
        came, self._came = self._came, []
        main = threading.main_thread()
        for number in dict.fromkeys(came):
            if threading.current_thread() is main:
                self._do_as_before(number, inspect.currentframe())
            else:
                assert main.ident is not None
                self._passed_on.append(number)
                signal.pthread_kill(main.ident, number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._passed_on:
            self._passed_on.remove(number)
        elif not self._released and os.getpid() == self._owner:
            self._came.append(number)
            return
        self._do_as_before(number, frame)

    def _do_as_before(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            now = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, now)  # its default was not to end the process
