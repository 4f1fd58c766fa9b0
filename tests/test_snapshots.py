"""How the way out of a GPU is chosen. Goal: ``auto`` keeps what is quicker, takes the GPU's memory
only where there is enough, leaves a way that has failed and no other, and says why; what was asked
for stays. Method: stores that only open devices, and made-up measurements.
"""

from types import SimpleNamespace

import pytest

from lightckpt import gpus
from lightckpt._core import Snapshot
from lightckpt.errors import MediaError, NoSpaceError
from lightckpt.snapshots import TRIAL_VERSIONS, Snapshots

GIB = 1 << 30
QUICK, SLOW = 1e-10, 1e-9  # seconds per byte


class Store:
    def __init__(self, *, direct=True):
        self._device = SimpleNamespace(name="GPU", direct=direct, why_not="" if direct else "no")

    def open_device(self, ordinal):
        return self._device


def settled(snapshots, rates, *, iteration, ordinal=0, total=GIB):
    """Let *snapshots* measure *rates* by way until it has chosen."""
    for _ in range(TRIAL_VERSIONS * len(rates)):
        way = snapshots.way(ordinal)
        snapshots.note(ordinal, way, [rates[way]], total)
    snapshots.decide(iteration)
    return snapshots.way(ordinal)


@pytest.mark.parametrize("best", [Snapshot.DIRECT, Snapshot.HOST])
def test_the_quicker_of_direct_and_host_is_kept(best):
    rates = {Snapshot.DIRECT: SLOW, Snapshot.HOST: SLOW} | {best: QUICK}
    snapshots = Snapshots(Store())
    assert settled(snapshots, rates, iteration=10) is best
    [said] = snapshots.report()
    assert "10.0 GB/s" in said
    assert "1.0 GB/s" in said


@pytest.mark.parametrize(("free", "way"), [(8, Snapshot.DEVICE), (2, Snapshot.DIRECT)])
def test_a_copy_aside_leaves_training_its_memory(monkeypatch, free, way):
    monkeypatch.setattr(gpus, "memory_of", lambda ordinal: (free * GIB, 16 * GIB))
    snapshots = Snapshots(Store())
    rates = {Snapshot.DIRECT: QUICK, Snapshot.HOST: SLOW}
    assert settled(snapshots, rates, iteration=0.05) is way
    [said] = snapshots.report()
    assert "of an iteration's 0.050 s" in said
    assert (f"{2 * GIB:,} are free" in said) == (way is Snapshot.DIRECT)


def test_a_way_that_fails_is_left_on_its_gpu_alone():
    snapshots = Snapshots(Store())
    rates = {Snapshot.DIRECT: QUICK, Snapshot.HOST: SLOW}
    for ordinal in range(2):
        assert settled(snapshots, rates, iteration=10, ordinal=ordinal) is Snapshot.DIRECT
    snapshots.failed(1, MediaError("the copy engine stopped"))
    assert snapshots.way(0) is Snapshot.DIRECT
    assert snapshots.way(1) is Snapshot.HOST
    snapshots.failed(1, MediaError("a second time"))  # there is no other
    assert "the copy engine stopped" in snapshots.report()[1]
    assert "a second time" not in snapshots.report()[1]


@pytest.mark.parametrize(
    ("error", "way"), [(NoSpaceError, Snapshot.DIRECT), (MediaError, Snapshot.HOST)]
)
def test_without_room_aside_direct_is_next(monkeypatch, error, way):
    monkeypatch.setattr(gpus, "memory_of", lambda ordinal: (16 * GIB, 16 * GIB))
    snapshots = Snapshots(Store())
    rates = {Snapshot.DIRECT: QUICK, Snapshot.HOST: SLOW}
    assert settled(snapshots, rates, iteration=0.01) is Snapshot.DEVICE
    snapshots.failed(0, error("no"))
    assert snapshots.way(0) is way


@pytest.mark.parametrize("way", [Snapshot.DIRECT, Snapshot.HOST, Snapshot.DEVICE])
def test_what_was_asked_for_stays(way):
    snapshots = Snapshots(Store(), way.name.lower())
    assert snapshots.way(0) is way
    snapshots.failed(0, MediaError("no"))
    assert snapshots.way(0) is way
    assert "as asked for" in snapshots.report()[0]


def test_where_the_store_is_out_of_reach_the_ring_is_left():
    snapshots = Snapshots(Store(direct=False))
    assert settled(snapshots, {Snapshot.HOST: SLOW}, iteration=10) is Snapshot.HOST
    assert "do not reach the store" in snapshots.report()[0]
