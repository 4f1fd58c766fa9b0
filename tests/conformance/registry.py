"""How further cases are declared: as in cases.py, each in a table of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import Case, Run, seed_all, setup_determinism

# Words in Case.care that the harness acts upon.
PREPARE = "prepare"  # the program rebuilds its modules before it restores; the engine cannot
MAY_DROP = "may-drop"  # a version may be given up, with a warning, while the engine learns

Build = Callable[[int], Run]


class Registry(dict[str, Case]):
    """Cases by name."""

    def case(
        self, kind: str, expect: str, *, source: str = "our own", **numbers: Any
    ) -> Callable[[Build], Build]:
        """Declare the decorated function, named as the case, to build a run from a seed.

        Args:
            kind: what is special about the set-up.
            expect: what is right.
            source: where it was seen, or is described.
            numbers: n1, n2 and care of the Case.
        """

        def declare(function: Build) -> Build:
            def build(seed: int) -> Run:
                setup_determinism()
                seed_all(10_000 + seed)
                return function(seed)

            name = function.__name__
            assert name not in self
            self[name] = Case(name, source, kind, expect, build, **numbers)
            return function

        return declare
