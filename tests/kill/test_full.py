"""Goal: a file system that is full for a while costs the versions of that while, and no other.

Method: btrfs on a loop device, which copies on write: once it is full, a store to a page of a file
whose blocks are all there raises SIGBUS, or msync says that there is no space. A trainer saves, the
file system is filled, and it saves until it is told that there is no space; then the filler goes.
A sparse copy of a store stands in for what other tools make of one.

Needs root, mkfs.btrfs and a loop device; skipped with the reason where one is missing.
"""

import os
import shutil
import subprocess
import warnings
from contextlib import suppress

import numpy as np
import pytest

import lightckpt
from lightckpt._core import Op, Store, make_sizes, make_spans
from training import make, update

pytestmark = pytest.mark.kill

VOLUME_BYTES = 160 << 20
STATE_BYTES = 12 << 20
TRIES = 40


def call(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()}"


@pytest.fixture
def volume(tmp_path):
    """A btrfs of its own."""
    if os.getuid() != 0:
        pytest.skip("needs root: to mount")
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs mkfs.btrfs: apt-get install btrfs-progs")
    image, place = tmp_path / "image", tmp_path / "volume"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(VOLUME_BYTES)
    if why := call("mkfs.btrfs", "-q", image) or call("mount", "-o", "loop", image, place):
        pytest.skip(f"no btrfs on a loop device here: {why}")
    yield place
    assert not call("umount", "-l", place)


def fill(volume):
    """Take all of its space, down to single pages."""
    filler = volume / "filler"
    with open(filler, "wb", buffering=0) as file:
        for piece in (1 << 20, 4096):
            try:
                while True:
                    file.write(os.urandom(piece))
                    os.fsync(file.fileno())
            except OSError:
                continue
    os.sync()
    return filler


def free(volume, filler):
    filler.unlink()
    call("btrfs", "filesystem", "sync", volume)
    os.sync()


def save(store, step):
    array = np.full(STATE_BYTES, step % 251, np.uint8)
    store.begin(step=step, keep=1, extents=make_sizes([array.nbytes]), blob=b"{}", host_bytes=4)
    try:
        store.wait(store.submit(Op.WRITE, make_spans([(array.ctypes.data, 0)])), 60)
        store.wait(store.commit(b"host"), 60)
    except lightckpt.CheckpointError:
        with suppress(ValueError):  # a commit that failed has ended it
            store.drop()
        raise


def is_whole(store, step):
    version = store.versions()[0]
    assert version.step == step
    report = store.wait(store.submit(Op.VERIFY, make_spans([(0, 0)]), version=version.version))
    return report.bad_count == 0 and store.locate(version.version, 0)[0] == step % 251


def test_a_store_goes_on_when_there_is_space_again(volume):
    path = volume / "store"
    with Store(path, create=True, workers=2) as store:
        for step in (1, 2, 3):
            save(store, step)
        durable = 3
        for _ in range(2):
            filler = fill(volume)
            refused = []
            for step in range(durable + 1, durable + TRIES):
                try:
                    save(store, step)
                    durable = step
                except lightckpt.CheckpointError as error:
                    refused.append(error)
                if len(refused) == 4:
                    break
            assert refused, "the file system never was full"
            assert {type(error) for error in refused} == {lightckpt.NoSpaceError}, refused
            assert all("pace" in str(error) and "cut" not in str(error) for error in refused)
            with Store(path, read_only=True, workers=1) as reader:
                assert is_whole(reader, durable)
            free(volume, filler)
            for step in range(durable + 1, durable + 4):
                save(store, step)
                durable = step
                assert is_whole(store, step)
    with Store(path) as store:
        assert is_whole(store, durable)


def test_training_goes_on_and_saves_again_when_there_is_space(volume):
    model, optimizer = make(width=20_000)
    with lightckpt.Checkpointer(
        volume / "run", model=model, optimizer=optimizer, mode="stop"
    ) as checkpointer:
        step = 0

        def train(steps):
            nonlocal step
            for _ in range(steps):
                update(model, optimizer, step)
                step += 1
                checkpointer.mark()

        train(4)
        assert checkpointer.wait() == 4
        filler = fill(volume)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(TRIES)
        assert any("pace" in str(w.message) for w in told), "the file system never was full"
        with pytest.raises(lightckpt.NoSpaceError):
            checkpointer.wait()
        free(volume, filler)
        train(1)
        assert checkpointer.wait() == step


def test_a_sparse_copy_on_a_full_file_system_says_so_and_stays_as_it_is(volume, tmp_path):
    path, copy = tmp_path / "store", volume / "copy"
    with Store(path, create=True, workers=1) as store:
        save(store, 1)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + (4 * VOLUME_BYTES))
    assert not call("cp", "--sparse=always", path, copy)
    blocks = copy.stat().st_blocks
    with pytest.raises(lightckpt.NoSpaceError, match="a sparse file"):
        Store(copy, workers=1)
    assert copy.stat().st_blocks == blocks
    with Store(copy, read_only=True, workers=1) as reader:
        assert is_whole(reader, 1)
