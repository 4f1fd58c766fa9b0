"""Transfer: bytes of a version into live tensors.

A tensor that fills its extent and lies in memory as it was saved is read straight into place,
verified in the same pass, by all workers, or by a GPU's copy engine from the store or from pinned
staging. Others (several tensors in one extent, strided or expanded ones, other strides than saved)
are copied from the mapped extent after it was verified.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _core, gpus
from ._core import Op, Snapshot, Store
from .errors import CheckpointError, CorruptError
from .manifest import TensorEntry
from .tensors import compact, dtype_of, is_dense, span_of


@dataclass(frozen=True)
class Target:
    """A stored tensor and the live one that takes its bytes."""

    entry: TensorEntry
    tensor: Tensor

    def is_direct(self, extent_bytes: int) -> bool:
        """May the whole extent be read into the tensor's memory as it stands?"""
        entry, tensor = self.entry, self.tensor
        return (
            entry.offset == 0
            and not entry.packed
            and entry.span_bytes() == extent_bytes
            and tensor.stride() == entry.stride
            and tuple(tensor.shape) == entry.shape
            and (tensor.is_contiguous() or is_dense(entry.shape, entry.stride))
            and tensor.is_conj() == entry.conj
            and tensor.is_neg() == entry.neg
        )


def stored_view(buffer: Any, entry: TensorEntry) -> Tensor:
    """Return the stored tensor of *entry* as a view of its extent's bytes, without a copy.

    Args:
        buffer: the extent, as a buffer or as a tensor of bytes: views of one tensor share storage.
    """
    dtype = dtype_of(entry.dtype)
    if 0 in entry.shape:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    whole = buffer if isinstance(buffer, Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)
    bytes_ = whole[entry.offset :]
    if entry.packed:
        sizes = zip(entry.shape, entry.stride, strict=True)
        stored = tuple(n if s else min(n, 1) for n, s in sizes)
        size = torch.Size(stored).numel() * dtype.itemsize
        return bytes_[:size].view(dtype).reshape(stored).expand(entry.shape)
    size = entry.span_bytes()
    bytes_ = bytes_[:size]
    if bytes_.data_ptr() % dtype.itemsize or bytes_.storage_offset() % dtype.itemsize:
        bytes_ = bytes_.clone()  # a view at an odd place, which torch cannot retype
    view = bytes_.view(dtype).as_strided(entry.shape, entry.stride)
    if entry.conj:
        view = view.conj()
    return view._neg_view() if entry.neg else view


def write_targets(store: Store, version: int, sizes: Sequence[int], targets: list[Target]) -> None:
    """Fill the targets from *version*, whose extents have *sizes* in bytes, each byte verified.

    Raises:
        CorruptError: naming the tensors whose bytes differ from their checksums.
        MediaError: the media failed.
    """
    direct: dict[int, Target] = {}
    others: list[Target] = []
    for target in targets:
        extent = target.entry.extent
        if extent not in direct and target.is_direct(sizes[extent]):
            direct[extent] = target
        else:
            others.append(target)
    batches: list[int] = []
    try:
        _read(store, version, direct, batches)
        indirect = sorted({t.entry.extent for t in others} - direct.keys())
        spans = _core.make_spans([(0, extent) for extent in indirect])
        batches.append(store.submit(Op.VERIFY, spans, version=version))
    finally:
        bad = _wait_for_all(store, batches)
    if bad:
        names = [t.entry.name for t in targets if t.entry.extent in bad]
        raise CorruptError(f"bytes of {', '.join(names)} differ from their checksums")
    for target in others:
        if target.entry.extent in direct and _lies_in(target, direct[target.entry.extent]):
            continue  # the same memory: its bytes have come already
        view = stored_view(store.locate(version, target.entry.extent), target.entry)
        compact(target.tensor.detach()).copy_(_like(view, target.tensor))
    if counted := [t.tensor for t in targets if not t.tensor.is_inference()]:
        torch.autograd.graph.increment_version(counted)


def _read(store: Store, version: int, direct: dict[int, Target], batches: list[int]) -> None:
    """Queue the reading of whole extents into place: a batch for the host, one for each GPU."""
    places: dict[int, list[tuple[int, int]]] = {}
    for extent, target in direct.items():
        pair = target.tensor.data_ptr(), extent
        places.setdefault(gpus.ordinal_of(target.tensor), []).append(pair)
    for device, pairs in places.items():
        spans = _core.make_spans(pairs)
        if device == gpus.HOST:
            batches.append(store.submit(Op.READ, spans, version=version))
            continue
        # The copy engine reads the store itself where it can.
        way = Snapshot.DIRECT if store.open_device(device).direct else Snapshot.HOST
        stream = gpus.current_stream(device)
        batches.append(store.submit_on(device, stream, way, Op.READ, spans, version=version))


def _wait_for_all(store: Store, batches: list[int]) -> set[int]:
    """Wait for *batches*, whatever comes of one: return the extents whose bytes were wrong.

    The tensors that they fill are the caller's, and may be freed when he hears of an error.
    """
    bad: set[int] = set()
    try:
        while batches:
            bad |= set(store.wait(batches[0]).bad)
            del batches[0]
    finally:
        for batch in batches:
            with suppress(CheckpointError):
                store.wait(batch)
    return bad


def _like(view: Tensor, tensor: Tensor) -> Tensor:
    """Narrow *view* in the dimensions that are expanded in *tensor*."""
    for dim, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and n > 1:
            view = view.narrow(dim, 0, 1)
    return view


def _lies_in(target: Target, whole: Target) -> bool:
    begin, _ = span_of(target.tensor)
    same_place = begin - whole.tensor.data_ptr() == target.entry.offset - whole.entry.offset
    return same_place and target.tensor.stride() == target.entry.stride
