"""Object: a piece of a pool, with its bytes as a direct memoryview.

What is written through a view is in the pool at once, and durable only after ``persist``, or when a
transaction commits that has allocated the object or to which the range has been added. Views of the
root's or an object's bytes stay where they are when the object is freed or the root is enlarged;
what they show then is no longer the object's.
"""

from ._handle import Handle
from ._library import Oid


class Object:
    """An object of an open pool. Equal ones have the same ``oid``.

    Any thread may use it; who writes the same bytes as another thread takes a lock of their own.

    Attributes:
        oid: its name, good in every process that opens the pool, for as long as it is allocated.
        size_bytes: as asked for, where it was allocated or is the root; where it was found by its
            name or by iteration, all that it has room for, which may be more.
    """

    __slots__ = ("_handle", "is_root", "oid", "size_bytes")

    def __init__(self, handle: Handle, oid: Oid, size_bytes: int, *, is_root: bool = False) -> None:
        self._handle = handle
        self.oid, self.size_bytes, self.is_root = oid, size_bytes, is_root

    def __repr__(self) -> str:
        kind = "root" if self.is_root else "object"
        return f"<{kind} at {self.oid.offset} of {self._handle.path}, {self.size_bytes} bytes>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and self.oid == other.oid

    def __hash__(self) -> int:
        return hash(self.oid)

    @property
    def type_number(self) -> int:
        """The number that it was allocated with."""
        self._handle.pool()
        return self._handle.library.type_number(self.oid)

    def view(self, form: str = "B") -> memoryview:
        """Return the object's bytes, writable and in place, as items of *form* (of ``struct``).

        Closing the pool releases the view; what was made from it has to be dropped before.

        Raises:
            ValueError: the size is no multiple of the item's.
            ClosedError, ForkedError: the pool cannot be used.
        """
        return self._handle.view(self.oid.offset, self.size_bytes, form)

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy *data* to *offset* and make it durable. It is not rolled back with a transaction.

        Raises:
            ValueError: it does not fit.
            ClosedError, ForkedError: the pool cannot be used.
        """
        size_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
        self.check_range(offset, size_bytes)
        handle = self._handle
        handle.library.copy(handle.pool(), handle.memory(self.oid.offset + offset), data)

    def persist(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Make *size_bytes* at *offset*, or all from there, durable as they are now.

        Raises:
            ValueError: the range is not within the object.
            ClosedError, ForkedError: the pool cannot be used.
        """
        size_bytes = self.check_range(offset, size_bytes)
        handle = self._handle
        memory = handle.memory(self.oid.offset + offset)
        handle.library.persist(handle.pool(), memory, size_bytes)

    def check_range(self, offset: int, size_bytes: int | None) -> int:
        """Return the size of a range, None standing for all from *offset* on.

        Raises:
            ValueError: the range is not within the object.
        """
        wanted = self.size_bytes - offset if size_bytes is None else size_bytes
        if offset < 0 or wanted < 0 or offset + wanted > self.size_bytes:
            raise ValueError(f"{wanted} bytes at {offset} of an object with {self.size_bytes}")
        return wanted

    def belongs_to(self, handle: Handle) -> bool:
        """Is it an object of the pool of *handle*?"""
        return self._handle is handle
