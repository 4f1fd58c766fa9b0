"""Compressed archives. Goal: what comes out is what went in, or an error that says what is damaged.

Method: parts of every size and sort; archives of a small run, expanded and compared bit for bit;
files damaged byte by byte, cut short, and with an index that lies under right checksums.
"""

import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightckpt
from lightckpt import CorruptError, FormatError
from lightckpt.archive import archive, expand, open_any
from lightckpt.container import (
    CHUNK_BYTES,
    ContainerReader,
    ContainerWriter,
    is_container,
    shuffle,
    unshuffle,
)
from lightckpt.reader import open_reader
from small_run import SmallRun, assert_same, folder_in_memory, visible


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
