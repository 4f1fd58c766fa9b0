"""Decoration: the end of an iteration, told from hooks alone.

With a decorated step and neither ``iterate`` nor ``mark``, an update is followed by the end of its
iteration at the next of these: a forward call of a registered model in training mode, a step that
is given a closure (which will call the model), ``close``. What happens between the update and
there belongs to the iteration that ends: averages, schedulers, scalers. Only what the next batch is
drawn from is captured as the step returns: generators, and of the extras those that can be iterated
(loaders, samplers) or indexed (datasets) or have a generator among their attributes.

Iterations count updates. A scaler's skipped update counts too, but has no version: nothing tells
where it ended, and the version before it leads to the same state.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from .driver import Driver
from .errors import CheckpointWarning
from .hooks import inner_optimizer, optimizer_of

SEVERAL = (
    "{} optimizers are registered ({}), so the end of an iteration cannot be told from their "
    "steps: use iterate() or mark()"
)


class Decoration:
    """Whether a run is decorated, and has an iteration to end.

    Args:
        end: ends the iteration, if there still is one to end.
    """

    def __init__(self, driver: Driver, end: Callable[[], None]) -> None:
        self._driver, self._end = driver, end
        self.explicit = False  # iterate or mark has been used: then hooks end no iteration

    def start(self, step: Any) -> bool:
        """Check that *step* can be decorated; False if another one was before.

        Raises:
            TypeError, ValueError: as the facade's.
        """
        run = self._driver.checked().run
        optimizer = inner_optimizer(optimizer_of(step, run.optimizers.values()))
        if all(optimizer is not known for known in run.optimizers.values()):
            raise ValueError("this optimizer was not given to the Checkpointer: optimizer=")
        if not run.models:
            raise ValueError("decorating needs model=: its next forward call ends an iteration")
        first = not self._driver.capture_early
        self._driver.capture_early = True
        return first

    def give_way(self) -> None:
        """At a boundary: where it was explicit, generators count as they are there."""
        if self.explicit:
            self._driver.early, self._driver.capture_early = None, False

    def is_pending(self) -> bool:
        """Has an update come, or been skipped by a scaler, and its iteration not ended yet?"""
        driver, updates = self._driver, self._driver.updates
        if not driver.capture_early or self.explicit or updates.running or driver.store.closed:
            return False
        return updates.seen or updates.scaler_moved()

    def entered(self, model: nn.Module) -> None:
        """End an iteration at a forward call of *model*, if it has one to end."""
        # In functional_call the model holds other tensors for a moment, so no iteration ends there.
        ours = isinstance(next(model.parameters(), None), nn.Parameter | None)
        if model.training and ours and self.is_pending():
            self._end_one()

    def update_again(self, closure: bool) -> None:
        """End an iteration at the next step, or warn that nothing has told its end."""
        if closure:  # nothing has called the model since the last update, and this one will
            self._end_one()
            return
        warnings.warn(
            "two updates without a forward call of a registered model in training mode between "
            "them count as one iteration; if no such call comes, nothing is saved: use mark()",
            CheckpointWarning,
            stacklevel=5,
        )

    def _end_one(self) -> None:
        own = self._driver.run.given
        if len(own) > 1:
            raise ValueError(SEVERAL.format(len(own), ", ".join(own)))
        self._end()
