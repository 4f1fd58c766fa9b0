"""libpmemobj.so.1, opened at run time: its calls with Python's types, its failures as exceptions.

Nothing of PMDK is needed to build or to import. The declarations are of the part of the interface
that PMDK 1.12 to 2.1 have alike, written from its manual pages: no setjmp (transactions begin with
no jump buffer, so a failing call returns, with the transaction rolled back), no pmemlog, no
pmemblk. No setting of libpmemobj is changed here, but for one that a caller asks for by name.

Every call runs without the GIL. errno and libpmemobj's message are per thread, and are read right
after the call that failed. What must hold before a call (the thread's stage, live objects) is up
to the callers: libpmemobj stops the process where it does not.
"""

import errno
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import cffi

from .errors import LibraryNotFoundError, pool_error

SONAME = "libpmemobj.so.1"
VERSION = (2, 4)  # of libpmemobj's interface: PMDK 1.12 has it
_PARAM_NONE = 0  # ends the list of locks that a transaction begins with

# typing.Any: cffi has no types for what C points at.
Pool: TypeAlias = Any
Memory: TypeAlias = Any

_DECLARATIONS = """
typedef struct pmemobjpool PMEMobjpool;
typedef struct { uint64_t pool_uuid_lo; uint64_t off; } PMEMoid;

const char *pmemobj_check_version(unsigned major_required, unsigned minor_required);
const char *pmemobj_errormsg(void);
int pmemobj_ctl_get(PMEMobjpool *pop, const char *name, void *arg);
int pmemobj_ctl_set(PMEMobjpool *pop, const char *name, void *arg);

PMEMobjpool *pmemobj_create(const char *path, const char *layout, size_t size, unsigned mode);
PMEMobjpool *pmemobj_open(const char *path, const char *layout);
int pmemobj_check(const char *path, const char *layout);
void pmemobj_close(PMEMobjpool *pop);

PMEMoid pmemobj_root(PMEMobjpool *pop, size_t size);
size_t pmemobj_root_size(PMEMobjpool *pop);
PMEMoid pmemobj_oid(const void *address);
PMEMobjpool *pmemobj_pool_by_ptr(const void *address);
PMEMoid pmemobj_first(PMEMobjpool *pop);
PMEMoid pmemobj_next(PMEMoid oid);
size_t pmemobj_alloc_usable_size(PMEMoid oid);
uint64_t pmemobj_type_num(PMEMoid oid);

void pmemobj_persist(PMEMobjpool *pop, const void *address, size_t size);
void *pmemobj_memcpy_persist(PMEMobjpool *pop, void *target, const void *source, size_t size);

int pmemobj_tx_begin(PMEMobjpool *pop, void *jump_buffer, ...);
void pmemobj_tx_commit(void);
void pmemobj_tx_abort(int number);
int pmemobj_tx_end(void);
int pmemobj_tx_stage(void);
int pmemobj_tx_add_range(PMEMoid oid, uint64_t offset, size_t size);
PMEMoid pmemobj_tx_alloc(size_t size, uint64_t type_number);
PMEMoid pmemobj_tx_zalloc(size_t size, uint64_t type_number);
int pmemobj_tx_free(PMEMoid oid);
"""


class Oid(NamedTuple):
    """Names an object for good: its pool's number, and where in the pool it lies, in bytes."""

    pool_uuid: int
    offset: int


class Stage(IntEnum):
    """Where the calling thread is in its transaction."""

    NONE = 0
    WORK = 1
    ON_COMMIT = 2
    ON_ABORT = 3
    FINALLY = 4


class Library:
    """The library, open. Any thread may call; see :func:`load`."""

    def __init__(self, name: str) -> None:
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DECLARATIONS)
        try:
            self._lib: Any = self._ffi.dlopen(name)
        except OSError as error:
            message = f"{name} cannot be opened: install libpmemobj1 ({error})"
            raise LibraryNotFoundError(message) from error
        if lacking := self._lib.pmemobj_check_version(*VERSION):
            message = f"{name} is not of PMDK 1.12 or later: {self._text(lacking)}"
            raise LibraryNotFoundError(message)
        self._settings = threading.Lock()

    def _text(self, characters: Any) -> str:
        raw: bytes = self._ffi.string(characters) if characters else b""
        return raw.decode(errors="replace")

    def _oid(self, oid: Oid) -> Any:
        return self._ffi.new("PMEMoid *", tuple(oid))[0]

    def _fail(self, doing: str, number: int = 0) -> Exception:
        """Return the exception for the call that has just failed in this thread."""
        number = number or self._ffi.errno
        return pool_error(doing, number, self._text(self._lib.pmemobj_errormsg()))

    # Pools.

    def create(self, path: bytes, layout: bytes, size_bytes: int, mode: int) -> Pool:
        pool = self._lib.pmemobj_create(path, layout, size_bytes, mode)
        if not pool:
            raise self._fail(os.fsdecode(path))
        return pool

    def open(self, path: bytes, layout: bytes | None) -> Pool:
        pool = self._lib.pmemobj_open(path, layout or self._ffi.NULL)
        if not pool:
            raise self._fail(os.fsdecode(path))
        return pool

    def check(self, path: bytes, layout: bytes | None) -> bool:
        consistent: int = self._lib.pmemobj_check(path, layout or self._ffi.NULL)
        if consistent < 0:
            raise self._fail(os.fsdecode(path))
        return consistent == 1

    def close(self, pool: Pool) -> None:
        self._lib.pmemobj_close(pool)

    def uuid(self, pool: Pool) -> int:
        return int(self._lib.pmemobj_oid(pool).pool_uuid_lo)

    @contextmanager
    def shutdown_state(self, wanted: bool | None) -> Iterator[None]:
        """Create pools with the shutdown state or without; None: as libpmemobj is set.

        The setting is the process's, so such blocks take turns.
        """
        if wanted is None:
            yield
            return
        name, before = b"sds.at_create", self._ffi.new("int *")
        with self._settings:
            if self._lib.pmemobj_ctl_get(self._ffi.NULL, name, before):
                raise self._fail("read sds.at_create")
            self._set(name, int(wanted))
            try:
                yield
            finally:
                self._set(name, before[0])

    def _set(self, name: bytes, value: int) -> None:
        if self._lib.pmemobj_ctl_set(self._ffi.NULL, name, self._ffi.new("int *", value)):
            raise self._fail(f"set {name.decode()}")

    # Objects.

    def root(self, pool: Pool, size_bytes: int) -> Oid:
        oid = self._lib.pmemobj_root(pool, size_bytes)
        if not oid.off:
            raise self._fail("root")
        return Oid(oid.pool_uuid_lo, oid.off)

    def root_size(self, pool: Pool) -> int:
        return int(self._lib.pmemobj_root_size(pool))

    def holds(self, pool: Pool, offset: int) -> bool:
        """Does byte *offset* lie within *pool*?"""
        return bool(self._lib.pmemobj_pool_by_ptr(self.memory(pool, offset)) == pool)

    def usable_size(self, oid: Oid) -> int:
        return int(self._lib.pmemobj_alloc_usable_size(self._oid(oid)))

    def type_number(self, oid: Oid) -> int:
        return int(self._lib.pmemobj_type_num(self._oid(oid)))

    def first(self, pool: Pool) -> Oid | None:
        oid = self._lib.pmemobj_first(pool)
        return Oid(oid.pool_uuid_lo, oid.off) if oid.off else None

    def next(self, oid: Oid) -> Oid | None:
        found = self._lib.pmemobj_next(self._oid(oid))
        return Oid(found.pool_uuid_lo, found.off) if found.off else None

    # Bytes.

    def memory(self, pool: Pool, offset: int) -> Memory:
        return self._ffi.cast("char *", int(self._ffi.cast("uintptr_t", pool)) + offset)

    def buffer(self, memory: Memory, size_bytes: int, when_gone: Any) -> Any:
        """Return a writable buffer; *when_gone* is called once nothing refers to it any more."""
        return self._ffi.buffer(self._ffi.gc(memory, when_gone), size_bytes)

    def persist(self, pool: Pool, memory: Memory, size_bytes: int) -> None:
        self._lib.pmemobj_persist(pool, memory, size_bytes)

    def copy(self, pool: Pool, target: Memory, source: bytes | bytearray | memoryview) -> None:
        with self._ffi.from_buffer(source) as memory:
            self._lib.pmemobj_memcpy_persist(pool, target, memory, len(memory))

    # The calling thread's transaction.

    def stage(self) -> Stage:
        return Stage(self._lib.pmemobj_tx_stage())

    def begin(self, pool: Pool) -> None:
        # What follows a fixed argument list must be a cdata, which tells cffi its C type.
        nothing = self._ffi.cast("int", _PARAM_NONE)
        if number := self._lib.pmemobj_tx_begin(pool, self._ffi.NULL, nothing):
            error = self._fail("begin a transaction", number)
            if self.stage() is Stage.ON_ABORT:
                self._lib.pmemobj_tx_end()
            raise error

    def commit(self) -> None:
        self._lib.pmemobj_tx_commit()

    def abort(self) -> None:
        self._lib.pmemobj_tx_abort(errno.ECANCELED)

    def end(self) -> int:
        """End the innermost transaction; return the errno that it was rolled back with, or 0."""
        return int(self._lib.pmemobj_tx_end())

    def add(self, oid: Oid, offset: int, size_bytes: int) -> None:
        if number := self._lib.pmemobj_tx_add_range(self._oid(oid), offset, size_bytes):
            raise self._fail(f"add {size_bytes} bytes", number)

    def alloc(self, size_bytes: int, type_number: int, *, zero: bool) -> Oid:
        call = self._lib.pmemobj_tx_zalloc if zero else self._lib.pmemobj_tx_alloc
        oid = call(size_bytes, type_number)
        if not oid.off:
            raise self._fail(f"allocate {size_bytes} bytes")
        return Oid(oid.pool_uuid_lo, oid.off)

    def free(self, oid: Oid) -> None:
        if number := self._lib.pmemobj_tx_free(self._oid(oid)):
            raise self._fail(f"free the object at {oid.offset}", number)


@functools.cache
def load(name: str = SONAME) -> Library:
    """Open libpmemobj, at the first call.

    Raises:
        LibraryNotFoundError: it is not installed, or older than PMDK 1.12.
    """
    return Library(name)
