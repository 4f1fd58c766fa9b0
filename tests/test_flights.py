"""Flights and the memory that they read. Goal: it is kept while a batch of theirs is under way, or
may be, and let go when none is. Method: a store whose batches are done when the test says so.
"""

from types import SimpleNamespace

import pytest

from lightckpt import gpus
from lightckpt._core import Op, Snapshot
from lightckpt.errors import MediaError, WaitTimeoutError
from lightckpt.flight import Record
from lightckpt.flights import Flights
from lightckpt.trust import Standing, Trust


class Store:
    """Batches by number; ``done`` says of each what waiting for it comes to."""

    def __init__(self):
        self.done, self.made, self.fails = {}, 0, None

    def begin(self, **_):
        pass

    def drop(self):
        pass

    def submit(self, op, spans, *, version=0):
        assert op in (Op.WRITE, Op.CHECK)
        if isinstance(self.fails, MediaError):
            raise self.fails
        self.made += 1
        if self.fails is not None:
            raise self.fails
        return self.made

    def submit_on(self, device, stream, way, op, spans, *, version=0):
        return self.submit(op, spans)

    def wait(self, batch, timeout=None):
        if (found := self.done.get(batch, WaitTimeoutError("not yet"))) is not None:
            raise found
        return SimpleNamespace(bytes=0, bad=())

    def stream_wait(self, batch, stream, timeout):
        pass


@pytest.fixture
def flights(monkeypatch):
    monkeypatch.setattr(gpus, "current_stream", lambda ordinal: 0)
    snapshots = SimpleNamespace(way=lambda ordinal: Snapshot.HOST, failed=lambda *_: None)
    made = Flights(Store(), Trust(), snapshots, timeout=1)
    made.store = made._store
    return made


class Memory:
    """Stands for a storage."""


def plan():
    """One batch of a GPU's memory for the boundary, and one for behind it."""
    extent = SimpleNamespace(storage=Memory(), copy=None)
    structure = SimpleNamespace(extents=[extent], sizes=[8], blob=b"")
    layer = SimpleNamespace(device=0, owners={"o"}, spans=[], standing=Standing.LAZY, tensors=[])
    return SimpleNamespace(structure=structure, now={0: []}, layers=[layer])


def start(flights):
    return flights.start(plan(), Record(1, "overlap"), b"", 1)


def test_a_flight_is_kept_until_all_its_batches_are_done(flights):
    flight = start(flights)
    assert flights.store.made == 2  # at the boundary, and the layer's
    flight.drop("given up")
    for done in ({}, {1: None}):
        flights.store.done = done
        flights.let_go()
        assert flights._kept == [flight]
    flights.store.done = {1: None, 2: MediaError("it failed, and is over")}
    flights.let_go()
    assert flights._kept == []


def test_the_one_in_flight_is_kept_though_all_is_copied(flights):
    flight = start(flights)
    flights.store.done = {1: None, 2: None}
    flights.let_go(but=flight)
    assert flights._kept == [flight]
    other = start(flights)
    assert flights._kept == [other]


def test_one_that_could_not_be_begun_whole_is_kept_as_well(flights):
    store = flights.store
    submit = store.submit

    def second_fails(op, spans, *, version=0):
        if store.made == 1:
            store.fails = MediaError("no room for a second batch")
        return submit(op, spans)

    store.submit = second_fails
    with pytest.raises(MediaError):
        start(flights)
    assert len(flights._kept) == 1
    store.done = {1: None}
    flights.let_go()
    assert flights._kept == []


def test_a_batch_that_an_interrupt_left_unknown_may_be_under_way(flights):
    flights.store.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        start(flights)
    flights.store.fails = None
    flights.let_go()
    [flight] = flights._kept
    assert flight.dropped


def test_when_the_store_is_closed_nothing_is_under_way(flights):
    flight = start(flights)
    flights.store.done = dict.fromkeys((1, 2), ValueError("the store is closed"))
    flights.let_go()
    assert flights._kept == []
    assert flight.is_through()
