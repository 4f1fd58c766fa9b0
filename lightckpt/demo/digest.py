"""What "bit-identical" means here: sha256 over every byte of a training state, part by part.

Tensors enter by name, with dtype and shape, as raw bytes, so -0.0 differs from 0.0 and a NaN from
another NaN. Python values enter as their repr, which is exact for floats. Four parts, so that a
difference says where to look: weights (buffers included), optimizer, scheduler, random (torch's
and Python's generators).
"""

import hashlib
import random
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

PARTS = ("weights", "optimizer", "scheduler", "random")


def digest_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, str]:
    """Return the hexadecimal sha256 of each of ``PARTS``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        f"{names[id(parameter)]}.{key}": value
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            members = [names[id(parameter)] for parameter in group["params"]]
            state[f"group {index}.{key}"] = members if key == "params" else value
    return {
        "weights": _digest(model.state_dict()),
        "optimizer": _digest(state),
        "scheduler": _digest(scheduler.state_dict()),
        "random": _digest({"torch": torch.get_rng_state(), "python": random.getstate()}),
    }


def loss_bits(loss: float) -> str:
    """Return the bits of a float32 *loss* as eight hexadecimal digits."""
    return struct.pack(">f", loss).hex()


def _digest(values: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().data)
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()
