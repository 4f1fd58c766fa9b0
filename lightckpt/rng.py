"""Random number generators: all of a run's streams, captured and set together.

Covers torch's cpu generator, those of initialised CUDA devices, Python's ``random``, numpy's global
generator (with its cached gaussian), the ``torch.Generator`` objects that a run registers, and
those of any kind that objects keep to themselves: ``torch.Generator``, ``random.Random``, numpy's
``Generator``, ``RandomState`` and ``BitGenerator``.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

State = dict[str, Any]


def generators_of(owner: Any) -> dict[str, Any]:
    """Return the private generators that *owner* has in its attributes, by their names."""
    own = getattr(owner, "__dict__", {})
    held = {"generator": getattr(owner, "generator", None), **own}
    kinds = _kinds()
    return {name: value for name, value in held.items() if isinstance(value, kinds)}


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return torch.Generator, random.Random
    of_numpy = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return torch.Generator, random.Random, *of_numpy


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.SystemRandom):  # it has no state
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.SystemRandom):
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.state = state


def capture_rng(generators: Mapping[str, Any], *, everything: bool = True) -> State:
    """Return the state of the registered generators and, with *everything*, the global ones."""
    state: State = {"own": {name: _state_of(g) for name, g in generators.items()}}
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


def apply_rng(state: State, generators: Mapping[str, Any]) -> None:
    """Set every generator that *state* and this process both have."""
    for name, own in state.get("own", {}).items():
        if name in generators:
            _set_state(generators[name], own)
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
