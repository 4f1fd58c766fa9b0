"""Flights: each is kept until nothing reads its memory any more.

A flight that was given up is nobody's, and the memory that it was copying may be freed: a tensor
was replaced, a model offloaded, a run has ended. But what was given to a GPU, or what a worker is
in, is not called back. So its storages are kept here until the store says that its batches are
through.
"""

from ._core import Store
from .flight import Flight, Record
from .plan import Plan
from .snapshots import Snapshots
from .trust import Trust


class Flights:
    """Makes flights, and keeps them for as long as copies of theirs may be under way."""

    def __init__(self, store: Store, trust: Trust, snapshots: Snapshots, timeout: float) -> None:
        self._store, self._trust, self._timeout = store, trust, timeout
        self._snapshots = snapshots
        self._kept: list[Flight] = []

    def start(self, plan: Plan, record: Record, host: bytes, keep: int) -> Flight:
        """Begin a version, when none is in flight. The caller's training state stands still.

        Raises:
            CheckpointError: as ``Flight.start``; nothing is in flight.
        """
        self.let_go()
        flight = Flight(self._store, plan, self._trust, self._snapshots, record, self._timeout)
        self._kept.append(flight)
        flight.start(host, keep)
        return flight

    def let_go(self, but: Flight | None = None) -> None:
        """Let go of all flights that nothing is under way of, *but* the one in flight."""
        self._kept = [one for one in self._kept if one is but or not one.is_through()]
