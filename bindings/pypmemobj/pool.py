"""Pool: create, open, check and close a pool of libpmemobj, and find what is in it.

Whether bytes are made durable by cache flushes or by msync is decided by libpmemobj, which looks at
where the file lies: on DAX the former, elsewhere the latter. On tmpfs nothing outlives a boot.

Opening undoes what a killed process left half done. A pool is open once at a time on a machine: its
file is locked with it, until it is closed, and for as long as a child that was forked meanwhile
lives.

Threads: any may use a pool; transactions are per thread; closing is for when no other thread uses
the pool. In a child of fork() a pool is inert: closing does nothing, all else raises.
"""

import errno
import os
import stat
from collections.abc import Iterator
from types import TracebackType

from ._handle import Handle
from ._library import Oid, load
from .errors import PoolError, UsageError
from .objects import Object
from .transaction import Transaction

SIZE_MIN = 8 << 20  # bytes of the smallest pool
LAYOUT_BYTES_MAX = 1023
_POOLSET = b"PMEMPOOLSET"  # a text file that begins so lists the files of one pool

Path = str | os.PathLike[str]


class Pool:
    """An open pool, made by :meth:`create` or :meth:`open`; a ``with`` block closes it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @classmethod
    def create(
        cls,
        path: Path,
        layout: str,
        size_bytes: int,
        mode: int = 0o600,
        *,
        shutdown_state: bool | None = None,
    ) -> "Pool":
        """Make a pool where no file is, take all of its space, and open it.

        A process that is killed on the way leaves a file that cannot be opened.

        Args:
            layout: a name for what the pool holds, up to 1023 bytes; opening may ask for it.
            size_bytes: of the file, from ``SIZE_MIN`` on, about half of which is the library's
                in the smallest.
            mode: of the file.
            shutdown_state: keep what tells an unsafe shutdown of the memory's hardware; None as
                libpmemobj is set. PMDK from 2.1 on makes no pool on a file system without DAX
                unless this is False, or off in ``PMEMOBJ_CONF``.

        Raises:
            PoolExistsError, PoolAccessError, PoolNotFoundError: as named; of the last, the folder.
            OutOfSpaceError: the file system is full.
            PoolError: libpmemobj refused.
            ValueError: an argument is out of range.
            LibraryNotFoundError: libpmemobj is not installed.
        """
        if not SIZE_MIN <= size_bytes < 1 << 63:
            raise ValueError(f"size_bytes is {size_bytes}; the smallest pool has {SIZE_MIN}")
        library, name = load(), _layout(layout)
        with library.shutdown_state(shutdown_state):
            pool = library.create(os.fsencode(path), name, size_bytes, mode)
        return cls(Handle(library, pool, os.fsdecode(path)))

    @classmethod
    def open(cls, path: Path, layout: str | None = None) -> "Pool":
        """Open a pool, undoing transactions that did not end.

        Args:
            layout: what it must have been made with; None takes any.

        Raises:
            PoolNotFoundError, PoolAccessError, PoolBusyError: as named.
            PoolError: another layout, or no pool, or a damaged one.
            ValueError: *layout* is too long.
            LibraryNotFoundError: libpmemobj is not installed.
        """
        library, name = load(), None if layout is None else _layout(layout)
        _refuse_stump(path)
        pool = library.open(os.fsencode(path), name)
        return cls(Handle(library, pool, os.fsdecode(path)))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, as :meth:`close`; an exception that is on its way is not replaced by another.

        The frames that it keeps may hold arrays over views: the pool closes when they go.
        """
        try:
            self.close()
        except UsageError as error:
            if value is None:
                raise
            value.add_note(f"pypmemobj: {error}")

    @property
    def path(self) -> str:
        return self._handle.path

    @property
    def uuid(self) -> int:
        """The number that names the pool in an :class:`Oid`."""
        return self._handle.uuid

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def close(self) -> None:
        """Release all views and close the pool; once more is harmless.

        Raises:
            TransactionError: a transaction is open.
            ViewsAliveError: an array, a cast or a slice of a view is in use. The pool stays open.
        """
        self._handle.close()

    def transaction(self) -> Transaction:
        """Return a transaction for a ``with`` block."""
        self._handle.pool()
        return Transaction(self._handle)

    def root(self, size_bytes: int = 0) -> Object:
        """Return the root object, which is made, zeroed, or enlarged to have *size_bytes*.

        It does not shrink: the size of what is returned may be larger. Enlarged, it may move, and
        views of it show the old place. Neither is part of a transaction.

        Raises:
            ValueError: there is none, and *size_bytes* is 0; or that is negative.
            OutOfSpaceError: no room.
            ClosedError, ForkedError: the pool cannot be used.
        """
        pool, library = self._handle.pool(), self._handle.library
        if not 0 <= size_bytes < 1 << 63:
            raise ValueError(f"size_bytes is {size_bytes}")
        if size_bytes == 0 and library.root_size(pool) == 0:
            raise ValueError(f"{self.path} has no root yet; size_bytes must be 1 or more")
        oid = library.root(pool, size_bytes)
        return Object(self._handle, oid, library.root_size(pool), is_root=True)

    def object(self, oid: Oid | int, size_bytes: int | None = None) -> Object:
        """Return the object that *oid* names, or that lies at that offset.

        It must be one that is allocated: of another offset within the pool nothing is known, and
        what is read, or freed, is whatever lies there.

        Args:
            size_bytes: as it was allocated with; None takes all that it has room for.

        Raises:
            ValueError: it names nothing of this pool, or has no room for *size_bytes*.
            ClosedError, ForkedError: the pool cannot be used.
        """
        name = oid if isinstance(oid, Oid) else Oid(self.uuid, oid)
        if name.pool_uuid != self.uuid or not self._handle.holds(name.offset, 1):
            raise ValueError(f"{name} is not within {self.path}, whose uuid is {self.uuid}")
        usable = self._handle.library.usable_size(name)
        size = usable if size_bytes is None else size_bytes
        if not (1 <= size <= usable and self._handle.holds(name.offset, size)):
            raise ValueError(f"{name} has room for {usable} bytes, and {size} are asked for")
        pool, library = self._handle.pool(), self._handle.library
        is_root = library.root_size(pool) > 0 and library.root(pool, 0) == name
        return Object(self._handle, name, size, is_root=is_root)

    def objects(self, type_number: int | None = None) -> Iterator[Object]:
        """Yield the objects with *type_number*, or all of them; not the root.

        The order is libpmemobj's. The object that was yielded last may be freed; other changes
        meanwhile, by any thread, may be missed, and must not free the one that comes next.

        Raises:
            ClosedError, ForkedError: the pool cannot be used.
        """
        library = self._handle.library
        oid = library.first(self._handle.pool())
        while oid is not None:
            self._handle.pool()
            following = library.next(oid)
            if type_number is None or library.type_number(oid) == type_number:
                yield Object(self._handle, oid, library.usable_size(oid))
            oid = following


def check(path: Path, layout: str | None = None) -> bool:
    """Return whether the pool is consistent, without changing it; it must not be open.

    Raises:
        PoolNotFoundError, PoolAccessError, PoolBusyError: as named.
        PoolError: another layout, or no pool.
        ValueError: *layout* is too long.
        LibraryNotFoundError: libpmemobj is not installed.
    """
    library, name = load(), None if layout is None else _layout(layout)
    _refuse_stump(path)
    return library.check(os.fsencode(path), name)


def _refuse_stump(path: Path) -> None:
    """Raise if a file is too small for a pool.

    libpmemobj would die of a signal: on an empty file, and on a pool cut short to where its first
    structures end.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size >= SIZE_MIN:
            return
        with open(path, "rb") as file:
            if file.read(len(_POOLSET)) == _POOLSET:
                return
    except OSError:
        return  # libpmemobj finds it out as well, and says so in its own words
    reason = f"{status.st_size} bytes are no pool; the smallest has {SIZE_MIN}"
    raise PoolError(os.fsdecode(path), errno.EINVAL, reason)


def _layout(layout: str) -> bytes:
    name = layout.encode()
    if len(name) > LAYOUT_BYTES_MAX or b"\0" in name:
        raise ValueError(f"layout has {len(name)} bytes; up to {LAYOUT_BYTES_MAX}, none of them 0")
    return name
