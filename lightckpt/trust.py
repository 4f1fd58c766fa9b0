"""Which extents may be read while training goes on: learned by watching, never assumed.

An extent may stream *lazily*, behind the next forward and backward, if nothing changes it between
the boundary and its optimizer's next update. That is so for parameters and optimizer state in a
plain loop, and not so where weights are clipped late, swapped with averages, or perturbed for a
sharpness-aware step. So each extent starts in *probation*: it is copied at the boundary, and at the
guard its version counters and checksums are compared with what they were. After
``PROBATION_VERSIONS`` quiet ones it is lazy; one change makes it volatile for good. Counters alone
prove nothing (fused kernels and ``.data`` edits do not move them), so the first
``RECHECKED_VERSIONS`` lazy versions are summed again at the guard, and later a rotating share. A
change that is seen among those begins that anew for all: a habit that came late has more victims.

Pure bookkeeping over names; knows neither tensors nor the store.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .manifest import Path, name_of

PROBATION_VERSIONS = 2
RECHECKED_VERSIONS = 3
ROTATING_SHARE = 0.01


class Standing(StrEnum):
    VOLATILE = "volatile"
    PROBATION = "probation"
    LAZY = "lazy"


@dataclass
class Trust:
    """The standing of every extent by its first tensor's path; outlives structure changes."""

    quiet: dict[Path, int] = field(default_factory=dict)  # versions it stood still
    moved: dict[Path, str] = field(default_factory=dict)  # why it is volatile
    # By layer: whose turn it is, and the bytes still to spend on sums.
    rotation: dict[Hashable, tuple[int, float]] = field(default_factory=dict)

    def standing(self, path: Path) -> Standing:
        if path in self.moved:
            return Standing.VOLATILE
        quiet = self.quiet.get(path, 0)
        return Standing.PROBATION if quiet < PROBATION_VERSIONS else Standing.LAZY

    def saw_quiet(self, paths: Iterable[Path]) -> bool:
        """Count one more quiet version for *paths*; True if that made any of them lazy."""
        promoted = False
        for path in paths:
            self.quiet[path] = self.quiet.get(path, 0) + 1
            promoted = promoted or self.quiet[path] == PROBATION_VERSIONS
        return promoted

    def saw_change(self, path: Path, why: str) -> None:
        self.moved.setdefault(path, why)

    def doubt(self) -> None:
        """Let the next ``RECHECKED_VERSIONS`` versions be summed whole again."""
        for path, quiet in self.quiet.items():
            self.quiet[path] = min(quiet, PROBATION_VERSIONS)

    def is_proven(self, path: Path) -> bool:
        """Has it streamed quietly for so long that only its turn in the rotation is left?"""
        return self.quiet.get(path, 0) >= PROBATION_VERSIONS + RECHECKED_VERSIONS

    def turn(self, layer: Hashable, sizes: Sequence[int]) -> list[int]:
        """Return the extents of *layer* to sum in this version: consecutive ones, going round.

        On average they hold ``ROTATING_SHARE`` of the bytes: a large extent is paid for by the
        turns after it, which choose none. Each layer, any hashable, goes round by itself.
        """
        at, credit = self.rotation.get(layer, (0, 0.0))
        credit += sum(sizes) * ROTATING_SHARE
        chosen: list[int] = []
        while credit > 0 and len(chosen) < len(sizes):
            chosen.append(at % len(sizes))
            credit -= max(1, sizes[chosen[-1]])
            at += 1
        self.rotation[layer] = at, credit
        return chosen

    def report(self) -> list[str]:
        """Say which tensors were seen to change, and are copied at the boundary since."""
        return [f"{name_of(path)}: {why}" for path, why in sorted(self.moved.items())]
