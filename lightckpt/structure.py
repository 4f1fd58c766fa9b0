"""Structure: a run's tensors as they lie in memory, and as they will lie in a version.

A run is walked whole only when its structure changes: a layer unfrozen, optimizer state that
appeared, a parameter replaced. In between, :meth:`Structure.refresh` compares identities, pointers
and shapes, and follows tensors that were given new storage (``p.data = ...``).

Tensors whose bytes overlap (tied weights, views, flat buffers) share one extent, so that they are
stored once. A tensor that reaches less than half of its span (a column of a matrix) is packed.
"""

from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, call, is_
from typing import Any

import torch
from torch import Tensor, nn

from . import _core, gpus
from .capture import Leaf, Run, Walk, getter_of, walk_run
from .errors import UnsafeStateError
from .manifest import Manifest, TensorEntry, encode_manifest, graded, name_of
from .names import empty_buffers
from .overlap import meetings, reach_of
from .tensors import (
    compact,
    dtype_name,
    is_uninitialised,
    raw_bytes,
    refuse_storage,
    span_of,
)


@dataclass(slots=True)
class Extent:
    """A span of memory that is stored once, and the leaves that lie in it.

    If ``packed``, the leaves are all alike: one tensor, or several at the same elements.
    """

    size: int
    leaves: list[Leaf]
    address: int
    packed: bool = False
    span: int = 0  # bytes of memory from the first to behind the last; ``size`` unless packed
    storage: Any = None  # keeps the memory alive while workers read it
    copy: Tensor | None = None  # the contiguous copy of a packed extent, where its leaves are
    device: int = gpus.HOST


def _merge(leaves: list[Leaf]) -> list[Extent]:
    """Lay leaves whose bytes overlap into one extent, in the order of each one's first leaf."""
    spans = []
    for order, leaf in enumerate(leaves):
        leaf.address, size = span_of(leaf.tensor)
        if size:
            spans.append((leaf.address, leaf.address + size, order, leaf))
    merged: list[tuple[int, int, int, list[Leaf]]] = []
    for begin, end, order, leaf in sorted(spans, key=lambda span: (span[0], -span[1])):
        if merged and begin < merged[-1][1]:
            first, last, at, members = merged[-1]
            members.append(leaf)
            merged[-1] = (first, max(last, end), min(at, order), members)
        else:
            merged.append((begin, end, order, [leaf]))
    extents = []
    for begin, end, _, members in sorted(merged, key=lambda span: span[2]):
        reached = sum(compact_bytes(leaf) for leaf in members)
        alike = _alike(members) if reached * 2 < end - begin else []
        if not alike or _meet([leaves[0] for leaves in alike]):
            device = members[0].device
            extents.append(Extent(end - begin, members, begin, span=end - begin, device=device))
        else:
            extents += [_packed(leaves) for leaves in alike]
    for index, extent in enumerate(extents):
        for leaf in extent.leaves:
            leaf.extent = index
    return extents


def _alike(leaves: list[Leaf]) -> list[list[Leaf]]:
    """Put leaves together that reach the same elements."""
    found: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        flags = leaf.tensor.is_conj(), leaf.tensor.is_neg()
        found.setdefault((leaf.address, leaf.dtype, leaf.shape, leaf.stride, flags), []).append(
            leaf
        )
    return list(found.values())


def _meet(leaves: list[Leaf]) -> bool:
    """Have two of *leaves* bytes in common? Then copies of each could not show it."""
    reaches = [
        reach_of(leaf.address, leaf.tensor.element_size(), leaf.shape, leaf.stride)
        for leaf in leaves
    ]
    return any(True for _ in meetings(reaches))


def _packed(leaves: list[Leaf]) -> Extent:
    address, span = span_of(leaves[0].tensor)
    size, device = compact_bytes(leaves[0]), leaves[0].device
    return Extent(size, leaves, address, packed=True, span=span, device=device)


def compact_bytes(leaf: Leaf) -> int:
    """Bytes that *leaf* reaches, each counted once where dimensions are expanded."""
    count = leaf.tensor.element_size()
    for n, stride in zip(leaf.shape, leaf.stride, strict=True):
        count *= n if stride else min(n, 1)
    return count


def _entry(leaf: Leaf, extents: list[Extent]) -> TensorEntry:
    tensor = leaf.tensor
    if is_uninitialised(tensor):
        return TensorEntry(
            leaf.path, dtype_name(leaf.dtype), (), (), -1, requires_grad=leaf.requires_grad,
            buffer=leaf.buffer, persistent=leaf.persistent, uninitialised=True,
            parameter=isinstance(tensor, nn.Parameter),
        )  # fmt: skip
    packed = leaf.extent >= 0 and extents[leaf.extent].packed
    offset = 0 if leaf.extent < 0 or packed else leaf.address - extents[leaf.extent].address
    shape = tuple(leaf.shape)
    stride = leaf.stride or tuple(0 for _ in shape)
    if packed:  # stored compact: expanded dimensions once, the rest contiguous
        compacted = torch.Size(n if s else min(n, 1) for n, s in zip(shape, stride, strict=True))
        plain = torch.empty(compacted, device="meta").stride()
        stride = tuple(p if s else 0 for p, s in zip(plain, stride, strict=True))
    return TensorEntry(
        leaf.path, dtype_name(leaf.dtype), shape, stride, leaf.extent, offset,
        requires_grad=leaf.requires_grad and tensor.is_leaf, buffer=leaf.buffer,
        persistent=leaf.persistent, parameter=isinstance(tensor, nn.Parameter),
        conj=tensor.is_conj(), neg=tensor.is_neg(), packed=packed, subclass=leaf.subclass,
        device="" if leaf.device == gpus.HOST else "cuda",
    )  # fmt: skip


class Structure:
    """The tensors of a run as they lie in memory, and the manifest that says so.

    Built by one walk; afterwards valid for as long as :meth:`refresh` says so.
    """

    def __init__(self, run: Run, made_by: str) -> None:
        walk = walk_run(run)
        self.walk = walk
        self._owners: dict[int, frozenset[str]] = {}
        for name, tensors in walk.owners.items():
            for tensor in tensors:
                self._owners[tensor] = self._owners.get(tensor, frozenset()) | {name}
        self.moved = False  # did the last refresh follow a tensor to new memory?
        streamed = [leaf for leaf in walk.leaves if not leaf.subclass]
        self.lazy = any(is_uninitialised(leaf.tensor) for leaf in streamed)
        streamed = [leaf for leaf in streamed if not is_uninitialised(leaf.tensor)]
        for leaf in streamed:
            if reason := refuse_storage(leaf.tensor):
                raise UnsafeStateError(f"{name_of(leaf.path)} cannot be saved: {reason}")
        self.leaves = streamed
        # Of the host, but a GPU may still be copying into one when torch has returned.
        self.pinned = any(map(gpus.is_pinned, (leaf.tensor for leaf in streamed)))
        self.extents = _merge(streamed)
        self._watch = _Watch(walk, streamed)
        self._packed = [extent for extent in self.extents if extent.packed]
        for extent in self.extents:
            extent.storage = [leaf.tensor.untyped_storage() for leaf in extent.leaves]
        entries = tuple(_entry(leaf, self.extents) for leaf in walk.leaves)
        sizes = tuple(extent.size for extent in self.extents)
        absent = tuple(
            ("model", name, empty.name)
            for name, model in run.models.items()
            for empty in empty_buffers(model)
        )
        self.manifest = Manifest(entries, sizes, walk.groups, absent, run.single, made_by)
        self.blob = encode_manifest(self.manifest)
        by_path = {leaf.path: leaf.tensor for leaf in walk.leaves}
        walk.graded = [by_path[path] for path in graded(self.manifest)]
        self.sizes = _core.make_sizes(sizes)

    def owners(self, extent: Extent) -> frozenset[str]:
        """Return the optimizers that update a tensor of *extent*."""
        found = [self._owners.get(id(leaf.tensor), frozenset()) for leaf in extent.leaves]
        return frozenset().union(*found)

    def refresh(self) -> bool:
        """Follow rebound tensors; False if the structure has changed and must be built anew."""
        self.moved = False
        if self.lazy or not self._watch.is_same():
            return False
        moved = self._watch.moved()
        if not all(self._follow(leaf, address) for leaf, address in moved):
            return False
        return not moved or not self._cross()

    def _follow(self, leaf: Leaf, address: int) -> bool:
        if leaf.extent < 0:
            return True
        extent = self.extents[leaf.extent]
        if len(extent.leaves) > 1 or gpus.ordinal_of(leaf.tensor) != leaf.device:
            return False
        self.pinned = self.pinned or gpus.is_pinned(leaf.tensor)
        leaf.address = address
        extent.storage = [leaf.tensor.untyped_storage()]
        extent.address = address
        self.moved = self.moved or not extent.packed
        return True

    def _cross(self) -> bool:
        """Do extents lie over each other, as after ``b.data = a.data``?"""
        spans = sorted((extent.address, extent.address + extent.span) for extent in self.extents)
        return any(begin < end for (_, end), (begin, _) in pairwise(spans))

    def pack(self) -> None:
        """Get the memory ready to be copied: wait for GPUs that copy into it, and pack extents.

        Packed ones are few, and small for their span.
        """
        if self.pinned:
            gpus.synchronize(extent.device for extent in self.extents)
        for extent in self._packed:
            self.moved = True
            tensor = compact(extent.leaves[0].tensor.detach())
            if extent.device == gpus.HOST:
                packed = bytearray(raw_bytes(tensor))
                extent.copy = torch.frombuffer(packed, dtype=torch.uint8)
            else:
                extent.copy = gpus.packed(tensor)


_SHAPE, _DTYPE, _REQUIRES_GRAD = map(attrgetter, ("shape", "dtype", "requires_grad"))


class _Watch:
    """What a structure was built from, to see whether it is still so.

    It is looked at on every boundary, while training waits, with caches that a step has emptied. So
    it lies in columns, which built-in functions walk: below a microsecond per tensor.
    """

    def __init__(self, walk: Walk, leaves: list[Leaf]) -> None:
        self._leaves, self._walk = leaves, walk
        self._tensors = [leaf.tensor for leaf in leaves]
        self._shapes = [leaf.shape for leaf in leaves]
        self._strides = [leaf.stride for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._requires_grad = [leaf.requires_grad for leaf in leaves]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        held = [leaf for leaf in (*leaves, *walk.loose) if leaf.holder is not None]
        places: list[tuple[Any, Any, Any]] = [(leaf.holder, leaf.key, leaf.tensor) for leaf in held]
        places += walk.anchors
        places += [(holder, key, None) for holder, key in walk.absent]
        self._getters = [getter_of(holder, key) for holder, key, _ in places]
        self._keys = [key for _, key, _ in places]
        self._held = [value for _, _, value in places]
        self._containers = [container for container, _ in walk.containers]
        self._sizes = [size for _, size in walk.containers]

    def is_same(self) -> bool:
        """Is everything in its place, the tensors as they were, and nothing new beside them?"""
        tensors = self._tensors
        return (
            all(map(is_, map(call, self._getters, self._keys), self._held))
            and list(map(len, self._containers)) == self._sizes
            and list(map(_SHAPE, tensors)) == self._shapes
            and list(map(Tensor.stride, tensors)) == self._strides
            and list(map(_DTYPE, tensors)) == self._dtypes
            and list(map(_REQUIRES_GRAD, tensors)) == self._requires_grad
            and all(
                tuple(map(id, getter_of(holder, key)(key))) == ids
                for holder, key, ids in self._walk.members
            )
            and all(
                value.at in value.holder
                and not (type(value.key) is str and isinstance(value.holder[value.at], Tensor))
                for value in self._walk.values
            )
        )

    def moved(self) -> list[tuple[Leaf, int]]:
        """Return the leaves that have other memory than before, each with its address now."""
        before, self._addresses = self._addresses, list(map(Tensor.data_ptr, self._tensors))
        if before == self._addresses:
            return []
        now = zip(self._leaves, before, self._addresses, strict=True)
        return [(leaf, address) for leaf, old, address in now if address != old]
