"""Copies: one version out of a store or a container, and into a file of its own of either kind.

A file is made under another name in its folder, synced, renamed, and the folder synced: under its
own name it is whole or absent. What is copied is compared with its checksums first, so damage does
not travel.

Stores are made under one fixed name per folder. So what a killed process left is found and removed
by the next, and one lock file serves all: the core keeps a lock file open for as long as it runs.
"""

import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ._core import Media, Op, Store, Version, make_sizes, make_spans
from .container import ContainerReader, ContainerWriter
from .errors import CorruptError, FormatError, NotFoundError
from .manifest import DTYPE_BYTES, Manifest, decode_manifest
from .reader import Progress, bad_extents, groups_of, identity, names_in, read_manifest

PART_NAME = ".lightckpt.part"  # of the store that is being made, in each folder
DRAIN_SECONDS = 3600.0
_SLOT_PAGE_BYTES = 4096
_SLOT = struct.Struct("<QIIQQQQIIII")  # as in docs/FORMAT.md


class Source(Protocol):
    """A version to copy: its step, manifest and host state, and its extents on demand."""

    step: int
    blob: bytes
    host: bytes
    manifest: Manifest

    def read(self, group: Sequence[int]) -> list[Any]:
        """Return the extents of *group* as buffers, verified; they are good until the next call.

        Raises:
            CorruptError: naming the tensors whose bytes differ from their checksums.
        """

    def confirm(self) -> None:
        """Raise if what has been read may not have been one version."""


class StoreSource:
    """A pinned version of an open store."""

    def __init__(self, store: Store, version: Version) -> None:
        self._store, self._version = store, version
        blob, host = store.view(version.version)
        self.step, self.blob, self.host = version.step, bytes(blob), bytes(host)
        self.manifest = read_manifest(store, version)

    def read(self, group: Sequence[int]) -> list[Any]:
        number = self._version.version
        if bad := bad_extents(self._store, number, group):
            names = ", ".join(names_in(self.manifest, bad))
            raise CorruptError(
                f"step {self.step}: bytes of {names} differ from their checksums; not archived"
            )
        return [self._store.locate(number, extent) for extent in group]

    def confirm(self) -> None:
        # A restore may retire even what is pinned here; its bytes may then have been overwritten.
        if identity(self._version) not in {identity(v) for v in self._store.versions()}:
            raise NotFoundError(f"step {self.step} was retired while it was being archived")


class ContainerSource:
    """The version in a compressed archive."""

    def __init__(self, reader: ContainerReader) -> None:
        self._reader = reader
        self.step = reader.step
        self.blob, self.host = bytes(reader.read(0)), bytes(reader.read(1))
        self.manifest = decode_manifest(self.blob)
        sizes = tuple(part.bytes for part in reader.parts[2:])
        if sizes != self.manifest.extents:
            raise FormatError(f"{reader.path}: its extents are not those of its manifest")

    def read(self, group: Sequence[int]) -> list[Any]:
        buffers = []
        for extent in group:
            try:
                buffers.append(self._reader.read(2 + extent))
            except CorruptError as error:
                names = ", ".join(names_in(self.manifest, [extent]))
                raise CorruptError(f"{error}: the bytes of {names}") from error
        return buffers

    def confirm(self) -> None:
        return


def write_container(
    source: Source, dest: Path, *, replace: bool, progress: Progress | None = None
) -> None:
    """Write *source* to *dest*, compressed."""
    manifest = source.manifest
    elements = {e.extent: DTYPE_BYTES.get(e.dtype, 1) for e in reversed(manifest.entries)}
    with fresh_file(dest, replace=replace) as part, open(part, "wb") as file:
        writer = ContainerWriter(file, step=source.step, made_by=manifest.made_by)
        writer.add(source.blob)
        writer.add(source.host)
        done, total = 0, sum(manifest.extents)
        for group in groups_of(manifest.extents):
            for extent, data in zip(group, source.read(group), strict=True):
                writer.add(data, elements.get(extent, 1))
                done += manifest.extents[extent]
            if progress is not None:
                progress(done, total)
        source.confirm()
        writer.finish()


def write_store(
    source: Source,
    dest: Path,
    *,
    replace: bool,
    progress: Progress | None = None,
    workers: int = 0,
) -> None:
    """Write *source* to *dest*, as a store that holds nothing else."""
    refuse_existing(dest, replace)
    part = dest.parent / PART_NAME
    with _new_store(part, workers) as store:
        # Its lock is held until the rename is done: nobody else touches the part.
        try:
            _copy_into(store, source, progress)
            os.truncate(part, _used_bytes(part, store.versions()[0]))
            _publish(part, dest)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _copy_into(store: Store, source: Source, progress: Progress | None) -> None:
    sizes = source.manifest.extents
    store.begin(
        step=source.step, keep=1, extents=make_sizes(sizes), blob=source.blob,
        host_bytes=len(source.host),
    )  # fmt: skip
    done, total = 0, sum(sizes)
    for group in groups_of(sizes):
        buffers = source.read(group)
        spans = make_spans([(_address(b), e) for b, e in zip(buffers, group, strict=True)])
        store.wait(store.submit(Op.WRITE, spans), DRAIN_SECONDS)
        done += sum(sizes[extent] for extent in group)
        if progress is not None:
            progress(done, total)
    source.confirm()
    store.wait(store.commit(source.host), DRAIN_SECONDS)


def _address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data) if len(buffer) else 0


def _new_store(part: Path, workers: int) -> Store:
    """Make an empty store at *part*, in place of what a killed process left there.

    Raises:
        BusyError: another archive is being made in this folder.
    """
    for _ in range(3):
        try:
            store = Store(part, create=True, media=Media.FILE, workers=workers)
        except FormatError:
            part.unlink(missing_ok=True)
            continue
        if not store.versions():
            return store
        part.unlink(missing_ok=True)  # a leftover, since its lock is ours
        store.close()
    raise FormatError(f"{part} is there again and again, and is no store: remove it")


def _used_bytes(part: Path, version: Version) -> int:
    """Return where the only version of a store ends: space for its successors is not kept."""
    with open(part, "rb") as file:
        file.seek(_SLOT_PAGE_BYTES * (1 + version.slot))
        slot = _SLOT.unpack(file.read(_SLOT.size))
    manifest_bytes, manifest_offset, record_offset = slot[2], slot[5], slot[6]
    return max(int(record_offset) + version.area_bytes, int(manifest_offset) + int(manifest_bytes))


def refuse_existing(dest: Path, replace: bool) -> None:
    """Raise ``FileExistsError`` if *dest* may not be made, ``NotFoundError`` without a folder."""
    if not dest.parent.is_dir():
        raise NotFoundError(f"the folder of {dest} does not exist")
    if dest.is_dir() or (dest.exists() and not replace):
        raise FileExistsError(f"{dest} exists already; it was left as it is")


@contextmanager
def fresh_file(dest: Path, *, replace: bool) -> Iterator[Path]:
    """Give an empty file in the folder of *dest* that becomes *dest*, durably, if all goes well.

    Raises:
        FileExistsError: *dest* exists, and is not to be replaced.
        NotFoundError: its folder does not exist.
    """
    refuse_existing(dest, replace)
    part = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}.part")
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    try:
        yield part
        _publish(part, dest)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _publish(part: Path, dest: Path) -> None:
    """Give *part* its name. File before name before folder, so that the name is never of less."""
    _sync(part, os.O_RDONLY)
    os.replace(part, dest)
    _sync(dest.parent, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
