"""Transaction: changes of a pool that happen all or not at all, across exceptions and kills.

    with pool.transaction() as change:
        change.add(root)            # remember these bytes, before they are written
        root.view("Q")[0] = 7
        change.free(old)

Leaving the block commits; an exception that leaves it rolls back, and goes on. Rolled back are
allocations, frees, and the ranges that were added. What was written elsewhere stays, and is not
flushed by the commit either.

A transaction belongs to the thread that began it, and a thread can have one of one pool at a time,
since libpmemobj keeps both per thread. Nested blocks are parts of the outermost: nothing is durable
before that has ended, and when a nested one is rolled back, so is the whole, whether or not its
exception goes on. A call that libpmemobj refuses rolls back at once.

A signal handler that raises within the block rolls back; so it does while the transaction begins or
ends, unless that has been committed. One instant is out of reach: after the last line of the block,
before the first of __exit__. What is open then is not committed, and keeps the pool from closing.
"""

import threading
from enum import Enum
from types import TracebackType

from ._handle import Handle
from ._library import Stage
from .errors import ForkedError, RolledBackError, TransactionError, WrongThreadError
from .objects import Object

_SIZE_MAX = (1 << 63) - 1
_TYPE_MAX = (1 << 64) - 1


class _State(Enum):
    NEW = "has not begun"
    OPEN = "is open"
    ENDED = "has ended"


class Transaction:
    """A transaction, which begins with the ``with`` block; made by :meth:`Pool.transaction`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._state = _State.NEW
        self._thread = 0
        self._freed: set[int] = set()  # the outermost's serves all

    def __enter__(self) -> "Transaction":
        """Begin.

        Raises:
            TransactionError: it was begun before; or this thread is in a transaction of another
                pool; or in one that was rolled back.
            ClosedError, ForkedError: the pool cannot be used.
        """
        handle, library = self._handle, self._handle.library
        pool, stack = handle.pool(), handle.stack()
        if self._state is not _State.NEW:
            raise TransactionError(f"the transaction {self._state.value}; each runs once")
        stage = library.stage()
        if stack and stage is not Stage.WORK:
            raise RolledBackError("the transaction around this one has been rolled back")
        if not stack and stage is not Stage.NONE:
            raise TransactionError("this thread is in a transaction of another pool")
        try:
            self._thread, self._state = threading.get_ident(), _State.OPEN
            self._freed = stack[0]._freed if stack else set()
            stack.append(self)
            handle.transactions.add(self)
            library.begin(pool)
        except BaseException:
            # Of a signal's exception it is not known whether it came before or after the call.
            self._forget()
            self._end_rest()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit, or after an exception roll back.

        Raises:
            RolledBackError: the block has ended well, but what it did has been rolled back: a
                call or a nested block failed, and the block went on.
            WrongThreadError, ForkedError: the block was left elsewhere; nothing has been done.
        """
        if self._handle.forked and value is not None:
            return  # a child does nothing, and its exception says more than one of ours
        self._check_place()
        stack = self._handle.stack()
        orphaned = stack[stack.index(self) + 1 :]
        for nested in reversed(orphaned):
            nested._end(commit=False)
        number = self._end(commit=value is None and not orphaned)
        if value is not None:
            return
        if orphaned:
            raise TransactionError(
                f"{len(orphaned)} nested transactions were open at the end of this one; all of "
                "them have been rolled back"
            )
        if number:
            raise RolledBackError(
                f"rolled back with errno {number}, as a call in the transaction had failed"
            )

    def _end(self, *, commit: bool) -> int:
        """End the innermost transaction, which this is; return the errno of a rollback."""
        library, number = self._handle.library, 0
        try:
            # In any other stage a call has failed, and libpmemobj has rolled back.
            if commit and library.stage() is Stage.WORK:
                library.commit()
        finally:
            try:
                if library.stage() is Stage.WORK:
                    library.abort()
                number = library.end()
            finally:
                self._forget()
                number = self._end_rest() or number
        return number

    def _end_rest(self) -> int:
        """Roll back what is open in this thread although no block is; return the errno, or 0.

        That is what a signal's exception has kept from being ended, or from being known here.
        """
        library, number = self._handle.library, 0
        while not self._handle.stack() and library.stage() is not Stage.NONE:
            if library.stage() is Stage.WORK:
                library.abort()
            number = library.end()
        return number

    def _forget(self) -> None:
        stack = self._handle.stack()
        if self in stack:
            stack.remove(self)
        self._handle.transactions.discard(self)
        self._state = _State.ENDED

    def _check_place(self) -> None:
        """Raise unless it is open here: in this process and this thread."""
        if self._state is not _State.OPEN:
            raise TransactionError(f"the transaction {self._state.value}")
        if self._handle.forked:
            raise ForkedError("the transaction is the parent's; a child may not use it")
        if self._thread != threading.get_ident():
            raise WrongThreadError(
                f"the transaction is of thread {self._thread}, and this is "
                f"{threading.get_ident()}: each thread begins its own"
            )

    def _check(self, *objects: Object) -> None:
        """Raise unless it can be used, and on *objects*."""
        self._check_place()
        if self._handle.library.stage() is not Stage.WORK:
            raise RolledBackError("the transaction has been rolled back; leave its block")
        for thing in objects:
            if not thing.belongs_to(self._handle):
                raise ValueError(f"{thing!r} is not of this transaction's pool")
            if thing.oid.offset in self._freed:
                raise ValueError(f"{thing!r} has been freed by this transaction")

    def add(self, thing: Object, offset: int = 0, size_bytes: int | None = None) -> None:
        """Remember *size_bytes* at *offset* of *thing*, or all from there, to be put back.

        Do so before they are written. An object that this transaction has allocated needs it not.

        Raises:
            OutOfSpaceError: no room for the copy; the transaction has been rolled back.
            PoolError: libpmemobj refused; the transaction has been rolled back.
            ValueError: the range is not within the object, or that is not to be used here.
            TransactionError, WrongThreadError, ForkedError: the transaction cannot be used.
        """
        self._check(thing)
        if size := thing.check_range(offset, size_bytes):
            self._handle.library.add(thing.oid, offset, size)

    def alloc(self, size_bytes: int, type_number: int = 0) -> Object:
        """Allocate an object with any bytes in it, which the commit makes durable.

        Args:
            size_bytes: from 1 on; libpmemobj ends at just below 16 GiB.
            type_number: of your choice, 64 bits; iteration goes by it.

        Raises:
            OutOfSpaceError: no room, or too large; the transaction has been rolled back.
            ValueError: an argument is out of range.
            TransactionError, WrongThreadError, ForkedError: the transaction cannot be used.
        """
        return self._allocate(size_bytes, type_number, zero=False)

    def zalloc(self, size_bytes: int, type_number: int = 0) -> Object:
        """Allocate an object with zeros in it; otherwise as :meth:`alloc`."""
        return self._allocate(size_bytes, type_number, zero=True)

    def _allocate(self, size_bytes: int, type_number: int, *, zero: bool) -> Object:
        self._check()
        if not 1 <= size_bytes <= _SIZE_MAX:
            raise ValueError(f"size_bytes is {size_bytes}; it must be 1 to {_SIZE_MAX}")
        if not 0 <= type_number <= _TYPE_MAX:
            raise ValueError(f"type_number is {type_number}; it must be 0 to {_TYPE_MAX}")
        oid = self._handle.library.alloc(size_bytes, type_number, zero=zero)
        self._freed.discard(oid.offset)
        return Object(self._handle, oid, size_bytes)

    def free(self, thing: Object) -> None:
        """Free *thing* when the outermost transaction commits.

        An object that was freed by an earlier transaction must not be freed again: libpmemobj
        does not notice, and the pool is damaged.

        Raises:
            ValueError: it is the root, or of another pool, or freed by this transaction before.
            PoolError: libpmemobj refused; the transaction has been rolled back.
            TransactionError, WrongThreadError, ForkedError: the transaction cannot be used.
        """
        self._check(thing)
        if thing.is_root:
            raise ValueError("the root cannot be freed")
        self._handle.library.free(thing.oid)
        self._freed.add(thing.oid.offset)
