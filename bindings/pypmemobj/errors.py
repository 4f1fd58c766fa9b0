"""Exceptions of pypmemobj: what libpmemobj refused, and what the caller may not do.

A :class:`PoolError` carries the errno and the message of libpmemobj, and its subclasses are those
that a caller can do something about. A :class:`UsageError` is raised before libpmemobj is asked,
which for most of what it describes would stop the process. Other wrong arguments are ValueErrors.
"""

import errno
import os


class PmemobjError(Exception):
    """Base of every error that pypmemobj raises about a pool."""


class LibraryNotFoundError(PmemobjError):
    """libpmemobj is not installed, or too old. The message names the package to install."""


class PoolError(PmemobjError):
    """libpmemobj refused. Of the bad formats: no pool, another layout, cut short, damaged.

    Attributes:
        errno: what libpmemobj set; EINVAL for most things.
        reason: its own message.
    """

    def __init__(self, doing: str, number: int, reason: str) -> None:
        super().__init__(doing, number, reason)  # as they are, so that it can be pickled
        self.errno, self.reason = number, reason

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.reason or os.strerror(self.errno)}"


class PoolNotFoundError(PoolError):
    """There is no such file."""


class PoolExistsError(PoolError):
    """There is a file already; a pool is never made over one."""


class PoolBusyError(PoolError):
    """The pool is open: here, in another process, or in a child of one that had it open."""


class PoolAccessError(PoolError):
    """The file may not be read or written by this user."""


class OutOfSpaceError(PoolError):
    """The pool, or its file system, has no room. The transaction has been rolled back."""


class UsageError(PmemobjError):
    """Base of what the caller may not do; nothing has been done."""


class ClosedError(UsageError):
    """The pool has been closed."""


class ForkedError(UsageError):
    """The pool was opened by the parent of this process; a child may not use it."""


class WrongThreadError(UsageError):
    """The transaction is another thread's: libpmemobj ties each to the thread that began it."""


class TransactionError(UsageError):
    """The transaction is not running, or others are in the way."""


class RolledBackError(TransactionError):
    """The transaction has been rolled back, by a call or a nested transaction that failed."""


class ViewsAliveError(UsageError, BufferError):
    """Views of the pool are in use. Drop or release what was made from them, and close again."""


_BY_ERRNO: dict[int, type[PoolError]] = {
    errno.ENOENT: PoolNotFoundError,
    errno.EEXIST: PoolExistsError,
    errno.EAGAIN: PoolBusyError,
    errno.EACCES: PoolAccessError,
    errno.EPERM: PoolAccessError,
    errno.EROFS: PoolAccessError,
    errno.ENOMEM: OutOfSpaceError,
    errno.ENOSPC: OutOfSpaceError,
    errno.EDQUOT: OutOfSpaceError,
}


def pool_error(doing: str, number: int, reason: str) -> PoolError:
    """Return the exception for errno *number*."""
    return _BY_ERRNO.get(number, PoolError)(doing, number, reason)
