"""Container: one version, compressed, in one file. For slow storage only; it is not a store.

lz4 finds nothing in raw floats. With their bytes shuffled, so that all first bytes of the elements
stand together, then all second ones, it finds the exponents. Little-endian, offsets from the start:

    header (64 B) := magic "LCKPTLZ4", format: u32, index_crc: u32, index_offset: u64,
                     index_bytes: u64, zeros, crc: u32 (of what stands before)
    chunks        := up to 1 MiB of a part each: shuffled and compressed, or as they are
    index         := JSON: {"step", "made_by", "parts": [{"bytes", "element", "chunks"}, ...]}
    chunk         := [offset, stored bytes, CRC-32 of the chunk itself]

Part 0 is the manifest, part 1 the host state, part 2 + i extent i. ``element`` is the bytes of one
element: the unit of the shuffle. A chunk that has as many stored bytes as bytes is stored as it is.
Checksums are of what comes out, so they cover the compression too.
"""

import json
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import lz4.block
import numpy as np

from .errors import CorruptError, FormatError

MAGIC = b"LCKPTLZ4"
FORMAT = 1
CHUNK_BYTES = 1 << 20
LZ4_RATIO_MAX = 256  # what a byte can expand to at most
_HEADER = struct.Struct("<8sIIQQ")
_HEADER_BYTES = 64

Chunk = tuple[int, int, int]  # offset, stored bytes, CRC-32


@dataclass(frozen=True)
class Part:
    """Bytes that belong together, and the chunks that hold them."""

    bytes: int
    element: int
    chunks: tuple[Chunk, ...]


def is_container(path: str | os.PathLike[str]) -> bool:
    """Does *path* begin as a container does? False where it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def shuffle(data: Any, element: int) -> bytes:
    """Bring the first byte of every element to the front, then every second one, and so on."""
    flat = np.frombuffer(data, dtype=np.uint8)
    whole = len(flat) // element * element
    return flat[:whole].reshape(-1, element).T.tobytes() + flat[whole:].tobytes()


def unshuffle(data: bytes, element: int) -> bytes:
    """Undo :func:`shuffle`."""
    flat = np.frombuffer(data, dtype=np.uint8)
    whole = len(flat) // element * element
    return flat[:whole].reshape(element, -1).T.tobytes() + flat[whole:].tobytes()


class ContainerWriter:
    """Writes the parts of a version one after the other into an empty file, then the index."""

    def __init__(self, file: BinaryIO, *, step: int, made_by: str) -> None:
        self._file = file
        self._index: dict[str, Any] = {"step": step, "made_by": made_by, "parts": []}
        self._end = _HEADER_BYTES
        file.write(bytes(_HEADER_BYTES))

    def add(self, data: Any, element: int = 1) -> None:
        """Compress *data*, a contiguous buffer, as the next part."""
        view = memoryview(data).cast("B")
        chunks = []
        for start in range(0, len(view), CHUNK_BYTES):
            raw = view[start : start + CHUNK_BYTES]
            packed = lz4.block.compress(shuffle(raw, element), store_size=False)
            stored = packed if len(packed) < len(raw) else raw
            self._file.write(stored)
            chunks.append((self._end, len(stored), zlib.crc32(raw)))
            self._end += len(stored)
        self._index["parts"].append({"bytes": len(view), "element": element, "chunks": chunks})

    def finish(self) -> None:
        """Write the index, and the header last: a file that was cut short has none."""
        index = json.dumps(self._index, separators=(",", ":")).encode()
        self._file.write(index)
        header = _HEADER.pack(MAGIC, FORMAT, zlib.crc32(index), self._end, len(index))
        header = header.ljust(_HEADER_BYTES - 4, b"\0")
        self._file.seek(0)
        self._file.write(header + struct.pack("<I", zlib.crc32(header)))


class ContainerReader:
    """Reads parts back; closed on exit from its ``with`` block.

    Raises:
        FormatError: the file is no container, damaged, cut short, or of another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        try:
            self.step, self.made_by, self.parts = self._read_index()
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            self.close()
            raise FormatError(f"{path} cannot be read as a compressed archive: {error}") from error

    def _read_index(self) -> tuple[int, str, tuple[Part, ...]]:
        header = self._file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin as one")
        if zlib.crc32(header[:-4]) != struct.unpack("<I", header[-4:])[0]:
            raise ValueError("the checksum of its header is wrong")
        _, format_, index_crc, offset, size = _HEADER.unpack_from(header)
        if format_ != FORMAT:
            raise ValueError(f"it has format {format_}; this lightckpt reads format {FORMAT}")
        length = os.fstat(self._file.fileno()).st_size
        if offset + size > length:
            raise ValueError(f"its index ends at {offset + size} of {length} bytes")
        self._file.seek(offset)
        index = self._file.read(size)
        if zlib.crc32(index) != index_crc:
            raise ValueError("the checksum of its index is wrong")
        tree = json.loads(index)
        parts = tuple(_part(fields, offset) for fields in tree["parts"])
        _check_chunks(parts)
        if len(parts) < 2:
            raise ValueError(f"it has {len(parts)} parts; the manifest and the host state are two")
        step = tree["step"]
        if type(step) is not int or not 0 <= step < 1 << 64:
            raise ValueError(f"{step!r} is no step")
        return step, str(tree["made_by"]), parts

    def read(self, index: int) -> bytearray:
        """Return a part, verified.

        Raises:
            CorruptError: a chunk's bytes differ from their checksum.
        """
        part = self.parts[index]
        data = bytearray(part.bytes)
        for number, (offset, stored, crc) in enumerate(part.chunks):
            start = number * CHUNK_BYTES
            size = min(CHUNK_BYTES, part.bytes - start)
            self._file.seek(offset)
            raw = self._file.read(stored)
            if stored != size:
                raw = self._expand(raw, size, part.element)
            if len(raw) != size or zlib.crc32(raw) != crc:
                raise CorruptError(f"{self.path}: chunk {number} of part {index} is damaged")
            data[start : start + size] = raw
        return data

    @staticmethod
    def _expand(stored: bytes, size: int, element: int) -> bytes:
        try:
            shuffled: bytes = lz4.block.decompress(stored, uncompressed_size=size)
        except lz4.block.LZ4BlockError:
            return b""  # has not the right length
        return unshuffle(shuffled, element)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_chunks(parts: tuple[Part, ...]) -> None:
    """Refuse chunks that overlap: few bytes on the media could else fill any amount of memory."""
    end = _HEADER_BYTES
    for part in parts:
        for offset, stored, _ in part.chunks:
            if offset < end:
                raise ValueError(f"a chunk at {offset} overlaps one that ends at {end}")
            end = offset + stored


def _part(fields: dict[str, Any], end: int) -> Part:
    size, element = fields["bytes"], fields["element"]
    chunks = tuple((int(o), int(n), int(crc)) for o, n, crc in fields["chunks"])
    if type(size) is not int or size < 0 or len(chunks) != -(-size // CHUNK_BYTES):
        raise ValueError(f"a part of {size!r} bytes in {len(chunks)} chunks")
    if type(element) is not int or not 1 <= element <= 16:
        raise ValueError(f"elements of {element!r} bytes")
    for number, (offset, stored, _) in enumerate(chunks):
        if min(CHUNK_BYTES, size - number * CHUNK_BYTES) > stored * LZ4_RATIO_MAX:
            raise ValueError(f"a part of {size} bytes with a chunk of {stored}")
        if not 0 < stored <= CHUNK_BYTES or not _HEADER_BYTES <= offset <= end - stored:
            raise ValueError(f"a chunk of {stored} bytes at {offset}")
    return Part(size, element, chunks)
