"""Archives. Goal: a file under an archive's name is one whole version, whatever happened.

Method: small runs in memory, read back with `load` and compared bit for bit; copies of what is
damaged, missing or in the way, and copies that are stopped in the middle.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import BusyError, CorruptError, FormatError, NoSpaceError, NotFoundError, copies
from lightckpt._core import Media, Store
from lightckpt.archive import archive, expand
from lightckpt.reader import open_reader
from small_run import (
    SmallRun,
    assert_same,
    bytes_of,
    flip_bit,
    make_model,
    visible,
)


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


# -- one version, one file -------------------------------------------------------------------------


def test_an_archive_is_a_store_of_one_version(run, shelf):
    run.train(4)
    made = archive(run.path, shelf)
    assert made == shelf / "step-4.lckpt"
    assert_same(lightckpt.load(made)["model"], run.states[4])
    assert_same(lightckpt.load(made)["optimizer"], run.optimizer.state_dict())
    with open_reader(made) as reader:
        assert [version.step for version in reader.versions()] == [4]


def test_an_archive_has_no_room_for_further_versions(shelf, folder):
    run = SmallRun(folder / "store", width=600).train(1)
    run.close()
    state_bytes = sum(t.nbytes for t in run.model.parameters()) * 3
    assert archive(run.path, shelf).stat().st_size < state_bytes + (4 << 20)


def test_a_live_store_can_be_archived_at_a_named_step(run, shelf):
    run.train(4)
    store = run.checkpointer._driver.store
    made = archive(store, shelf / "mine", step=3)
    assert made == shelf / "mine"
    assert_same(lightckpt.load(made)["model"], run.states[3])
    assert all(version.pinned == 0 for version in store.versions())


def test_a_version_that_the_user_pinned_stays_pinned(run, shelf):
    run.train(4)
    run.checkpointer.pin(4)
    archive(run.checkpointer._driver.store, shelf, step=4)
    run.train(5)
    assert 4 in run.checkpointer.steps()


@pytest.mark.parametrize("kind", ["store", "lz4"])
def test_training_goes_on_from_an_archive_bit_for_bit(run, shelf, kind):
    run.train(4)
    made = archive(run.path, shelf, compress=None if kind == "store" else "lz4")
    if kind == "lz4":
        made = expand(made, shelf / "expanded")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with lightckpt.Checkpointer(made, model=model, optimizer=optimizer) as other:
        assert other.restore() == 4
        assert_same(model.state_dict(), run.states[4])
        assert_same(optimizer.state_dict(), run.optimizer.state_dict())
        optimizer.step()
        other.mark()
        assert other.wait() == 5


def test_nothing_but_the_archive_is_left(run, shelf):
    run.train(1)
    archive(run.path, shelf)
    archive(run.path, shelf, compress="lz4")
    assert visible(shelf) == ["step-1.lckpt", "step-1.lckpt.lz4"]


def test_progress_is_told_in_bytes(run, shelf):
    run.train(1)
    seen = []
    archive(run.path, shelf, progress=lambda done, total: seen.append((done, total)))
    done, total = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == total[-1] > 0


def test_the_file_is_synced_before_its_name_and_the_folder_after(run, shelf, monkeypatch):
    run.train(1)
    events = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def note_replace(source, target):
        events.append(("name", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    archive(run.path, shelf)
    archive(run.path, shelf, compress="lz4")
    plain, packed = events[:3], events[3:]
    assert plain == [("sync", ".lightckpt.part"), ("name", "step-1.lckpt"), ("sync", "shelf")]
    assert [kind for kind, _ in packed] == ["sync", "name", "sync"]
    assert packed[1:] == [("name", "step-1.lckpt.lz4"), ("sync", "shelf")]


def test_descriptors_do_not_pile_up(run, shelf):
    run.train(1)
    archive(run.path, shelf)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        archive(run.path, shelf, replace=True)
        archive(run.path, shelf, replace=True, compress="lz4")
    assert len(os.listdir("/proc/self/fd")) == before


# -- what stops one --------------------------------------------------------------------------------


def test_what_is_there_already_is_left_alone(run, shelf):
    run.train(1)
    (shelf / "precious").write_text("mine")
    for compress in (None, "lz4"):
        with pytest.raises(FileExistsError, match="precious exists already"):
            archive(run.path, shelf / "precious", compress=compress)
    assert (shelf / "precious").read_text() == "mine"
    archive(run.path, shelf / "precious", replace=True)
    assert lightckpt.load(shelf / "precious")["step"] == 1


def test_a_missing_step_folder_or_store_is_not_found(run, shelf):
    run.train(2)
    with pytest.raises(NotFoundError, match=r"no version of step 9, only of \[2, 1\]"):
        archive(run.path, shelf, step=9)
    with pytest.raises(NotFoundError, match=r"the folder of .* does not exist"):
        archive(run.path, shelf / "no" / "where")
    with pytest.raises(NotFoundError, match="no store at"):
        archive(shelf / "nothing", shelf)
    assert visible(shelf) == []


def test_an_unknown_compression_is_refused(run, shelf):
    with pytest.raises(ValueError, match="compress='zip' must be"):
        archive(run.path, shelf, compress="zip")


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_damage_does_not_travel(run, shelf, compress):
    run.train(3)
    run.close()
    flip_bit(run.path, bytes_of(run.states[3]["2.weight"]))
    with pytest.raises(CorruptError, match=r"step 3: .*model/model/2\.weight.*not archived"):
        archive(run.path, shelf, step=3, compress=compress)
    assert visible(shelf) == []


def test_damaged_metadata_are_passed_over_unless_asked_for(run, shelf):
    run.train(3)
    run.checkpointer.pin(2)
    run.model.append(nn.Linear(3, 3))
    run.train(1)
    run.close()
    data = run.path.read_bytes()
    with open_reader(run.path) as reader:
        newest = bytes(reader.view(reader.versions()[0].version)[0])
    assert data.count(newest) == 1
    flip_bit(run.path, newest)
    assert archive(run.path, shelf).name == "step-3.lckpt"
    with pytest.raises(FormatError, match="checksum of its manifest"):
        archive(run.path, shelf, step=4)


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_a_copy_that_is_stopped_leaves_nothing(run, shelf, compress):
    run.train(1)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archive(run.path, shelf, compress=compress, progress=stop)
    assert visible(shelf) == []
    archive(run.path, shelf, compress=compress)


def test_what_a_killed_process_left_is_replaced(run, shelf):
    run.train(2)
    part = shelf / copies.PART_NAME
    os.rename(archive(run.path, shelf, step=1), part)  # killed just before the rename
    assert_same(lightckpt.load(archive(run.path, shelf))["model"], run.states[2])
    part.write_bytes(bytes(100_000))  # what a power cut may leave
    made = archive(run.path, shelf, replace=True)
    with open_reader(made) as reader:
        assert len(reader.versions()) == 1
    assert visible(shelf) == ["step-2.lckpt"]


def test_two_at_once_in_one_folder_are_refused(run, shelf):
    run.train(1)
    part = shelf / copies.PART_NAME
    with Store(part, create=True, media=Media.FILE):
        with pytest.raises(BusyError, match="already open for writing"):
            archive(run.path, shelf)
        assert part.exists()


def test_a_full_disk_is_a_clear_error(run, shelf, monkeypatch):
    run.train(1)

    def full(*_, **__):
        raise NoSpaceError("no room for it: 5 bytes more are needed")

    monkeypatch.setattr(copies, "Store", full)
    with pytest.raises(NoSpaceError, match="bytes more are needed"):
        archive(run.path, shelf)
    assert visible(shelf) == []
