"""Random number generators: all of a run's streams, captured and set together.

Covers torch's cpu generator, those of initialised CUDA devices, Python's ``random``, numpy's global
generator (with its cached gaussian), and the ``torch.Generator`` objects that a run registers.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

State = dict[str, Any]


def capture_rng(generators: Mapping[str, torch.Generator], *, everything: bool = True) -> State:
    """Return the state of the registered generators and, with *everything*, the global ones."""
    state: State = {"own": {name: g.get_state() for name, g in generators.items()}}
    if not everything:
        return state
    state["torch"] = torch.get_rng_state()
    state["python"] = random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def apply_rng(state: State, generators: Mapping[str, torch.Generator]) -> None:
    """Set every generator that *state* and this process both have."""
    for name, own in state.get("own", {}).items():
        if name in generators:
            generators[name].set_state(own)
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
