"""A small binding of libpmemobj, the transactional object store of PMDK 1.12 to 2.1.

    with pypmemobj.Pool.create(path, "counter", 8 << 20) as pool:
        root = pool.root(8)
        with pool.transaction() as change:
            change.add(root)
            root.view("Q")[0] += 1

Nothing of PMDK is needed to install or to import it: ``libpmemobj.so.1`` is opened when a pool is.
"""

from ._library import Oid
from .errors import (
    ClosedError,
    ForkedError,
    LibraryNotFoundError,
    OutOfSpaceError,
    PmemobjError,
    PoolAccessError,
    PoolBusyError,
    PoolError,
    PoolExistsError,
    PoolNotFoundError,
    RolledBackError,
    TransactionError,
    UsageError,
    ViewsAliveError,
    WrongThreadError,
)
from .objects import Object
from .pool import LAYOUT_BYTES_MAX, SIZE_MIN, Pool, check
from .transaction import Transaction

__all__ = [
    "LAYOUT_BYTES_MAX",
    "SIZE_MIN",
    "ClosedError",
    "ForkedError",
    "LibraryNotFoundError",
    "Object",
    "Oid",
    "OutOfSpaceError",
    "PmemobjError",
    "Pool",
    "PoolAccessError",
    "PoolBusyError",
    "PoolError",
    "PoolExistsError",
    "PoolNotFoundError",
    "RolledBackError",
    "Transaction",
    "TransactionError",
    "UsageError",
    "ViewsAliveError",
    "WrongThreadError",
    "check",
]
