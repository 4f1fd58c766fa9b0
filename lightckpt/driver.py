"""Driver: the state machine between a training run's hooks and the versions of its store.

    boundary k:  land version k-1  ->  is one due?  ->  refresh the structure, collect host state,
                 start version k
    guard:       let an optimizer's update wait for, and compare, what it is about to change

Errors of the store never end training by themselves (``on_error="warn"``): the version is given up,
a warning says why, and the error is kept for ``wait`` and ``close``.

Threads: every method takes the lock, so hooks may come from any thread, of this process only.
"""

import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from importlib.metadata import version as version_of
from typing import Any

from . import gpus
from ._core import Store, Version
from .arithmetic import prime_arithmetic
from .capture import Run, swaps_weights
from .collect import capture_early, collect_host
from .errors import (
    BusyError,
    CheckpointError,
    CheckpointWarning,
    CorruptError,
    FormatError,
    NotFoundError,
    WaitTimeoutError,
)
from .flight import Flight, Record
from .flights import Flights
from .interval import IntervalTuner, ModeTrial
from .plan import Plan
from .process import OneProcess
from .restore import apply, prepare
from .settings import Settings
from .snapshots import Snapshots
from .stats import Stats, reasons
from .structure import Structure
from .trust import Standing, Trust
from .updates import Updates

TIMELINE_MAX = 4096
_NOTHING_NEW = "nothing was updated since the last boundary"
_SKIPPED_UPDATE = "a scaler skipped the update: the version before leads to the same state"
_LOOK_SECONDS = 0.5  # how often who waits looks whether the training thread is still there
MADE_BY = f"lightckpt {version_of('lightckpt')}"


class Driver(OneProcess):
    """Drives the versions of one run into one store."""

    def __init__(self, store: Store, run: Run, settings: Settings) -> None:
        super().__init__()
        self.store, self.run, self.settings = store, run, settings
        self.lock = threading.RLock()
        self._landed = threading.Condition(self.lock)  # told when a flight has ended
        self._thread = threading.current_thread()  # of the last boundary
        self.stats = Stats()
        self.timeline: deque[Record] = deque(maxlen=TIMELINE_MAX)
        self.trust = Trust()
        self.tuner = IntervalTuner(settings.overhead) if settings.every == "auto" else None
        self.trial = ModeTrial() if settings.mode == "auto" else None
        self.snapshots = Snapshots(store, settings.snapshot)
        self.flights = Flights(store, self.trust, self.snapshots, settings.timeout)
        self.flight: Flight | None = None
        self.error: CheckpointError | None = None
        self.durable_step = 0
        self.updates = Updates(run)
        self.early: bytes | None = None
        self.capture_early = False  # decoration only: what batches are drawn from as the step ends
        self._structure: Structure | None = None
        self._plan: Plan | None = None
        self._began = 0.0  # when the iteration began: the end of the last boundary
        self._carried = ""  # mode of the version that this iteration carries
        self._learning = False
        self._served = 0  # multiples of ``every`` that have had their version
        prime_arithmetic()

    # -- hooks ---------------------------------------------------------------------------------

    def before_update(self, name: str) -> None:
        """Guard: return when *name* may change its tensors, or may give that to its stream."""
        with self.lock:
            self.updates.begin(name)
            if gpus.is_capturing():
                self._leave_to_graph(name)
                return
            self.updates.note_use(name)
            self.updates.warn_of_cuts()
            if (flight := self.flight) is None:
                return
            begin = time.perf_counter()
            try:
                if flight.learn(name):
                    self._plan = None
                flight.guard(name)
                if flight.dropped:
                    self._plan = None
            except CheckpointError as error:
                self.failed(error)
            self.stats.guard_seconds += time.perf_counter() - begin

    def _leave_to_graph(self, name: str) -> None:
        """A CUDA graph will replay *name*'s update unguarded: copy at boundaries from now on."""
        self.updates.captured.add(name)
        self._plan = None
        if (flight := self.flight) is None:
            return
        with suppress(CheckpointError):  # not left yet: the next begin looks again
            flight.drop("a CUDA graph with an update was captured before it was copied")
        if flight.dropped:
            self._count(flight)

    def after_update(self, name: str) -> None:
        """Note that *name* has updated its tensors."""
        with self.lock:
            self.updates.end(name)
            if self.capture_early and not self.updates.running:
                self.early = capture_early(self.run)

    def poll(self) -> None:
        """Commit what has been copied, if it is a moment when nothing changes tensors."""
        with self.lock:
            at_home = threading.current_thread() is self._thread
            at_home = at_home and not gpus.is_capturing()
            if self.flight is not None and at_home and not self.updates.running:
                try:
                    self.flight.poll()
                except CheckpointError as error:
                    self.failed(error)

    # -- boundaries ----------------------------------------------------------------------------

    def boundary(self, step: int, loop: Any, *, anyway: bool = False) -> tuple[Flight | None, str]:
        """End iteration *step*: start its version, or say why none was made."""
        with self.lock:
            self._thread = threading.current_thread()
            begin = time.perf_counter()
            self._measure(begin)
            self.flights.let_go(but=self.flight)
            self.stats.iterations += 1
            flight, skipped = None, self._reason_to_skip(step, anyway)
            failed = False
            try:
                if not skipped:
                    skipped = self._make_room()
                self.stats.busy_seconds += time.perf_counter() - begin
                if not skipped:
                    flight = self._start(step, loop)
            except CheckpointError as error:
                skipped, failed = str(error), True
                self.failed(error)
            self.early = None
            if skipped != _NOTHING_NEW:
                if flight is not None:
                    self.updates.note_cut()
                self._forget_updates(unsaved=failed)
            self.updates.warn_of_cuts()
            self.stats.skipped += bool(skipped)
            self._carried = flight.record.mode if flight else ""
            self._began = time.perf_counter()
            self.stats.boundary_seconds += self._began - begin
            return flight, skipped

    def _reason_to_skip(self, step: int, anyway: bool) -> str:
        if not self.updates.any() and (not self._edited() or self.updates.waiting()):
            return _NOTHING_NEW
        if self.capture_early and self.early is None:
            return _SKIPPED_UPDATE
        if anyway:
            return ""
        if self.tuner is not None:
            if not self._learning and not self.tuner.is_due():
                return f"not due: {self.tuner.choice.why}"
        elif (due := step // int(self.settings.every)) <= self._served:
            return f"not due: every {self.settings.every} iterations"
        else:  # where the iteration that was due updated nothing, the next one stands in for it
            self._served = due
        return ""

    def _edited(self) -> bool:
        """Was a captured tensor changed, or replaced, by hand?"""
        structure = self._structure
        if structure is not None and not structure.refresh():
            structure = self._structure = None
            self.updates.edit()
        elif structure is not None and structure.moved:
            self._plan = None
            self.updates.edit()
        return self.updates.edited(structure)

    def _forget_updates(self, *, unsaved: bool = False) -> None:
        if self.updates.forget(self._structure, unsaved=unsaved):
            self._plan = None

    def _make_room(self) -> str:
        """Land the version before, or with ``busy="drop"`` give it up if it is not copied yet."""
        flight = self.flight
        if flight is None:
            return ""
        if self.settings.busy == "drop" and not flight.copied():
            flight.drop("the next boundary came before it was copied")
            self._count(flight)
            return ""
        begin = time.monotonic_ns()
        self._land(flight)
        flight.record.landing_ns = (begin, time.monotonic_ns())
        return ""

    def _land(self, flight: Flight, timeout: float | None = None) -> None:
        try:
            flight.land(timeout)
        finally:
            if flight.durable or flight.dropped:
                self._count(flight)

    def _count(self, flight: Flight) -> None:
        """Book a flight that has ended."""
        if self.flight is not flight:
            return
        self.flight = None
        self._landed.notify_all()
        if flight.durable:
            if isinstance(self.error, BusyError):  # what was in the way let go, and this is newer
                self.error = None
            self.stats.versions += 1
            self.durable_step = flight.step
        else:
            self.stats.dropped += 1
            self._plan = None
            warnings.warn(
                f"step {flight.step} has no version: {flight.dropped}", CheckpointWarning, 2
            )

    def _start(self, step: int, loop: Any) -> Flight:
        begin = time.monotonic_ns()
        structure = self._structure
        if structure is None or not structure.refresh():
            structure = self._structure = Structure(self.run, MADE_BY)
            self._plan = None
        structure.pack()
        host = collect_host(self.run, structure.walk, step=step, loop=loop, early=self.early)
        mode = self.trial.mode() if self.trial and not self._learning else self.settings.mode
        mode = "stop" if mode == "stop" else "overlap"
        if self._plan is None or structure.moved or self._plan.mode != mode:
            # Only an optimizer whose guard was seen to fire can hold an update back.
            guarded = [
                name
                for name in self.updates.order
                if name not in self.updates.captured and not swaps_weights(self.run, name)
            ]
            self._plan = Plan(structure, self.trust, guarded, mode)
        self._learning = any(ly.standing is Standing.PROBATION for ly in self._plan.layers)
        record = Record(step, mode)
        flight = self.flight = self.flights.start(self._plan, record, host, self.settings.keep)
        record.boundary_ns = (begin, time.monotonic_ns())
        self.timeline.append(record)
        return flight

    def _measure(self, now: float) -> None:
        """Feed the policies with the seconds of the iteration that ends."""
        if not self._began or self._learning:
            return
        seconds = now - self._began
        self.snapshots.decide(seconds)
        if self.tuner is not None:
            self.tuner.record(seconds, with_version=bool(self._carried))
        if self.trial is not None and self._carried:
            self.trial.record(self._carried, seconds)

    def why(self) -> dict[str, Any]:
        """Say in words what was chosen, and why."""
        return reasons(self.settings, self.trial, self.tuner, self.snapshots, self.trust)

    # -- ends ----------------------------------------------------------------------------------

    def land(self, timeout: float | None = None, *, anywhere: bool = False) -> int:
        """Wait until the version in flight is durable; return the newest durable step.

        The comparison belongs to the thread that trains: on another, an edit that is being made
        may not show yet. So other threads wait for that one to get there while it lives, unless
        *anywhere* says that training is over.

        Raises:
            CheckpointError: an error was kept, or this version could not be made durable.
        """
        with self.lock:
            flight = self.flight
            try:
                if flight is not None and (anywhere or self._await_landing(flight, timeout)):
                    self._land(flight, timeout)
            except CheckpointError as error:
                self.error = self.error or error
            kept, self.error = self.error, None
            if kept is not None:
                raise kept
            return self.durable_step

    def _await_landing(self, flight: Flight, timeout: float | None) -> bool:
        """Wait until the training thread has landed *flight*; True if there is none but this."""
        limit = self.settings.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while self.flight is flight:
            # One that has ended without a word, as threads do, edits nothing any more.
            if threading.current_thread() is self._thread or not self._thread.is_alive():
                return True
            if (left := deadline - time.monotonic()) <= 0:
                raise WaitTimeoutError(
                    f"step {flight.step} is not durable after {limit} s: the training thread has "
                    "reached neither an update nor a boundary"
                )
            self._landed.wait(min(left, _LOOK_SECONDS))
        return False

    def release(self) -> None:
        """Close the store, once nothing is to become durable any more; waiters are told."""
        with self.lock:
            self.flight = None
            self._landed.notify_all()
            self.store.close()
            self.flights.let_go()

    # -- restoring -----------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that can be restored now, newest first."""
        return [v.step for v in self.store.versions() if not v.damaged]

    def restore(self, step: int | None) -> tuple[int, dict[str, Any]]:
        """Restore the newest whole version (of *step*); return its step and host state.

        A store without versions gives (0, {}) and changes nothing. Errors: as the facade's.
        """
        with self.lock:
            if self.flight is not None:  # the newest version may be this one
                with suppress(CheckpointError):
                    self._land(self.flight)
            self.abandon()
            candidates = [v for v in self.store.versions() if step is None or v.step == step]
            if not candidates and step is None:
                return 0, {}
            if not candidates:
                raise NotFoundError(f"there is no version of step {step}, only of {self.steps()}")
            damage: list[CheckpointError] = []
            for version in candidates:
                try:
                    restoration = prepare(self.store, version.version, self.run)
                    apply(self.store, version.version, self.run, restoration)
                except (CorruptError, FormatError) as error:
                    damage.append(type(error)(f"step {version.step}: {error}"))
                    continue
                self._adopt(version, damage)
                return version.step, restoration.host
            raise type(damage[-1])(f"no version is whole: {'; '.join(map(str, damage))}")

    def _adopt(self, version: Version, damage: list[CheckpointError]) -> None:
        if damage:
            warnings.warn(
                f"restored step {version.step} instead of a newer one: "
                f"{'; '.join(map(str, damage))}",
                CheckpointWarning,
                stacklevel=4,
            )
        # Only now: had this failed, the newer versions would still be there.
        self.store.rebase(version.version)
        self.abandon()
        self._forget_updates(unsaved=True)  # by this process: what is changed now may not show
        self.durable_step = version.step
        if self.tuner is None:
            self._served = version.step // int(self.settings.every)

    def abandon(self) -> None:
        """Give up what is in flight and forget the live tensors: they are about to be restored."""
        with self.lock:
            if self.flight is not None:
                self.flight.drop("the run was restored")
                if not self.flight.dropped:
                    self.flight.land()
            self.flight = self._structure = self._plan = None
            self._forget_updates()
            self._carried, self._began = "", 0.0

    def failed(self, error: CheckpointError) -> None:
        """Keep *error* for ``wait`` and ``close``; warn of it, or raise it if that is wanted."""
        self.error = self.error or error
        if self.flight is not None and self.flight.dropped:
            self.flight = None
            self._landed.notify_all()
        self._plan = None
        if self.settings.on_error == "raise":
            raise error
        warnings.warn(f"a checkpoint failed: {error}", CheckpointWarning, 3)
