"""Plan: how a structure's extents are copied: which at the boundary, which lazily, layer by layer.

A layer is the extents on one device that the same optimizers own: what one guard waits for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from . import _core
from .gpus import HOST
from .manifest import Path
from .structure import Extent, Structure
from .trust import Standing, Trust

LAYERS_MAX = 1000  # batches that one version may queue; with more, all is copied at the boundary


@dataclass
class Layer:
    """Extents on one device that one set of optimizers owns."""

    device: int
    owners: frozenset[str]
    indexes: list[int]
    spans: Any
    standing: Standing
    paths: list[Path]
    sizes: list[int]
    tensors: list[Tensor]
    proven: bool = False  # only the rotation is left to recheck
    counters: list[int] = field(default_factory=list)
    batch: int = 0
    check: int = 0  # of a GPU: the batch that sums it again
    compared: bool = False


class Plan:
    """How a structure's extents are copied: which at the boundary, which lazily, layer by layer.

    Valid until the structure, the trust in an extent, or an extent's address changes.
    """

    def __init__(self, structure: Structure, trust: Trust, fired: Iterable[str], mode: str) -> None:
        self.structure, self.mode = structure, mode
        order = list(fired)  # in the order in which the guards fire
        now: dict[int, list[int]] = {HOST: []}
        layers: dict[tuple[frozenset[str], Standing, int], list[int]] = {}
        for index, extent in enumerate(structure.extents):
            owners = structure.owners(extent)
            standing = Standing.VOLATILE
            if owners and owners <= set(order) and mode == "overlap" and _shows_changes(extent):
                standing = trust.standing(extent.leaves[0].path)
            if standing is not Standing.LAZY:
                now.setdefault(extent.device, []).append(index)
            if standing is not Standing.VOLATILE:
                layers.setdefault((owners, standing, extent.device), []).append(index)
        if len(layers) > LAYERS_MAX:
            now, layers = {HOST: []}, {}
            for index, extent in enumerate(structure.extents):
                now.setdefault(extent.device, []).append(index)
        self.now = {device: spans_of(structure, indexes) for device, indexes in now.items()}
        ranked = sorted(layers.items(), key=lambda item: min(map(order.index, item[0][0])))
        self.layers = [
            Layer(
                device,
                owners,
                indexes,
                spans_of(structure, indexes),
                standing,
                [structure.extents[i].leaves[0].path for i in indexes],
                [structure.extents[i].size for i in indexes],
                [leaf.tensor for i in indexes for leaf in structure.extents[i].leaves],
            )
            for (owners, standing, device), indexes in ranked
        ]


def _shows_changes(extent: Extent) -> bool:
    """Can a change of *extent* be seen? Its own memory is read, and version counters move."""
    return not extent.packed and not any(leaf.tensor.is_inference() for leaf in extent.leaves)


def spans_of(structure: Structure, indexes: list[int]) -> Any:
    extents = structure.extents
    pairs = [(_address(extents[i]), i) for i in indexes]
    return _core.make_spans(pairs)


def _address(extent: Extent) -> int:
    return extent.copy.data_ptr() if extent.copy is not None else extent.address
