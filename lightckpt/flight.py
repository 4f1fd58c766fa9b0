"""Flight: one version on its way, from the boundary to the drained slot.

    start   begin; copy the volatile extents while the caller waits; queue the lazy layers
    guard   before an optimizer's update: wait for its layers, compare them, then let it go on
    settle  whatever no guard has compared; then queue the commit
    land    wait until the version is durable

A layer is the extents that the same optimizers own: what one guard waits for. The comparison runs
on the thread that calls the guard, when the copy has ended and before anything may change the
tensors: version counters always, checksums as ``Trust`` asks. If anything has changed the version
is given up whole (copying again would mix two instants) and the tensor is volatile from then on.

Threads: guards may fire from any thread; the caller holds the checkpointer's lock around each call.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from . import _core
from ._core import Op, Store
from .errors import CheckpointError, WaitTimeoutError
from .manifest import Path, name_of
from .structure import Extent, Structure
from .trust import Standing, Trust

Nanoseconds = tuple[int, int]
_COUNTER = attrgetter("_version")
LAYERS_MAX = 4096  # batches that one version may queue; with more, all is copied at the boundary


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
    settle_ns: Nanoseconds = (0, 0)  # waiting for it at the next boundary
    bytes: int = 0
    dropped: str = ""


@dataclass
class Layer:
    """Extents that one set of optimizers owns."""

    owners: frozenset[str]
    indexes: list[int]
    spans: Any
    standing: Standing
    paths: list[Path]
    sizes: list[int]
    tensors: list[Tensor]
    settled: bool = False  # only the rotation is left to recheck
    counters: list[int] = field(default_factory=list)
    batch: int = 0
    compared: bool = False


class Plan:
    """How a structure's extents are copied: which at the boundary, which lazily, layer by layer.

    Valid until the structure, the trust in an extent, or an extent's address changes.
    """

    def __init__(self, structure: Structure, trust: Trust, fired: Iterable[str], mode: str) -> None:
        self.structure, self.mode = structure, mode
        order = list(fired)  # in the order in which the guards fire
        now: list[int] = []
        layers: dict[tuple[frozenset[str], Standing], list[int]] = {}
        for index, extent in enumerate(structure.extents):
            owners = structure.owners(extent)
            standing = Standing.VOLATILE
            if owners and owners <= set(order) and mode == "overlap" and _shows_changes(extent):
                standing = trust.standing(extent.leaves[0].path)
            if standing is not Standing.LAZY:
                now.append(index)
            if standing is not Standing.VOLATILE:
                layers.setdefault((owners, standing), []).append(index)
        if len(layers) > LAYERS_MAX:
            now, layers = list(range(len(structure.extents))), {}
        self.now = _spans(structure, now)
        ranked = sorted(layers.items(), key=lambda item: min(map(order.index, item[0][0])))
        self.layers = [
            Layer(
                owners,
                indexes,
                _spans(structure, indexes),
                standing,
                [structure.extents[i].leaves[0].path for i in indexes],
                [structure.extents[i].size for i in indexes],
                [leaf.tensor for i in indexes for leaf in structure.extents[i].leaves],
            )
            for (owners, standing), indexes in ranked
        ]


def _shows_changes(extent: Extent) -> bool:
    """Can a change of *extent* be seen? Its own memory is read, and version counters move."""
    return not extent.packed and not any(leaf.tensor.is_inference() for leaf in extent.leaves)


def _spans(structure: Structure, indexes: list[int]) -> Any:
    extents = structure.extents
    pairs = [(_address(extents[i]), i) for i in indexes]
    return _core.make_spans(pairs)


def _address(extent: Extent) -> int:
    return extent.copy.data_ptr() if extent.copy is not None else extent.address


class Flight:
    """One version in flight. ``dropped`` says why it was given up; empty while it was not."""

    def __init__(
        self, store: Store, plan: Plan, trust: Trust, record: Record, timeout: float
    ) -> None:
        self._store, self._plan, self._trust, self._timeout = store, plan, trust, timeout
        self.record = record
        self.step = record.step
        self.dropped = ""
        self.durable = False
        self._commit = 0
        self._host = b""
        self.layers = plan.layers
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
        except ValueError:  # an interrupt came between an attempt's begin and its flight
            self._store.drop()
            begin()
        self._host = host
        try:
            first = self._store.submit(Op.WRITE, self._plan.now)
            for layer in self.layers:
                layer.counters = list(map(_COUNTER, layer.tensors))
                layer.compared, layer.batch = layer.standing is not Standing.LAZY, 0
                if not layer.compared:
                    layer.batch = self._store.submit(Op.WRITE, layer.spans)
            self._note(self._store.wait(first, self._timeout))
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
                if owner in layer.owners and not layer.compared:
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
                layer.batch = self._store.submit(Op.CHECK, layer.spans, version=version)
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
                if not layer.compared:
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
        except CheckpointError as error:
            self.dropped = self.dropped or str(error)
            raise
        self.record.commit_ns = (report.start_ns, report.end_ns)
        self.durable = True

    def copied(self) -> bool:
        """Have all layers been copied? Never waits."""
        return all(self._store.progress(layer.batch) for layer in self._lazy if not layer.compared)

    def drop(self, why: str) -> None:
        """Give the version up. The flight holds on to its memory: a worker may be in it still."""
        if self.dropped or self._commit:
            return
        self.dropped = self.record.dropped = why
        self._store.drop()

    def _commit_if_compared(self) -> None:
        if not self._commit and not self.dropped and all(layer.compared for layer in self.layers):
            self._commit = self._store.commit(self._host)
            self._host = b""

    def _note(self, report: _core.Report) -> None:
        if report.bytes:
            self.record.copies.append((report.start_ns, report.end_ns, report.bytes))
            self.record.bytes += report.bytes

    def _compare(self, layer: Layer) -> None:
        self._note(self._store.wait(layer.batch, self._timeout))
        layer.compared = True
        layer.settled = layer.settled or all(map(self._trust.is_settled, layer.paths))
        spans = layer.spans
        if layer.settled:
            chosen = self._trust.turn(layer.owners, layer.sizes)
            spans = _spans(self._plan.structure, [layer.indexes[i] for i in chosen])
        summed = None
        if len(spans):
            summed = self._store.wait(self._store.submit(Op.CHECK, spans), self._timeout)
        bad = self._changed(layer, summed)
        if bad and layer.settled:  # what is edited now may be much more than whose turn it was
            whole = self._store.submit(Op.CHECK, layer.spans)
            bad = self._changed(layer, self._store.wait(whole, self._timeout))
            self._trust.unsettle()
        self._judge(layer, bad)
        if bad:
            self.drop(f"{name_of(self._path(next(iter(bad))))} changed while it was being copied")

    def _changed(self, layer: Layer, summed: _core.Report | None) -> dict[int, str]:
        """Return extent -> how it was seen to change since the boundary."""
        bad: dict[int, str] = {}
        if (now := list(map(_COUNTER, layer.tensors))) != layer.counters:
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
        if layer.settled:
            return bool(bad)
        pairs = zip(layer.indexes, layer.paths, strict=True)
        quiet = (path for index, path in pairs if index not in bad)
        return self._trust.saw_quiet(quiet) or bool(bad)

    def _path(self, index: int) -> Path:
        return self._plan.structure.extents[index].leaves[0].path
