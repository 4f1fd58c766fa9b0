"""Goal: readers that hold versions cost versions at most, not training and not what comes later.

Method: a store with the fewest slots, and loads whose tensors are kept: each holds its version.

Elsewhere: all 64 slots of a new store, in core/hold_test.cc; readers beside a live trainer in
test_load_live.py.
"""

import pytest

import lightckpt
from lightckpt._core import Store
from training import make, update


@pytest.fixture
def small(path):
    """The path of a store with four slots, of which two must be free when a version begins."""
    with Store(path, create=True, slots=4):
        pass
    return path


def fill(checkpointer, path, model, optimizer):
    """Hold three versions; return what holds them, the oldest first."""
    loads = []
    for step in (1, 2, 3):
        update(model, optimizer, step)
        checkpointer.mark()
        assert checkpointer.wait() == step
        loads.append(lightckpt.load(path))
    return loads


def test_a_version_without_a_slot_is_skipped_and_the_next_one_tried(small):
    model, optimizer = make()
    with lightckpt.Checkpointer(small, model=model, optimizer=optimizer) as checkpointer:
        loads = fill(checkpointer, small, model, optimizer)
        for step in (4, 5):
            update(model, optimizer, step)
            with pytest.warns(lightckpt.CheckpointWarning, match="readers hold 3 versions"):
                ticket = checkpointer.mark()
            assert "of 4 slots 3 are taken" in ticket.skipped
        assert checkpointer.latest == 3
        del loads[0]
        update(model, optimizer, 6)
        checkpointer.mark()
        assert checkpointer.wait() == 6, (
            "what was skipped is told no more once a newer one is there"
        )
    assert lightckpt.load(small)["step"] == 6


def test_who_waits_for_a_version_that_was_skipped_is_told(small):
    model, optimizer = make()
    with lightckpt.Checkpointer(small, model=model, optimizer=optimizer) as checkpointer:
        loads = fill(checkpointer, small, model, optimizer)
        update(model, optimizer, 4)
        with pytest.warns(lightckpt.CheckpointWarning):
            checkpointer.mark()
        with pytest.raises(lightckpt.BusyError, match="readers hold 3 versions"):
            checkpointer.wait()
        assert checkpointer.wait() == 3, "once"
        loads.clear()
        assert checkpointer.restore(2) == 2
        update(model, optimizer, 5)
        checkpointer.mark()
        assert checkpointer.wait() == 3
        loads = [lightckpt.load(small)]
    assert loads[0]["step"] == 3


def test_closing_after_a_skipped_version_tells_of_it_and_releases_the_store(small):
    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(small, model=model, optimizer=optimizer)
    loads = fill(checkpointer, small, model, optimizer)
    update(model, optimizer, 4)
    with pytest.warns(lightckpt.CheckpointWarning):
        checkpointer.mark()
    with pytest.raises(lightckpt.BusyError, match="readers hold 3 versions"):
        checkpointer.close()
    with Store(small) as store:
        assert [version.step for version in store.versions()] == [3, 2, 1]
    assert len(loads) == 3


def test_a_run_goes_back_to_a_held_version_although_readers_have_all_slots(small):
    model, optimizer = make()
    with lightckpt.Checkpointer(small, model=model, optimizer=optimizer) as checkpointer:
        loads = fill(checkpointer, small, model, optimizer)
        assert checkpointer.restore(2) == 2
        assert checkpointer.steps() == [2, 3, 1]
        loads.clear()
        update(model, optimizer, 3)
        checkpointer.mark()
        assert checkpointer.wait() == 3
    assert lightckpt.load(small)["step"] == 3
