"""Placement: where tensors of host state belong in a run, when they were not on the cpu.

A learning rate held on a GPU, an average in an ``extra``, a sparse gradient: the GPU that they were
on may not be here, or the run may be on another one now. They are decoded on the cpu, and then go
to a device that the run is on: the one that they were on, else another of its kind, else the cpu.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .capture import Run
from .errors import CheckpointError
from .names import held_tensors
from .tensors import decode_leaf

_CPU = torch.device("cpu")


class Placement:
    """The devices of a run, for tensors that are decoded for it."""

    def __init__(self, run: Run) -> None:
        held = (held.tensor for model in run.models.values() for held in held_tensors(model))
        groups = (group for item in run.optimizers.values() for group in item.param_groups)
        owned = (parameter for group in groups for parameter in group["params"])
        tensors = (item for item in run.tensors.values() if isinstance(item, Tensor))
        devices = (tensor.device for tensor in chain(held, owned, tensors))
        self._devices = [device for device in dict.fromkeys(devices) if device != _CPU]

    def decode(self, meta: dict[str, Any], data: memoryview) -> Tensor:
        """Rebuild a tensor of host state where it belongs; see ``tensors.decode_leaf``.

        Raises:
            CheckpointError: the device does not take it, for want of room perhaps.
        """
        return decode_leaf(meta, data, self._moved)

    def device_for(self, device: torch.device) -> torch.device:
        """Return the run's device for what was on *device*."""
        if device in self._devices:
            return device
        return next((one for one in self._devices if one.type == device.type), _CPU)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        target = self.device_for(device)
        try:
            return tensor.to(target)
        except RuntimeError as error:  # of the device: the version is whole
            raise CheckpointError(
                f"a tensor of {tensor.dtype} {list(tensor.shape)}, which was on {device}, cannot "
                f"be put on {target}: {error}"
            ) from error


def beside(tensor: Tensor, others: list[Tensor]) -> Tensor:
    """Return *tensor*, if it is not on the cpu, where the first of *others* is."""
    return tensor.to(others[0].device) if others and tensor.device != _CPU else tensor
