"""Archives. Goal: a file under an archive's name is one whole version, whatever happened; and
copying in the background neither disturbs training nor hides what failed.

Method: small runs in memory, read back with `load` and compared bit for bit; files damaged byte by
byte; copies stopped in the middle; the background thread held by events, never by time.
"""

import json
import os
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lightckpt
from lightckpt import (
    BusyError,
    CheckpointError,
    CheckpointWarning,
    CorruptError,
    FormatError,
    NoSpaceError,
    NotFoundError,
    WaitTimeoutError,
    copies,
)
from lightckpt import archive as archives
from lightckpt._core import Media, Store
from lightckpt.archive import Archiver, archive, expand, open_any
from lightckpt.container import (
    CHUNK_BYTES,
    ContainerReader,
    ContainerWriter,
    is_container,
    shuffle,
    unshuffle,
)
from lightckpt.reader import open_reader
from small_run import SmallRun, assert_same, bytes_of, flip_bit, folder_in_memory, make_model

DEADLINE_S = 120


@pytest.fixture
def folder():
    with folder_in_memory() as folder:
        yield folder


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


def visible(folder):
    """Name what is in *folder*, but for the lock files that the core leaves."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


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
    with pytest.raises(NotFoundError, match="the folder of .* does not exist"):
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


# -- compressed ------------------------------------------------------------------------------------


@given(data=st.binary(max_size=200), element=st.integers(1, 16))
def test_shuffling_can_be_undone(data, element):
    assert unshuffle(shuffle(data, element), element) == data


def test_parts_of_every_size_come_back(folder):
    random = np.random.default_rng(5)
    parts = [
        b"",
        b"x",
        bytes(CHUNK_BYTES),
        random.bytes(CHUNK_BYTES + 1),
        random.standard_normal(400_000, dtype=np.float32).tobytes(),
    ]
    with open(folder / "c", "wb") as file:
        writer = ContainerWriter(file, step=3, made_by="test")
        for part in parts:
            writer.add(part, 4)
        writer.finish()
    assert is_container(folder / "c")
    with ContainerReader(folder / "c") as reader:
        assert (reader.step, reader.made_by) == (3, "test")
        assert [bytes(reader.read(index)) for index in range(len(parts))] == parts
        stored = [sum(chunk[1] for chunk in part.chunks) for part in reader.parts]
    assert stored[2] < CHUNK_BYTES // 100  # zeros
    assert stored[3] == CHUNK_BYTES + 1  # noise, stored as it is
    assert stored[4] < 0.95 * len(parts[4])  # floats, thanks to the shuffle


@pytest.fixture
def packed(run, shelf):
    run.train(2)
    return archive(run.path, shelf, compress="lz4")


def test_a_compressed_archive_can_be_loaded_as_it_is(packed, run, monkeypatch):
    with folder_in_memory() as temporary:
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setattr("tempfile.tempdir", None)
        state = lightckpt.load(packed)
        assert_same(state["model"], run.states[2])
        assert visible(temporary) == []
    assert_same(state["model"], run.states[2])
    monkeypatch.setattr("tempfile.tempdir", None)


def test_an_expanded_archive_is_the_store_it_was_made_of(packed, run, shelf):
    plain = archive(run.path, shelf)
    made = expand(packed, shelf / "expanded")
    with open_reader(plain) as one, open_reader(made) as other:
        for left, right in zip(one.versions(), other.versions(), strict=True):
            assert left == right
            assert list(map(bytes, one.view(left.version))) == list(
                map(bytes, other.view(right.version))
            )
    assert_same(lightckpt.load(made)["model"], run.states[2])


def test_only_a_container_is_expanded(run, shelf, folder):
    run.train(1)
    with pytest.raises(FormatError, match="does not begin as one"):
        expand(run.path, shelf)
    with pytest.raises(FileNotFoundError):
        expand(folder / "nothing", shelf)
    assert not is_container(folder / "nothing")
    assert not is_container(folder)
    with open_any(run.path) as path:
        assert path == run.path


def test_any_flipped_bit_of_a_container_is_found(packed, shelf):
    """A byte in a gap of the header is covered too; so is every other byte."""
    data = bytearray(packed.read_bytes())
    with ContainerReader(packed) as reader:
        ends = [chunk[0] for part in reader.parts for chunk in part.chunks]
    places = {*range(0, 64, 5), *ends, *(end + 1 for end in ends), len(data) - 1, len(data) // 2}
    broken = shelf / "broken"
    for place in sorted(places):
        damaged = bytearray(data)
        damaged[place] ^= 4
        broken.write_bytes(damaged)
        with pytest.raises((FormatError, CorruptError)):
            expand(broken, shelf / "never")
    assert visible(shelf) == ["broken", packed.name]


def test_damaged_data_of_a_container_name_the_tensor(packed, shelf):
    data = bytearray(packed.read_bytes())
    with ContainerReader(packed) as reader:
        offset, stored, _ = reader.parts[2].chunks[0]
    data[offset + stored // 2] ^= 1
    packed.write_bytes(data)
    with pytest.raises(CorruptError, match=r"chunk 0 of part 2 .*model/model/0\.weight"):
        expand(packed, shelf / "never")


@pytest.mark.parametrize("left", [0, 7, 63, 64, 1000, -1])
def test_a_container_that_was_cut_short_is_refused(packed, shelf, left):
    packed.write_bytes(packed.read_bytes()[:left])
    with pytest.raises(FormatError, match="cannot be read as a compressed archive"):
        expand(packed, shelf / "never")


def rewrite_index(path, change):
    """Apply *change* to the index of a container, and make the checksums right again."""
    data = path.read_bytes()
    offset = int.from_bytes(data[16:24], "little")
    index = json.loads(data[offset:])
    change(index)
    text = json.dumps(index).encode()
    head = data[:12] + zlib.crc32(text).to_bytes(4, "little") + data[16:24]
    head = (head + len(text).to_bytes(8, "little")).ljust(60, b"\0")
    path.write_bytes(head + zlib.crc32(head).to_bytes(4, "little") + data[64:offset] + text)


def _set(*path, to):
    def change(index):
        *front, last = path
        for key in front:
            index = index[key]
        index[last] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_set("parts", to=[]), id="no parts"),
        pytest.param(_set("parts", 2, "bytes", to=-1), id="a negative size"),
        pytest.param(_set("parts", 2, "bytes", to=1 << 60), id="a size without chunks"),
        pytest.param(_set("parts", 2, "element", to=0), id="elements of no bytes"),
        pytest.param(_set("parts", 2, "chunks", 0, 0, to=1 << 40), id="a chunk behind the end"),
        pytest.param(_set("parts", 2, "chunks", 0, 1, to=1 << 30), id="a chunk too large"),
        pytest.param(_set("parts", 2, "chunks", 0, to=[1]), id="a chunk of one number"),
        pytest.param(_set("parts", 2, to=7), id="a part that is a number"),
        pytest.param(lambda index: index["parts"].pop(), id="an extent less than its manifest has"),
        pytest.param(lambda index: index.pop("step"), id="no step"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(packed, shelf, change):
    rewrite_index(packed, change)
    with pytest.raises(FormatError):
        expand(packed, shelf / "never")


def test_a_container_of_another_format_is_refused(packed, shelf):
    data = bytearray(packed.read_bytes())
    data[8] = 9
    data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    packed.write_bytes(data)
    with pytest.raises(FormatError, match="has format 9; this lightckpt reads format 1"):
        expand(packed, shelf / "never")


# -- in the background -----------------------------------------------------------------------------


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
