"""The core, as Python objects: owns handles, turns codes into exceptions, and nothing else.

No torch, no policy. Every other module reaches the C library through this one. Threads: as the C
header says: any thread may call; begin, commit, drop, pin, rebase and close are for one at a time.
"""

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from . import errors
from ._ffi import ffi, lib
from .buffers import Lease

_ERROR_TYPES: dict[int, type[Exception]] = {
    lib.LCKPT_E_INVALID: ValueError,
    lib.LCKPT_E_IO: errors.MediaError,
    lib.LCKPT_E_NOT_FOUND: errors.NotFoundError,
    lib.LCKPT_E_NO_SPACE: errors.NoSpaceError,
    lib.LCKPT_E_BUSY: errors.BusyError,
    lib.LCKPT_E_FORMAT: errors.FormatError,
    lib.LCKPT_E_TIMEOUT: errors.WaitTimeoutError,
    lib.LCKPT_E_CHANGED: errors.CorruptError,
    lib.LCKPT_E_ACCESS: errors.AccessError,
    lib.LCKPT_E_LOST: errors.MediaLostError,
}


class Media(IntEnum):
    """What to open a path as; ``AUTO`` takes what it is."""

    AUTO = lib.LCKPT_MEDIA_AUTO
    PMEM = lib.LCKPT_MEDIA_PMEM
    FILE = lib.LCKPT_MEDIA_FILE
    TMPFS = lib.LCKPT_MEDIA_TMPFS
    HEAP = lib.LCKPT_MEDIA_HEAP
    EMULATED = lib.LCKPT_MEDIA_EMULATED


class Granularity(IntEnum):
    """What has to happen before a store is durable."""

    BYTE = lib.LCKPT_BYTE
    CACHE_LINE = lib.LCKPT_CACHE_LINE
    PAGE = lib.LCKPT_PAGE
    VOLATILE = lib.LCKPT_VOLATILE


class Catalog(IntEnum):
    """Where a store's slots and manifests are; ``AUTO`` takes what it has, or makes ``LINES``."""

    AUTO = lib.LCKPT_CATALOG_AUTO
    LINES = lib.LCKPT_CATALOG_LINES
    PMEMOBJ = lib.LCKPT_CATALOG_PMEMOBJ


class Op(IntEnum):
    """What a batch does with each of its spans."""

    WRITE = lib.LCKPT_WRITE
    READ = lib.LCKPT_READ
    CHECK = lib.LCKPT_CHECK
    VERIFY = lib.LCKPT_VERIFY
    COPY = lib.LCKPT_COPY


class Snapshot(IntEnum):
    """How bytes leave a GPU, after LightCheck's three variants (C, D and G), and come back."""

    HOST = lib.LCKPT_HOST  # through pinned staging
    DIRECT = lib.LCKPT_DIRECT  # copy engines reach the store itself
    DEVICE = lib.LCKPT_DEVICE  # aside on the GPU first


FLUSH_METHODS = ("none", "clflush", "clflushopt", "clwb", "msync")


class Info(NamedTuple):
    """Facts of an open store; sizes in bytes, ``commit_ns`` in nanoseconds."""

    store_id: int
    bytes: int
    free_bytes: int
    media: Media
    granularity: Granularity
    emulated: bool
    slots: int
    workers: int
    flush_method: str
    catalog: Catalog
    commits: int
    drops: int
    bytes_persisted: int
    commit_ns: int


class Version(NamedTuple):
    """A version that can be loaded now. ``pinned``: 0 no, 1 by this process, 2 by a reader."""

    version: int
    step: int
    generation: int
    slot: int
    pinned: int
    damaged: int
    record_bytes: int
    manifest_bytes: int
    extent_count: int
    area_bytes: int


class Report(NamedTuple):
    """What a batch did. Times are CLOCK_MONOTONIC nanoseconds; ``end_ns`` is 0 until it is done.

    ``in_place``: copy engines reached the store; else it went through staging, or from the host.
    """

    bytes: int
    submit_ns: int
    start_ns: int
    end_ns: int
    bad_count: int
    bad: tuple[int, ...]
    in_place: bool


class Device(NamedTuple):
    """A GPU as a store sees it. ``driver`` 12040 is CUDA 12.4; ``why_not`` is empty if direct."""

    name: str
    driver: int
    direct: bool
    staging_bytes: int
    why_not: str


def _check(code: int) -> None:
    if code != lib.LCKPT_OK:
        message = ffi.string(lib.lckpt_errmsg()).decode(errors="replace")
        raise _ERROR_TYPES.get(code, errors.CheckpointError)(message)


def make_spans(pairs: Sequence[tuple[int, int]]) -> Any:
    """Build a span array from ``(address, extent)`` pairs; the address is 0 where none is used."""
    spans = ffi.new("lckpt_span[]", len(pairs))
    for span, (address, extent) in zip(spans, pairs, strict=True):
        span.memory = ffi.cast("void *", address)
        span.extent = extent
    return spans


def set_address(spans: Any, index: int, address: int) -> None:
    """Point span *index* of an array from :func:`make_spans` at *address*."""
    spans[index].memory = ffi.cast("void *", address)


def calibrate(size_bytes: int, workers: int = 0) -> int:
    """Return the nanoseconds of one plain copy of *size_bytes* into warm memory by *workers*."""
    nanoseconds = ffi.new("uint64_t *")
    _check(lib.lckpt_calibrate(size_bytes, workers, nanoseconds))
    return int(nanoseconds[0])


class Store:
    """An open store and its workers; closed on exit from its ``with`` block.

    The buffers that it gives away (:meth:`view`, :meth:`locate`) end with it: touching one raises
    ``ValueError`` once the store is closed, or has lost its last name. What was made from one, an
    array or a part of it, stays mapped for as long as it is there; but nothing pins the version any
    more, so another one may come to lie in that memory.

    Args:
        path: the store's file, or a device DAX node.
        create: make a new store where nothing is; opening never formats otherwise.
        read_only: take no writer's lock and change nothing.
        media: what to open it as.
        workers: copying threads; 0 takes one per usable core, at most 8.
        slots: versions a new store can name at once, 4 to 64; 0 takes 64.
        catalog: where a new store's slots and manifests are to be; an older one must be as is said.
        size_bytes: size of a new store; 0 starts small and grows.
        staging_bytes: pinned memory between each GPU and the workers; 0 takes 128 MiB.

    Raises:
        NotFoundError, NoSpaceError, BusyError, FormatError, AccessError: as named.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        read_only: bool = False,
        media: Media = Media.AUTO,
        workers: int = 0,
        slots: int = 0,
        catalog: Catalog = Catalog.AUTO,
        size_bytes: int = 0,
        staging_bytes: int = 0,
    ) -> None:
        options = ffi.new("lckpt_options *")
        options.flags = (lib.LCKPT_CREATE if create else 0) | (
            lib.LCKPT_READ_ONLY if read_only else 0
        )
        options.media, options.workers = int(media), workers
        options.slots, options.bytes, options.catalog = slots, size_bytes, int(catalog)
        self._staging_bytes = staging_bytes
        self._lease: dict[str, Lease] = {}  # one, or none: changed in single steps of a dict
        self._handle = ffi.new("lckpt_store **")
        encoded = os.fsencode(path)
        if b"\0" in encoded:
            raise ValueError(f"the path {path!r} has a null byte in it")
        _check(lib.lckpt_open(encoded, options, self._handle))

    @property
    def closed(self) -> bool:
        return bool(self._handle[0] == ffi.NULL)

    def info(self) -> Info:
        raw = ffi.new("lckpt_info *")
        _check(lib.lckpt_stat(self._handle[0], raw))
        return Info(
            raw.store_id, raw.bytes, raw.free_bytes, Media(raw.media), Granularity(raw.granularity),
            bool(raw.emulated), raw.slots, raw.workers, FLUSH_METHODS[raw.flush_method],
            Catalog(raw.catalog), raw.commits, raw.drops, raw.bytes_persisted, raw.commit_ns,
        )  # fmt: skip

    def versions(self) -> list[Version]:
        """Return the versions that can be loaded now, newest first."""
        raw, count = ffi.new("lckpt_version[64]"), ffi.new("uint32_t *")
        _check(lib.lckpt_versions(self._handle[0], raw, 64, count))
        return [Version(*(getattr(v, name) for name in Version._fields)) for v in raw[0 : count[0]]]

    def view(self, version: int) -> tuple[memoryview, memoryview]:
        """Return the manifest blob and the host state of *version*, both verified, as mapped.

        They borrow the media until the version is retired; pin it, or copy them.
        """
        manifest, host = ffi.new("void const **"), ffi.new("void const **")
        manifest_bytes, host_bytes = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        _check(lib.lckpt_view(self._handle[0], version, manifest, manifest_bytes, host, host_bytes))
        return (
            self._lend(manifest[0], manifest_bytes[0], read_only=True),
            self._lend(host[0], host_bytes[0], read_only=True),
        )

    def locate(self, version: int, extent: int) -> memoryview:
        """Return extent *extent* of *version* as a buffer over the mapping; pin it first.

        On a read-only store the mapping is private: writing to it changes this process's copy only.
        """
        memory, size = ffi.new("void **"), ffi.new("uint64_t *")
        _check(lib.lckpt_locate(self._handle[0], version, extent, memory, size))
        return self._lend(memory[0], size[0], read_only=False)

    def _lend(self, memory: Any, size: int, *, read_only: bool) -> memoryview:
        lease = self._lease.get("")
        if lease is None:
            raw = ffi.new("lckpt_lease **")
            _check(lib.lckpt_hold(self._handle[0], raw))
            # Of two threads that are the first, one has made a lease for nothing.
            lease = self._lease.setdefault("", Lease(ffi.gc(raw, lib.lckpt_let_go)))
        # Whoever holds the pointer holds the function, and so the lease.
        buffer = ffi.buffer(ffi.gc(memory, lambda _: lease), size)
        return lease.lend(buffer, read_only=read_only)

    def pin(self, version: int, *, pinned: bool = True) -> None:
        """Keep *version* from being retired while this process lives, or stop doing so."""
        _check(lib.lckpt_pin(self._handle[0], version, pinned))

    def rebase(self, version: int) -> None:
        """Make *version* the latest, in a new generation; the newer ones are retired."""
        _check(lib.lckpt_rebase(self._handle[0], version))

    def begin(self, *, step: int, keep: int, extents: Any, blob: bytes, host_bytes: int) -> None:
        """Start an attempt. *extents* is a ``uint64_t[]`` of sizes, from :func:`make_sizes`."""
        _check(
            lib.lckpt_begin(
                self._handle[0], step, keep, extents, len(extents), ffi.from_buffer(blob),
                len(blob), host_bytes,
            )
        )  # fmt: skip

    def submit(self, op: Op, spans: Any, *, version: int = 0, count: int | None = None) -> int:
        """Queue a batch over *spans* and return its number; 0 as *version*: the attempt."""
        batch = ffi.new("uint64_t *")
        number = len(spans) if count is None else count
        _check(lib.lckpt_submit(self._handle[0], int(op), version, spans, number, batch))
        return int(batch[0])

    def open_device(self, ordinal: int) -> Device:
        """Make GPU *ordinal* ready, and say whether its copy engines reach the store.

        Raises:
            NotFoundError: there is no CUDA driver, or no such device.
        """
        raw = ffi.new("lckpt_device *")
        _check(lib.lckpt_open_device(self._handle[0], ordinal, self._staging_bytes, raw))
        texts = (raw.name, raw.why_not)
        name, why_not = (ffi.string(text).decode(errors="replace") for text in texts)
        return Device(name, raw.driver, bool(raw.direct), raw.staging_bytes, why_not)

    def submit_on(
        self,
        ordinal: int,
        stream: int,
        how: Snapshot,
        op: Op,
        spans: Any,
        *,
        version: int = 0,
    ) -> int:
        """Queue a batch over *spans* of a GPU's memory, after all that *stream* has been given.

        Raises:
            BusyError: the stream captures a CUDA graph.
            MediaError: CUDA refused; or *how* is direct, and the store is not within its reach.
            NoSpaceError: *how* is device, and there is no room on it.
        """
        batch = ffi.new("uint64_t *")
        on = ffi.new("lckpt_on_device *", (ordinal, int(how), stream))
        _check(lib.lckpt_submit_on(self._handle[0], on, int(op), version, spans, len(spans), batch))
        return int(batch[0])

    def stream_wait(self, batch: int, stream: int, timeout: float) -> None:
        """Let what *stream* is given from now on come after the copies of *batch*.

        Waits on the host only for a batch larger than its staging, until its last piece has been
        given to the GPU.

        Raises:
            WaitTimeoutError: not within *timeout* seconds.
        """
        _check(lib.lckpt_stream_wait(self._handle[0], batch, stream, max(0, int(timeout * 1e9))))

    def wait(self, batch: int, timeout: float | None = None) -> Report:
        """Wait until *batch* is done and return what it did.

        Raises:
            WaitTimeoutError: not done within *timeout* seconds (0 polls).
            MediaError: the batch, or an earlier one, met a media failure.
        """
        raw = ffi.new("lckpt_report *")
        nanoseconds = -1 if timeout is None else max(0, int(timeout * 1e9))
        code = lib.lckpt_wait(self._handle[0], batch, nanoseconds, raw)
        if code != lib.LCKPT_E_CHANGED or not raw.bad_count:
            _check(code)
        bad = tuple(raw.bad[0 : min(raw.bad_count, len(raw.bad))])
        return Report(
            raw.bytes, raw.submit_ns, raw.start_ns, raw.end_ns, raw.bad_count, bad,
            bool(raw.in_place),
        )  # fmt: skip

    def progress(self, batch: int) -> Report | None:
        """Return the report of *batch* if it is done, else None; never waits."""
        try:
            return self.wait(batch, 0)
        except errors.WaitTimeoutError:
            return None

    def commit(self, host: bytes) -> int:
        """Queue the commit of the attempt with its host state; the batch is done when durable."""
        batch = ffi.new("uint64_t *")
        _check(lib.lckpt_commit(self._handle[0], ffi.from_buffer(host), len(host), batch))
        return int(batch[0])

    def drop(self, timeout: float = 10.0) -> None:
        """Give the attempt up.

        Raises:
            WaitTimeoutError: a worker has not left it yet; the next ``begin`` looks again.
        """
        _check(lib.lckpt_drop(self._handle[0], int(timeout * 1e9)))

    def close(self) -> None:
        """Stop the workers and release the store; an attempt in flight is dropped."""
        if lease := self._lease.pop("", None):
            lease.end()
        _check(lib.lckpt_close(self._handle))

    def __del__(self) -> None:
        # Whoever forgot to close must not leave threads and a lock behind.
        if hasattr(self, "_handle") and lib is not None:
            self.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def make_sizes(sizes: Sequence[int]) -> Any:
    """Build the ``uint64_t[]`` of extent sizes that :meth:`Store.begin` takes."""
    return ffi.new("uint64_t[]", list(sizes))
