"""OneProcess: what works in the process that made it, and is inert in its forked children.

A child has a copy of every lock as it stood, and of no other thread. One that was held at the fork
is held there for ever; so who calls asks which process this is before any lock is taken.
"""

import os
from typing import Self


class OneProcess:
    """Base of what belongs to one process."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def is_here(self) -> bool:
        """Was it made in this process?"""
        return os.getpid() == self._process

    def checked(self) -> Self:
        """Return this object; raise ``ValueError`` in a forked child."""
        if not self.is_here():
            raise ValueError(
                f"the checkpointer was made by process {self._process}; in a forked child it is "
                "inert"
            )
        return self
