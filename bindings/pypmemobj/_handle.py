"""Handle: a pool that this process has open, and everything that keeps it from being closed.

    1. Memory of the pool is handed out as views only, and the pool stays mapped while one is
       alive: a view, what was cast or sliced from it, an array over it. So no view ever points at
       memory that is gone. A view keeps the pool alive as well.
    2. The pool is closed neither under an open transaction nor twice.
    3. A child of fork() closes nothing and calls nothing. Its copy of the mapping is shared with
       the parent all the same: it must not write through views that it inherited.

Threads: any may call, but for ``close``, which is for when no other thread uses the pool.
"""

import functools
import itertools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from ._library import Library, Memory, Pool
from .errors import ClosedError, ForkedError, TransactionError, ViewsAliveError

if TYPE_CHECKING:
    from .transaction import Transaction


class Handle:
    """Owns *pool*, which has just been opened by this process."""

    def __init__(self, library: Library, pool: Pool, path: str) -> None:
        self.library, self.path = library, path
        self.uuid = library.uuid(pool)
        self.transactions: set[Transaction] = set()  # open ones, of all threads
        self._pool: Pool = pool
        self._pid = os.getpid()
        self._threads = threading.local()
        self._keys = itertools.count()
        # A key is here while anything refers to what the view was made of; the weak reference is
        # to the view itself, which may be gone when casts of it are not.
        self._views: dict[int, weakref.ref[memoryview]] = {}

    @property
    def closed(self) -> bool:
        return self._pool is None

    @property
    def forked(self) -> bool:
        """Is this a child of the process that opened the pool?"""
        return os.getpid() != self._pid

    def pool(self) -> Pool:
        """Return the pool for a call of the library.

        Raises:
            ClosedError, ForkedError: as named.
        """
        if self._pool is None:
            raise ClosedError(f"{self.path} is closed")
        if self.forked:
            raise ForkedError(f"{self.path} is open in process {self._pid}; this is a child of it")
        return self._pool

    def stack(self) -> list["Transaction"]:
        """Return the calling thread's open transactions, outermost first."""
        stack: list[Transaction] | None = getattr(self._threads, "stack", None)
        if stack is None:
            stack = self._threads.stack = []
        return stack

    # Memory.

    def holds(self, offset: int, size_bytes: int) -> bool:
        """Do *size_bytes* at *offset* lie within the pool?"""
        pool = self.pool()
        last = offset + size_bytes - 1
        return 0 < offset <= last < 1 << 63 and all(
            self.library.holds(pool, at) for at in (offset, last)
        )

    def memory(self, offset: int) -> Memory:
        return self.library.memory(self.pool(), offset)

    def view(self, offset: int, size_bytes: int, form: str) -> memoryview:
        """Return *size_bytes* at *offset* as a writable memoryview with items of *form*.

        Raises:
            ValueError: *size_bytes* is no multiple of the item's size, or there is no such form.
        """
        memory, item_bytes = self.memory(offset), _cast(memoryview(b""), form).itemsize
        if size_bytes % item_bytes:
            raise ValueError(f"{size_bytes} bytes are no multiple of {item_bytes}, as {form!r} is")
        key = next(self._keys)
        forget = functools.partial(self._forget, key)
        view = _cast(memoryview(self.library.buffer(memory, size_bytes, forget)), form)
        self._views[key] = weakref.ref(view)
        return view

    def _forget(self, key: int, _memory: Any) -> None:
        self._views.pop(key, None)

    # The end.

    def close(self) -> None:
        """Close the pool; once more is harmless, and so is a child's.

        Raises:
            TransactionError: a transaction is open.
            ViewsAliveError: something made from a view is in use; views themselves are released.
        """
        if self._pool is None or self.forked:
            return
        if self.transactions:
            raise TransactionError(
                f"{self.path} has {len(self.transactions)} open transactions: end them, then close"
            )
        for reference in list(self._views.values()):
            view = reference()
            if view is not None:
                _release(view)
            del view
        if self._views:
            raise ViewsAliveError(
                f"{len(self._views)} views of {self.path} are in use, by arrays, casts or slices "
                "of them: drop or release those, then close"
            )
        pool, self._pool = self._pool, None
        self.library.close(pool)

    def __del__(self) -> None:
        # Whoever forgot to close must not leave a lock behind. There are no views: they would have
        # kept this alive. A transaction that never ended is undone by the next open.
        if getattr(self, "_pool", None) is not None and not self.forked and not self.transactions:
            self.library.close(self._pool)


def _cast(view: memoryview, form: str) -> memoryview:
    # Typeshed lists the forms as literals; this one is the caller's, and checked by cast().
    items: memoryview = view.cast(form)  # type: ignore[call-overload]
    return items


def _release(view: memoryview) -> None:
    try:
        view.release()
    except BufferError:
        return  # an array over it is alive; the caller counts those
