"""Archiving in the background. Goal: it neither disturbs training nor hides what failed.

Method: small runs in memory; the thread that copies is held by events, never by time, and made to
fail; what it made is read back with `load` and compared bit for bit.
"""

import threading

import pytest

import lightckpt
from lightckpt import CheckpointError, CheckpointWarning, NoSpaceError, WaitTimeoutError
from lightckpt import archive as archives
from lightckpt.archive import Archiver
from small_run import SmallRun, assert_same, visible

DEADLINE_S = 120


@pytest.fixture
def run(folder):
    run = SmallRun(folder / "store", keep=2)
    yield run
    run.close()


@pytest.fixture
def shelf(folder):
    """A folder for archives."""
    (folder / "shelf").mkdir()
    return folder / "shelf"


def test_a_run_archives_every_so_manyeth_version(folder, shelf):
    run = SmallRun(folder / "store", archive=shelf, archive_every=3)
    for _ in range(8):
        run.train(1)
        thread = run.checkpointer._archiver._thread
        if thread is not None:
            thread.join(DEADLINE_S)
    run.train(1)
    run.close()
    assert visible(shelf) == [f"step-{step}.lckpt" for step in (3, 6, 9)]
    for step in (3, 6, 9):
        assert_same(lightckpt.load(shelf / f"step-{step}.lckpt")["model"], run.states[step])


@pytest.fixture
def held(monkeypatch):
    """Background copies wait for ``held.go``, before they begin; ``held.began`` says they did."""

    class Held:
        go, began = threading.Event(), threading.Event()

    write = archives.write_store

    def wait_and_write(source, *args, **options):
        Held.began.set()
        assert Held.go.wait(DEADLINE_S)
        write(source, *args, **options)

    monkeypatch.setattr(archives, "write_store", wait_and_write)
    yield Held
    Held.go.set()


def archiver_of(run, shelf, every=1):
    return Archiver(run.checkpointer._driver.store, shelf, every)


def test_one_at_a_time_the_rest_is_counted(run, shelf, held):
    archiver = archiver_of(run, shelf)
    for _ in range(5):
        run.train(1)
        archiver.look(run.step)
    assert held.began.wait(DEADLINE_S)
    assert archiver.busy
    assert archiver.skipped == 3
    assert 1 in run.checkpointer.steps()  # pinned
    held.go.set()
    archiver.close()
    assert archiver.archived == [1, 5]
    assert_same(lightckpt.load(shelf / "step-1.lckpt")["model"], run.states[1])
    run.train(3)
    assert 1 not in run.checkpointer.steps()


def test_a_pin_of_the_users_outlives_the_archive(run, shelf):
    run.train(1)
    run.checkpointer.pin(1)
    archiver = archiver_of(run, shelf)
    archiver.look(1)
    archiver.close()
    run.train(4)
    assert 1 in run.checkpointer.steps()


def test_a_version_is_archived_once(run, shelf):
    archiver = archiver_of(run, shelf)
    run.train(1)
    for _ in range(3):
        archiver.look(1)
        if archiver._thread is not None:
            archiver._thread.join(DEADLINE_S)
    archiver.close()
    assert archiver.archived == [1]


def test_where_nothing_was_committed_nothing_is_archived(run, shelf):
    archiver = archiver_of(run, shelf)
    archiver.look(1)
    archiver.look(2)
    archiver.close()
    assert visible(shelf) == []


def test_a_version_that_was_dropped_is_replaced_by_the_newest(run, shelf):
    archiver = archiver_of(run, shelf)
    run.train(2)
    archiver.look(3)
    archiver.close()
    assert archiver.archived == [2]


def fail(*_, **__):
    raise NoSpaceError("no room on the shelf")


def test_what_failed_is_told_at_the_next_look_once(run, shelf, monkeypatch):
    monkeypatch.setattr(archives, "write_store", fail)
    archiver = archiver_of(run, shelf, every=2)
    run.train(1)
    archiver.look(1)
    archiver.look(1)
    archiver.look(1)
    archiver._thread.join(DEADLINE_S)
    with pytest.warns(CheckpointWarning, match="an archive failed: no room on the shelf"):
        archiver.look(1)
    archiver.close()


def test_what_failed_last_is_raised_by_close_once(run, shelf, monkeypatch):
    monkeypatch.setattr(archives, "write_store", fail)
    archiver = archiver_of(run, shelf)
    run.train(1)
    archiver.look(1)
    with pytest.raises(NoSpaceError, match="no room on the shelf"):
        archiver.close()
    archiver.close()


def test_close_of_the_run_raises_what_failed_and_releases_the_store(folder, shelf, monkeypatch):
    monkeypatch.setattr(archives, "write_store", fail)
    run = SmallRun(folder / "store", archive=shelf, archive_every=1).train(1)
    with pytest.raises(CheckpointError, match="no room on the shelf"):
        run.close()
    SmallRun(run.path).close()


def endless(source, dest, *, progress, **_):
    done = 0
    while True:
        done += 1
        progress(done, 0)


def test_close_gives_up_an_archive_that_takes_too_long(run, shelf, monkeypatch):
    monkeypatch.setattr(archives, "write_store", endless)
    archiver = archiver_of(run, shelf)
    run.train(1)
    archiver.look(1)
    archiver.look(2)
    assert archiver.busy
    with pytest.raises(WaitTimeoutError, match="archive of step 1 was given up at"):
        archiver.close(timeout=0)
    assert not archiver.busy
    assert all(version.pinned == 0 for version in run.checkpointer._driver.store.versions())


def test_close_gives_up_the_last_archive_that_takes_too_long(run, shelf, monkeypatch):
    monkeypatch.setattr(archives, "write_store", endless)
    archiver = archiver_of(run, shelf)
    run.train(1)
    archiver.look(1)
    with pytest.raises(WaitTimeoutError, match="archive of step 1 was given up at"):
        archiver.close(timeout=0)


def test_a_version_that_a_restore_retires_is_not_archived(run, shelf, held):
    run.train(2)
    archiver = archiver_of(run, shelf, every=2)
    for step in (1, 2, 3):
        archiver.look(step)
    assert held.began.wait(DEADLINE_S)
    run.checkpointer.restore(1)  # in mid-copy: step 2 is gone, whatever pinned it here
    held.go.set()
    with pytest.raises(CheckpointError):
        archiver.close()
    assert visible(shelf) == []


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_that_is_no_number_of_versions_is_refused(run, shelf, every):
    with pytest.raises(ValueError, match="archive_every="):
        archiver_of(run, shelf, every)


def test_a_folder_that_cannot_be_made_is_an_error_at_once(run, shelf):
    (shelf / "file").touch()
    with pytest.raises(OSError, match="file"):
        archiver_of(run, shelf / "file" / "below")


def test_archives_go_to_a_folder_that_is_made_for_them(run, shelf):
    archiver = archiver_of(run, shelf / "a" / "b")
    run.train(1)
    archiver.look(1)
    archiver.close()
    assert visible(shelf / "a" / "b") == ["step-1.lckpt"]
