"""Ticket: what a training script gets back for an iteration that it ended."""

from .driver import Driver
from .errors import CheckpointError
from .flight import Flight


class Ticket:
    """A handle on the version that the end of an iteration made.

    Attributes:
        step: iterations done at that boundary.
        skipped: why no version was made; empty if one was.
    """

    def __init__(self, driver: Driver, step: int, flight: Flight | None, skipped: str) -> None:
        self._driver, self._flight = driver, flight
        self.step, self.skipped = step, skipped

    def copied(self) -> bool:
        """Have its tensors been copied, so that they may change? Never waits."""
        self._driver.checked()
        flight = self._flight
        return flight is None or bool(flight.dropped) or flight.durable or flight.copied()

    @property
    def durable(self) -> bool:
        """Is it known to be committed? Never waits."""
        return self._flight is not None and self._flight.durable

    def wait(self) -> int:
        """Wait until this version is durable; return the newest durable step.

        Raises:
            CheckpointError: it was given up, or the media failed; the message says why.
        """
        newest = self._driver.checked().land()
        if self._flight is not None and not self._flight.durable:
            raise CheckpointError(f"step {self.step} has no version: {self._flight.dropped}")
        return newest
