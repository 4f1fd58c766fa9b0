"""Cases of our own, of the same kinds as those of cases.py, and of a few more.

Each says what is right where it is declared. Left out are `torch.compile`d optimizer steps, since
compiling one takes longer than all cases together.
"""

from __future__ import annotations

from more_loops import LOOPS
from more_optimizers import OPTIMIZERS
from more_tensors import TENSORS

MORE = {**TENSORS, **OPTIMIZERS, **LOOPS}
