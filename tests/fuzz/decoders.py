"""What decodes bytes in Python, as targets for a fuzzer, and mutators that know the formats.

A target takes bytes and returns; whatever is wrong with them may end in a CheckpointError of the
kind that its decoder documents, and in nothing else. The mutators change JSON as JSON and then make
lengths and checksums right, or nothing would get past the header.
"""

import json
import random
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightckpt
from lightckpt._core import Media, Op, Store, make_sizes, make_spans
from lightckpt.archive import expand
from lightckpt.collect import read_host
from lightckpt.container import MAGIC, ContainerReader
from lightckpt.errors import CheckpointError, CorruptError, FormatError, UnsafeStateError
from lightckpt.hoststate import _FORM_OF_TAG, _LEAVES, LEAF_ALIGN, decode, encode
from lightckpt.listing import layer_of
from lightckpt.manifest import decode_manifest, encode_manifest
from lightckpt.tensors import decode_leaf, encode_leaf

HOST_HEADER = struct.Struct("<4sIQ")
CONTAINER_HEADER = struct.Struct("<8sIIQQ")
STORE_MAX = 1 << 20  # bytes of extents that a store is made with
Target = Callable[[bytes, Path], None]


def decode_host(data: bytes, folder: Path) -> None:
    """Host state on its own, and as that of a run. What decodes is encoded and decoded again."""
    with suppress(FormatError, UnsafeStateError):
        read_host(data)
    try:
        tree = decode(data, leaf=decode_leaf)
    except (FormatError, UnsafeStateError):
        return
    with suppress(UnsafeStateError):  # what has no encoding, such as a hook's odd object
        decode(encode(tree, leaf=encode_leaf), leaf=decode_leaf)


def read_manifest(data: bytes, folder: Path) -> None:
    """A manifest: refused, or the same after another round."""
    try:
        manifest = decode_manifest(data)
    except FormatError:
        return
    assert decode_manifest(encode_manifest(manifest)) == manifest
    for entry in manifest.entries:
        layer_of(entry.path)


def read_container(data: bytes, folder: Path) -> None:
    """A compressed archive: read part by part, and expanded into a store."""
    path = folder / "container"
    path.write_bytes(data)
    with suppress(FormatError, CorruptError), ContainerReader(path) as reader:
        for index in range(len(reader.parts)):
            reader.read(index)
    with suppress(FormatError, CorruptError):
        expand(path, folder / "expanded", replace=True)


def load_store(data: bytes, folder: Path) -> None:
    """A store whose checksums are right: u32 length of the blob, blob, host state."""
    (blob_bytes,) = struct.unpack_from("<I", data.ljust(4, b"\0"))
    blob, host = data[4 : 4 + blob_bytes], data[4 + blob_bytes :]
    try:
        sizes = list(decode_manifest(blob).extents)
    except FormatError:
        sizes = []
    if sum(sizes) > STORE_MAX:
        sizes = [min(size, 8) for size in sizes[:9]]
    path = folder / "store"
    path.unlink(missing_ok=True)
    with Store(path, create=True, media=Media.FILE, workers=1, slots=4) as store:
        extents = make_sizes(sizes)
        store.begin(step=1, keep=1, extents=extents, blob=blob, host_bytes=len(host))
        memory = bytearray(max([*sizes, 1]))
        address = _address(memory)
        spans = make_spans([(address, extent) for extent in range(len(sizes))])
        store.wait(store.submit(Op.WRITE, spans))
        store.wait(store.commit(host))
    with suppress(CheckpointError):
        lightckpt.load(path)


def _address(memory: bytearray) -> int:
    from lightckpt._ffi import ffi

    return int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))


TARGETS: dict[str, Target] = {
    "host": decode_host,
    "manifest": read_manifest,
    "container": read_container,
    "load": load_store,
}


def run(name: str, data: bytes, folder: Path) -> None:
    """Run a target on *data*; raises whatever it may not raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of deprecated spellings; load's, of damage
        TARGETS[name](data, folder)


# Mutators.

HURTFUL: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 8, 63, 64, 65, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63),
    10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "$", "a", "<f8", "|u1", "O", "i4,O",
    "V0", "S0", "U9", "(2)i4", "M8[s]", "float32", "bool", "cpu", "cuda", "meta", "q", "0q", "C",
    "F", "00", "ff" * 8, "-0x1", "0x" + "f" * 400, "1e999999999", "model", "state", "<a>", "1/0",
    "\ud800", [], {}, [0], [2**32, 2**32], [0, 2**62, 2**62], {"$": ["leaf", 0]}, {"$": []},
    {"$": ["leaf", 1]}, {"$": ["int", "0x" + "f" * 99]}, {"$": ["bytes", "00" * 8]},
    {"$": ["torch", "Size", [2**62]]}, {"$": ["factory", "eval"]}, {"$": ["numpy", ["O"], 0]},
)  # fmt: skip
WORDS = (*_FORM_OF_TAG, "leaf", *_LEAVES, "hook")


def _copy(tree: Any) -> Any:
    """Copy *tree*: what is put into a tree twice, or into itself, would never end."""
    return json.loads(json.dumps(tree))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything in *tree*, a JSON document."""
    pending = [tree]
    while pending:
        at = pending.pop()
        items = at.items() if isinstance(at, dict) else enumerate(at)
        for key, child in items:
            yield at, key
            if isinstance(child, dict | list):
                pending.append(child)


def mutate_json(tree: Any, rng: random.Random) -> None:
    """Change a few things in *tree*, a dict or list of JSON's own types, in place."""
    for _ in range(rng.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return
        (at, key), (other, there) = rng.choice(places), rng.choice(places)
        kind = rng.randrange(7)
        if kind == 0:
            at[key] = rng.choice(WORDS)
        elif kind <= 2:
            at[key] = _copy(rng.choice(HURTFUL))
        elif kind == 3:
            at[key] = _copy(other[there])
        elif kind == 4:
            del at[key]
        elif kind == 5 and isinstance(at, list):
            at.insert(key, _copy(at[key]))
        elif isinstance(at[key], int | float):
            at[key] = rng.choice([at[key] + 1, at[key] - 1, -at[key], at[key] * 2])
        else:
            at[key] = [at[key]]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed) or 1)
        kind = rng.randrange(4)
        if kind == 0:
            changed[place : place + 1] = rng.randbytes(1)
        elif kind == 1:
            del changed[place : place + rng.randint(1, 16)]
        elif kind == 2:
            changed[place:place] = rng.randbytes(rng.randint(1, 8))
        else:
            changed[place:place] = changed[place : place + rng.randint(1, 32)]
    return bytes(changed)


def _dumps(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def pack_host(document: Any, leaves: list[bytes]) -> bytes:
    """Build host state of a JSON document and the bytes of its leaves."""
    text = _dumps(document)
    body = b""
    for data in leaves:
        body += bytes(-(HOST_HEADER.size + len(text) + len(body)) % LEAF_ALIGN) + data
    return HOST_HEADER.pack(b"LCH1", len(text), HOST_HEADER.size + len(text) + len(body)) + (
        text + body
    )


def unpack_host(data: bytes) -> tuple[Any, list[bytes]]:
    _, json_bytes, _ = HOST_HEADER.unpack_from(data)
    end = HOST_HEADER.size + json_bytes
    document = json.loads(data[HOST_HEADER.size : end])
    leaves = []
    for _, size, _ in document["leaves"]:
        start = end + -end % LEAF_ALIGN
        end = start + size
        leaves.append(data[start:end])
    return document, leaves


def mutate_host(data: bytes, rng: random.Random) -> bytes:
    document, leaves = unpack_host(data)
    if leaves and rng.randrange(4) == 0:
        index = rng.randrange(len(leaves))
        leaves[index] = mutate_bytes(leaves[index], rng)[: 1 << 16]
        document["leaves"][index][1] = len(leaves[index])
    else:
        mutate_json(document, rng)
    return pack_host(document, leaves)


def mutate_manifest(data: bytes, rng: random.Random) -> bytes:
    tree = json.loads(data)
    mutate_json(tree, rng)
    return _dumps(tree)


def pack_container(index: Any, chunks: bytes) -> bytes:
    """Build a container of an index and what lies between it and the header."""
    text = _dumps(index)
    header = CONTAINER_HEADER.pack(MAGIC, 1, zlib.crc32(text), 64 + len(chunks), len(text))
    header = header.ljust(60, b"\0")
    return header + struct.pack("<I", zlib.crc32(header)) + chunks + text


def mutate_container(data: bytes, rng: random.Random) -> bytes:
    _, _, _, offset, _ = CONTAINER_HEADER.unpack_from(data)
    index, chunks = json.loads(data[offset:]), data[64:offset]
    if rng.randrange(4) == 0:
        chunks = mutate_bytes(chunks, rng)
    else:
        mutate_json(index, rng)
    return pack_container(index, chunks)


def pack_load(blob: bytes, host: bytes) -> bytes:
    return struct.pack("<I", len(blob)) + blob + host


def mutate_load(data: bytes, rng: random.Random) -> bytes:
    (size,) = struct.unpack_from("<I", data)
    blob, host = data[4 : 4 + size], data[4 + size :]
    if rng.randrange(2):
        return pack_load(mutate_manifest(blob, rng), host)
    return pack_load(blob, mutate_host(host, rng))


_MUTATORS = {
    "host": mutate_host,
    "manifest": mutate_manifest,
    "container": mutate_container,
    "load": mutate_load,
}


def mutate(name: str, data: bytes, rng: random.Random) -> bytes:
    """Return a changed *data*: as what it is, if it is that; now and then as mere bytes."""
    if rng.randrange(8):
        # What is no longer of its format can only be changed as bytes.
        with suppress(ValueError, TypeError, KeyError, IndexError, struct.error, RecursionError,
                      AttributeError, OverflowError):  # fmt: skip
            return _MUTATORS[name](data, rng)
    return mutate_bytes(data, rng)
