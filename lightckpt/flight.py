"""Flight: one version on its way, from the boundary to the drained slot.

    start   begin; copy the volatile extents while the caller waits; queue the lazy layers
    guard   before an optimizer's update: wait for its layers, compare them, then let it go on
    settle  whatever no guard has compared; then queue the commit
    land    wait until the version is durable

The comparison runs on the thread that calls the guard, when the copy has ended and before anything
may change the tensors: version counters always, checksums as ``Trust`` asks. If anything has
changed the version is given up whole (copying again would mix two instants) and the tensor is
volatile from then on.

Of what is on a GPU nobody waits. The boundary and the guard let its stream wait, for the volatile
extents and for the layer; counters are compared at the guard, where whatever comes before the
update has been given to the stream; checksums are compared by the engine, which commits when all
has arrived, or does not, and that is told when the version lands.

Threads: guards may fire from any thread; the caller holds the checkpointer's lock around each call.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from . import gpus
from ._core import Op, Report, Snapshot, Store
from .errors import CheckpointError, CorruptError, WaitTimeoutError
from .gpus import HOST
from .manifest import Path, name_of
from .plan import Layer, Plan, spans_of
from .snapshots import Snapshots
from .trust import Standing, Trust

Nanoseconds = tuple[int, int]
_COUNTER = attrgetter("_version")
CHANGED = "changed while it was being copied"
MEASURED_BYTES = 1 << 20  # of a batch from a GPU, to tell how quick the way was


@dataclass
class Record:
    """What happened to one version, for timelines and statistics; CLOCK_MONOTONIC nanoseconds.

    ``boundary_ns`` is when training waited at the boundary, ``guard_ns`` each wait at a guard,
    ``copies`` are (start, end, bytes) of batches, ``commit_ns`` from record to drained slot.
    """

    step: int
    mode: str
    boundary_ns: Nanoseconds = (0, 0)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    guard_ns: list[Nanoseconds] = field(default_factory=list)
    commit_ns: Nanoseconds = (0, 0)
    landing_ns: Nanoseconds = (0, 0)  # waiting for it at the next boundary
    bytes: int = 0
    dropped: str = ""


class Flight:
    """One version in flight. ``dropped`` says why it was given up; empty while it was not."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        trust: Trust,
        snapshots: Snapshots,
        record: Record,
        timeout: float,
    ) -> None:
        self._store, self._plan, self._trust, self._timeout = store, plan, trust, timeout
        self._snapshots = snapshots
        self.record = record
        self.step = record.step
        self.dropped = ""
        self.durable = False
        self._commit = 0
        self._host = b""
        self.layers = plan.layers
        self._coming: list[tuple[int, int]] = []  # device and batch of what no thread waited for
        self._ways: dict[int, Snapshot] = {}
        self._batches: list[int] = []
        self._giving = False  # it is not known yet what batch there is
        # A tensor may be given other memory meanwhile, and the structure lets go of the old one.
        self._storages = [(extent.storage, extent.copy) for extent in plan.structure.extents]
        self._lazy = [layer for layer in plan.layers if layer.standing is Standing.LAZY]

    def start(self, host: bytes, keep: int) -> None:
        """Begin, copy what may not wait, queue the rest. The caller's training state stands still.

        Raises:
            CheckpointError: the version was not begun, or the media failed; nothing is in flight.
        """
        structure = self._plan.structure
        begin = partial(
            self._store.begin, step=self.step, keep=keep, extents=structure.sizes,
            blob=structure.blob, host_bytes=len(host),
        )  # fmt: skip
        try:
            begin()
        except ValueError:
            # Perhaps an interrupt came between an attempt's begin and its flight. Where there is
            # none to drop, or it has just become a version, that is not what was wrong.
            with suppress(ValueError):
                self._store.drop()
            try:
                begin()
            except ValueError as error:
                raise CheckpointError(f"step {self.step} cannot be begun: {error}") from error
        self._host = host
        try:
            first = {
                device: self._submit(Op.WRITE, device, spans)
                for device, spans in self._plan.now.items()
            }
            for layer in self.layers:
                layer.counters = list(map(_COUNTER, layer.tensors))
                layer.compared = layer.standing is not Standing.LAZY
                layer.batch = layer.check = 0
                if not layer.compared:
                    layer.batch = self._submit(Op.WRITE, layer.device, layer.spans)
            for device, batch in first.items():
                if device == HOST:
                    self._note(self._store.wait(batch, self._timeout))
                else:
                    self._hold_stream(device, batch)
            self._commit_if_compared()
        except BaseException:
            self.drop("it could not be copied")
            raise

    def guard(self, owner: str) -> None:
        """Wait until everything that *owner* is about to update has been copied, and compare it.

        Raises:
            WaitTimeoutError: the copy took longer than the timeout; the version is given up.
        """
        if self.dropped:
            return
        begin = time.monotonic_ns()
        try:
            for layer in self._lazy:
                if owner not in layer.owners or self.dropped:
                    continue
                if layer.compared:
                    self._hold_streams(layer)
                else:
                    self._compare(layer)
            self._commit_if_compared()
        except BaseException:
            self.drop("the guard failed")
            raise
        finally:
            self.record.guard_ns.append((begin, time.monotonic_ns()))

    def learn(self, owner: str) -> bool:
        """At the guard: did the layers on probation stand still since the boundary?

        Returns True if an extent's standing changed. Runs only while there are such layers.
        """
        changed = False
        for layer in self.layers:
            if layer.standing is Standing.PROBATION and owner in layer.owners and layer.batch == 0:
                self.land()
                if not self.durable:
                    return changed
                version = self._store.versions()[0].version
                layer.batch = self._submit(Op.CHECK, layer.device, layer.spans, version=version)
                bad = self._changed(layer, self._store.wait(layer.batch, self._timeout))
                changed = self._judge(layer, bad) or changed
        return changed

    def poll(self) -> None:
        """Compare and commit what has been copied, without waiting."""
        if not self._commit and not self.dropped and self.copied():
            self.settle()

    def settle(self) -> None:
        """Compare every layer that no guard has, and queue the commit."""
        if self.dropped or self._commit:
            return
        try:
            for layer in self._lazy:
                if not layer.compared and not self.dropped:
                    self._compare(layer)
            self._commit_if_compared()
        except BaseException:
            self.drop("it could not be copied")
            raise

    def land(self, timeout: float | None = None) -> None:
        """Settle, then wait until the version is durable, at most *timeout* seconds.

        Raises:
            WaitTimeoutError: not within the timeout.
            MediaError: it will never be.
        """
        if self.dropped or self.durable:
            return
        self.settle()
        if self.dropped:
            return
        try:
            report = self._store.wait(self._commit, self._timeout if timeout is None else timeout)
        except WaitTimeoutError:
            raise  # it may still come
        except CorruptError as error:
            self.dropped = self.record.dropped = self._hear_of_devices() or str(error)
            return
        except CheckpointError as error:
            self.dropped = self.dropped or str(error)
            self._blame_ways()
            raise
        self.record.commit_ns = (report.start_ns, report.end_ns)
        self.durable = True
        self._hear_of_devices()

    def copied(self) -> bool:
        """Have all layers been copied? Never waits."""
        return all(self._store.progress(layer.batch) for layer in self._lazy if not layer.compared)

    def is_through(self) -> bool:
        """Is nothing of it under way any more, so that its memory may be freed? Never waits."""
        self._batches = [batch for batch in self._batches if not self._is_done(batch)]
        return not self._batches and not self._giving

    def _is_done(self, batch: int) -> bool:
        try:
            self._store.wait(batch, 0)
        except WaitTimeoutError:
            return False
        except (CheckpointError, ValueError):  # it has failed; or the store is closed, and all over
            pass
        return True

    def drop(self, why: str) -> None:
        """Give the version up. The flight holds on to its memory: a worker may be in it still."""
        if self.dropped or self._commit:
            return
        self.dropped = self.record.dropped = why
        # An interrupt may have come as its commit was queued, and that may be through by now.
        with suppress(ValueError):
            self._store.drop()

    def _commit_if_compared(self) -> None:
        if not self._commit and not self.dropped and all(layer.compared for layer in self.layers):
            try:
                self._commit = self._store.commit(self._host)
            except CheckpointError:
                self._blame_ways()
                raise
            self._host = b""

    def _submit(self, op: Op, device: int, spans: Any, *, version: int = 0) -> int:
        self._giving = True  # and stays so if an interrupt comes before the batch is noted
        try:
            if device == HOST:
                batch = self._store.submit(op, spans, version=version)
            else:
                way = self._ways.setdefault(device, self._snapshots.way(device))
                stream = gpus.current_stream(device)
                batch = self._store.submit_on(device, stream, way, op, spans, version=version)
        except CheckpointError as error:
            self._giving = False
            if device in self._ways:
                self._snapshots.failed(device, error)
            raise
        self._batches.append(batch)
        self._giving = False
        if op is Op.WRITE and device != HOST:
            self._coming.append((device, batch))
        return batch

    def _hold_stream(self, device: int, batch: int) -> None:
        """Let what the current stream is given from now on come after the copies of *batch*."""
        if batch:
            self._store.stream_wait(batch, gpus.current_stream(device), self._timeout)

    def _hold_streams(self, layer: Layer) -> None:
        if layer.device != HOST:
            self._hold_stream(layer.device, layer.batch)
            self._hold_stream(layer.device, layer.check)

    def _blame_ways(self) -> None:
        """Tell of the GPUs whose copies failed: another way may do."""
        for device, batch in self._coming:
            try:
                self._store.wait(batch, 0)
            except WaitTimeoutError:
                continue
            except CheckpointError as error:
                self._snapshots.failed(device, error)

    def _hear_of_devices(self) -> str:
        """Book what came from GPUs, now that all has; say which tensor changed, if one did."""
        rates: dict[int, list[float]] = {}
        total: dict[int, int] = {}
        for device, batch in self._coming:
            report = self._store.wait(batch, self._timeout)
            self._note(report)
            total[device] = total.get(device, 0) + report.bytes
            # While the store is being registered, what is to go direct goes through the ring.
            as_said = self._ways[device] is not Snapshot.DIRECT or report.in_place
            if report.bytes >= MEASURED_BYTES and as_said:
                seconds = (report.end_ns - report.start_ns) / 1e9
                rates.setdefault(device, []).append(seconds / report.bytes)
        for device, measured in rates.items():
            self._snapshots.note(device, self._ways[device], measured, total[device])
        self._coming = []
        changed = ""
        for layer in self._lazy:
            if layer.device == HOST or not layer.compared:
                continue
            summed = self._store.wait(layer.check, self._timeout) if layer.check else None
            if bad := self._changed(layer, summed, counters=False):
                changed = f"{name_of(self._path(next(iter(bad))))} {CHANGED}"
                self._trust.doubt()
            self._judge(layer, bad)
        return changed

    def _note(self, report: Report) -> None:
        if report.bytes:
            self.record.copies.append((report.start_ns, report.end_ns, report.bytes))
            self.record.bytes += report.bytes

    def _compare(self, layer: Layer) -> None:
        if layer.device == HOST:
            self._note(self._store.wait(layer.batch, self._timeout))
        layer.compared = True
        layer.proven = layer.proven or all(map(self._trust.is_proven, layer.paths))
        spans = layer.spans
        if layer.proven:
            chosen = self._trust.turn((layer.owners, layer.device), layer.sizes)
            spans = spans_of(self._plan.structure, [layer.indexes[i] for i in chosen])
        summed = None
        if len(spans) and layer.device == HOST:
            summed = self._store.wait(self._submit(Op.CHECK, HOST, spans), self._timeout)
        elif len(spans):
            layer.check = self._submit(Op.CHECK, layer.device, spans)
        bad = self._changed(layer, summed)
        if layer.device != HOST and not bad:
            self._hold_streams(layer)  # an edit by hand after a wait is no guard's to hold back
            return  # what the check says comes later
        if bad and layer.proven:  # what is edited now may be much more than whose turn it was
            whole = self._submit(Op.CHECK, layer.device, layer.spans)
            bad = self._changed(layer, self._store.wait(whole, self._timeout))
            self._trust.doubt()
        self._judge(layer, bad)
        if bad:
            self.drop(f"{name_of(self._path(next(iter(bad))))} {CHANGED}")

    def _changed(
        self, layer: Layer, summed: Report | None, *, counters: bool = True
    ) -> dict[int, str]:
        """Return extent -> how it was seen to change since the boundary."""
        bad: dict[int, str] = {}
        if counters and (now := list(map(_COUNTER, layer.tensors))) != layer.counters:
            at = 0
            for index in layer.indexes:
                count = len(self._plan.structure.extents[index].leaves)
                if now[at : at + count] != layer.counters[at : at + count]:
                    bad[index] = "its version counter moved between boundary and update"
                at += count
        if summed is not None and summed.bad_count:
            seen = summed.bad if summed.bad_count <= len(summed.bad) else layer.indexes
            for index in seen:
                bad.setdefault(index, "its bytes changed between boundary and update")
        return bad

    def _judge(self, layer: Layer, bad: dict[int, str]) -> bool:
        """Book what was seen; True if an extent's standing changed."""
        for index, why in bad.items():
            self._trust.saw_change(self._path(index), why)
        if layer.proven:
            return bool(bad)
        pairs = zip(layer.indexes, layer.paths, strict=True)
        quiet = (path for index, path in pairs if index not in bad)
        return self._trust.saw_quiet(quiet) or bool(bad)

    def _path(self, index: int) -> Path:
        return self._plan.structure.extents[index].leaves[0].path
