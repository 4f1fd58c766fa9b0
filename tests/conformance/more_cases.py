"""Cases of our own, of the same kinds as those of cases.py, and of a few more.

Each says what is right where it is declared. Left out are `torch.compile`d optimizer steps, since
compiling one takes longer than all cases together.
"""

from __future__ import annotations

from more_changes import CHANGES
from more_host_state import HOST_STATE
from more_optimizers import OPTIMIZERS
from more_schedules import SCHEDULES
from more_sharing import SHARING
from more_tensors import TENSORS
from more_updates import UPDATES

MORE = {**TENSORS, **CHANGES, **OPTIMIZERS, **UPDATES, **SCHEDULES, **HOST_STATE, **SHARING}
