"""Buffers of a store. Goal: memory that a store lent never ends the process, however long somebody
looks at it; what nobody answers for any more raises; what a reader wrote is not the store's.

Method: a small store and a reader of it, closed or forgotten under each kind of thing that can be
made from a buffer; what is mapped is read from /proc.
"""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import lightckpt
from lightckpt._core import Op, Store, make_sizes, make_spans
from training import make, update

BYTES = 1 << 20


@pytest.fixture
def data():
    return np.full(BYTES, 7, np.uint8)


def save(store, data, step):
    store.begin(step=step, keep=1, extents=make_sizes([data.nbytes]), blob=b"{}", host_bytes=4)
    store.wait(store.submit(Op.WRITE, make_spans([(data.ctypes.data, 0)])))
    store.wait(store.commit(b"host"))


@pytest.fixture
def store(path, data):
    with Store(path, create=True, workers=1) as store:
        save(store, data, 1)
        yield store


def reader_of(path):
    reader = Store(path, read_only=True, workers=1)
    version = reader.versions()[0].version
    reader.pin(version)
    return reader, version


def times_mapped(path):
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"{path}\n")


def test_buffers_raise_once_their_store_is_closed(store, path):
    reader, version = reader_of(path)
    manifest, host = reader.view(version)
    extent = reader.locate(version, 0)
    assert (bytes(manifest), bytes(host), extent[0]) == (b"{}", b"host", 7)
    alone = times_mapped(path)
    reader.close()
    for buffer in (manifest, host, extent):
        with pytest.raises(ValueError, match="released"):
            bytes(buffer)
    del manifest, host, extent, buffer
    assert times_mapped(path) == alone - 2


def test_buffers_raise_once_their_store_has_no_name(store, path):
    def host_alone():
        reader, version = reader_of(path)
        return reader.view(version)[1]

    host = host_alone()
    gc.collect()
    with pytest.raises(ValueError, match="released"):
        bytes(host)


@pytest.mark.parametrize(
    "made_of",
    [
        lambda buffer: buffer[5:],
        lambda buffer: np.frombuffer(buffer, np.uint8)[5:],
        lambda buffer: torch.frombuffer(buffer, dtype=torch.uint8)[5:],
        lambda buffer: torch.from_numpy(np.frombuffer(buffer, np.uint8)).view(-1)[5:],
        lambda buffer: memoryview(buffer).cast("B")[5:],
    ],
)
@pytest.mark.parametrize("forgotten", [False, True])
def test_what_was_made_of_a_buffer_stays_mapped_until_it_goes(store, path, made_of, forgotten):
    alone = times_mapped(path)
    reader, version = reader_of(path)
    made = made_of(reader.locate(version, 0))
    if not forgotten:
        reader.close()
    del reader
    assert times_mapped(path) == alone + 2
    assert (int(made[0]), int(made[-1])) == (7, 7)
    del made
    assert times_mapped(path) == alone


def test_a_store_that_is_closed_is_free_for_another_whatever_looks_at_its_memory(store, path, data):
    array = np.frombuffer(store.locate(1, 0), np.uint8)
    store.close()
    with Store(path) as again:
        save(again, data, 2)
    assert array[0] == 7


def test_what_a_view_shows_cannot_be_written(store, path):
    reader, version = reader_of(path)
    with reader:
        for buffer in (*store.view(version), *reader.view(version)):
            with pytest.raises(TypeError, match="read-only"):
                buffer[0] = 0


def test_a_forked_child_takes_no_memory_from_its_parent(store, path):
    reader, version = reader_of(path)
    array = np.frombuffer(reader.locate(version, 0), np.uint8)
    if (child := os.fork()) == 0:
        good = array[-1] == 7
        del array, reader
        gc.collect()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    reader.close()
    assert array[-1] == 7


def test_what_a_reader_wrote_is_neither_damage_nor_the_next_version(store, path, data):
    reader, version = reader_of(path)
    with reader:
        np.frombuffer(reader.locate(version, 0), np.uint8)[:] = 99
        spans = make_spans([(0, 0)])
        assert reader.wait(reader.submit(Op.VERIFY, spans, version=version)).bad_count == 0
        assert reader.locate(version, 0)[0] == 99
        reader.pin(version, pinned=False)
        for step in (2, 3):
            data[:] = step
            save(store, data, step)
        newest = reader.versions()[0]
        assert reader.locate(newest.version, 0)[0] == 3
        report = reader.wait(reader.submit(Op.VERIFY, spans, version=newest.version))
        assert report.bad_count == 0


def test_a_hundred_loads_are_held_at_once_and_each_may_be_written_to(path):
    """More than there were places for the guard of SIGBUS."""
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        update(model, optimizer, 0)
        checkpointer.mark()
        checkpointer.wait()
        states = [lightckpt.load(path, verify=False) for _ in range(100)]
        for number, state in enumerate(states):
            state["model"]["0.weight"].fill_(number)
        for number, state in enumerate(states):
            assert bool((state["model"]["0.weight"] == number).all())
        assert torch.equal(lightckpt.load(path)["model"]["0.weight"], model[0].weight)
