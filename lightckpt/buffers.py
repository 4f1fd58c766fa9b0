"""Buffers: a store's memory, lent out for as long as something looks at it.

The memory stays mapped until the last buffer is gone, and whatever was made from one: parts, numpy
arrays, torch tensors. A buffer itself can be ended before, so that touching it raises rather than
shows what nobody answers for any more. What was made from it then goes on.
"""

import weakref
from contextlib import suppress
from typing import Any


class Lease:
    """Keeps *mapping* alive for as long as this object lives, and ends the buffers it has lent."""

    def __init__(self, mapping: Any) -> None:
        self._mapping = mapping
        self._lent: set[int] = set()

    def lend(self, buffer: Any, *, read_only: bool) -> memoryview:
        """Return a view of *buffer*, which must hold this lease, as one that :meth:`end` ends."""
        view = memoryview(buffer)
        if read_only:
            view = view.toreadonly()
        loan = weakref.ref(view, self._returned)
        # Kept until the object goes, not only while it is valid: torch takes a buffer's address and
        # holds on to the object, which for Python is no use of it that a release would wait for.
        _loans[id(loan)] = loan, self
        self._lent.add(id(loan))
        return view

    def end(self) -> None:
        """Make the buffers raise ``ValueError`` when they are touched, but those in use."""
        for number in tuple(self._lent):
            loan, _ = _loans.get(number, (None, self))
            if loan is not None and (view := loan()) is not None:
                with suppress(BufferError):  # an array lies over it
                    view.release()

    def _returned(self, loan: weakref.ref[memoryview]) -> None:
        _loans.pop(id(loan), None)
        self._lent.discard(id(loan))


# Of all leases, also where nobody has the lease any more; a cycle alone would be collected.
_loans: dict[int, tuple[weakref.ref[memoryview], Lease]] = {}
