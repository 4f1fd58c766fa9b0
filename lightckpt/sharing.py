"""Sharing: tensors of a restored run have bytes in common exactly if they had when saved.

A *tie* is a set of stored tensors that hang together by bytes they have in common. Invariants:

  1. The live tensors of a tie lie towards each other as they did, and no two other live tensors
     have a byte in common. :func:`check_ties` refuses a run where this is not so: what a model
     holds is not exchanged, since others may hold it too.
  2. What a fresh run lacks (optimizer state, gradients, buffers that were None) is made in the
     memory of its tie: that of a live tensor, or else new. A tensor that the run has in such a
     place is kept only if it fits and keeps to the first invariant.
  3. Two tensors to be made that are alike in all that is stored are one object, as they were.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .errors import StructureError
from .manifest import DTYPE_BYTES, Manifest, Path, TensorEntry, name_of
from .overlap import Reach, meetings, reach_of
from .tensors import dtype_of, is_uninitialised

Places = Mapping[Path, Tensor]
_ALIGN = 16  # bytes of the largest element


@dataclass
class Tie:
    """Stored tensors in one extent, and which of them have bytes in common."""

    entries: list[TensorEntry] = field(default_factory=list)
    pairs: list[tuple[TensorEntry, TensorEntry]] = field(default_factory=list)

    @property
    def begin(self) -> int:
        return min(entry.offset for entry in self.entries)

    @property
    def end(self) -> int:
        return max(entry.offset + entry.span_bytes() for entry in self.entries)


def find_ties(manifest: Manifest) -> list[Tie]:
    """Return the ties of a version."""
    by_extent: dict[int, list[TensorEntry]] = {}
    for entry in manifest.entries:
        if entry.extent >= 0 and 0 not in entry.shape:
            by_extent.setdefault(entry.extent, []).append(entry)
    return [tie for entries in by_extent.values() if len(entries) > 1 for tie in _split(entries)]


def _split(entries: list[TensorEntry]) -> Iterator[Tie]:
    """Yield what hangs together of the tensors of one extent."""
    tie_of = {entry.path: Tie([entry]) for entry in entries}
    for i, j in meetings([_stored(entry) for entry in entries]):
        one, other = tie_of[entries[i].path], tie_of[entries[j].path]
        if one is not other:
            one.entries += other.entries
            one.pairs += other.pairs
            tie_of |= {entry.path: one for entry in other.entries}
        one.pairs.append((entries[i], entries[j]))
    distinct = {id(tie): tie for tie in tie_of.values()}
    return (tie for tie in distinct.values() if tie.pairs)


def _stored(entry: TensorEntry) -> Reach:
    return reach_of(entry.offset, DTYPE_BYTES[entry.dtype], entry.shape, entry.stride)


def _live(tensor: Tensor) -> Reach | None:
    """Return what *tensor* reaches in memory; None if it has no bytes of its own."""
    if is_uninitialised(tensor) or tensor.layout != torch.strided:
        return None
    if not (address := tensor.data_ptr()):
        return None
    if tensor.is_contiguous():
        return Reach(address, tensor.nbytes, ())
    return reach_of(address, tensor.element_size(), tensor.shape, tensor.stride())


def _live_meetings(tensors: Iterable[tuple[Path, Tensor]]) -> Iterator[tuple[Path, Path]]:
    """Yield the paths of those that have bytes in common, in the order given."""
    reaches = [(path, reach) for path, tensor in tensors if (reach := _live(tensor))]
    for i, j in meetings([reach for _, reach in reaches]):
        yield reaches[i][0], reaches[j][0]


def check_ties(manifest: Manifest, ties: list[Tie], places: Places) -> None:
    """Refuse a run whose tensors share memory in another way than those of the version.

    Raises:
        StructureError: naming two tensors; nothing was changed.
    """
    wrappers = {entry.path for entry in manifest.entries if entry.subclass}
    for tie in ties:
        _check_tie(tie, places)
        for entry in tie.entries:  # an inner tensor comes with its wrapper, wherever that puts it
            if entry.path not in places and entry.path[:-1] in wrappers:
                raise _broken(tie, entry, entry)
    known = {frozenset((a.path, b.path)) for tie in ties for a, b in tie.pairs}
    paths = [entry.path for entry in manifest.entries if entry.extent >= 0]
    for one, other in _live_meetings((path, places[path]) for path in paths if path in places):
        if frozenset((one, other)) not in known:
            raise StructureError(
                f"{name_of(one)} and {name_of(other)} share memory in the run, not in the store"
            )


def _check_tie(tie: Tie, places: Places) -> None:
    held = [entry for entry in tie.entries if entry.path in places]
    if not held:
        _shift(tie)
        return
    lazy = [entry for entry in held if is_uninitialised(places[entry.path])]
    first = (lazy or held)[0]
    anchor = places[first.path]
    for entry in held:
        tensor = places[entry.path]
        if tensor is not anchor and (lazy or not _lie_alike(entry, tensor, first, anchor)):
            raise _broken(tie, entry, first)
    for entry in tie.entries:
        if entry.path not in places and not _reaches(anchor, first, entry):
            raise _broken(tie, entry, first)


def _lie_alike(entry: TensorEntry, tensor: Tensor, first: TensorEntry, anchor: Tensor) -> bool:
    """Does *tensor* lie towards *anchor* as *entry* does towards *first*?"""
    if tensor.data_ptr() - anchor.data_ptr() != entry.offset - first.offset:
        return False
    if _form(entry) == _form(first):
        return tensor.stride() == anchor.stride()
    return not entry.packed and all(
        live == stored
        for n, live, stored in (
            *zip(entry.shape, tensor.stride(), entry.stride, strict=True),
            *zip(first.shape, anchor.stride(), first.stride, strict=True),
        )
        if n > 1
    )


def _reaches(anchor: Tensor, first: TensorEntry, entry: TensorEntry) -> bool:
    """Can *entry* be made in the memory of *anchor*, which has the bytes of *first*?"""
    if entry.packed:
        return _form(entry) == _form(first)
    ahead = entry.offset - first.offset
    if is_uninitialised(anchor):
        at, size = ahead, first.span_bytes()
    else:
        storage = anchor.untyped_storage()
        at, size = anchor.data_ptr() + ahead - storage.data_ptr(), storage.nbytes()
    fits = 0 <= at <= at + entry.span_bytes() <= size
    return fits and at % DTYPE_BYTES[entry.dtype] == 0


def _form(entry: TensorEntry) -> tuple[Any, ...]:
    return entry.offset, entry.dtype, entry.shape, entry.stride


def _broken(tie: Tie, entry: TensorEntry, first: TensorEntry) -> StructureError:
    """Say that *entry* lies elsewhere; name a tensor that it has bytes in common with."""
    others = [b if a is entry else a for a, b in tie.pairs if entry in (a, b)]
    other = first if first in others else others[0]
    return StructureError(
        f"{name_of(other.path)} and {entry.name} share memory in the store, not in the run"
    )


def _shift(tie: Tie) -> int:
    """Return how far behind an aligned address the tie's first byte must lie."""
    for shift in range(_ALIGN):
        if all(
            (entry.offset - tie.begin + shift) % DTYPE_BYTES[entry.dtype] == 0
            for entry in tie.entries
        ):
            return shift
    one, other = tie.pairs[0]
    raise StructureError(
        f"{name_of(one.path)} and {name_of(other.path)} share memory at places that do not "
        "suit their dtypes"
    )


@dataclass(frozen=True)
class Job:
    """A tensor to be made for *entry*; *held* is what the run has in its place, if anything."""

    entry: TensorEntry
    held: Any = None
    owner: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def make_all(jobs: list[Job], ties: list[Tie], places: Places) -> list[Tensor]:
    """Return a tensor for each job: the one held, if it may stay, else one in its tie's memory."""
    tie_of = {entry.path: tie for tie in ties for entry in tie.entries}
    kept = _kept(jobs, tie_of, places)
    spots: dict[int, _Spot] = {}
    made = []
    for job in jobs:
        entry, held = job.entry, kept.get(job.entry.path)
        if entry.subclass:
            made.append(_subclass(entry, job.held, job.owner))
            continue
        if (tie := tie_of.get(entry.path)) is not None:
            if id(tie) not in spots:
                spots[id(tie)] = _Spot.of(tie, places, kept, job.device)
            held = spots[id(tie)].tensor_for(entry, held)
        elif held is None:
            held = torch.empty_strided(
                entry.shape, entry.stride, dtype=dtype_of(entry.dtype), device=job.device
            )
            held = _flagged(held, entry)
        if held.is_leaf and held.requires_grad != entry.requires_grad:
            held.requires_grad_(entry.requires_grad)
        made.append(held)
    return made


def _kept(jobs: list[Job], tie_of: dict[Path, Tie], places: Places) -> dict[Path, Tensor]:
    """Return the held tensors that fit, without those that lie in bytes of something else."""
    kept = {job.entry.path: job.held for job in jobs if _fits(job)}
    for one, other in _live_meetings([*places.items(), *kept.items()]):
        tied = one in tie_of and tie_of[one] is tie_of.get(other)
        if not tied and (one in places or one in kept):
            kept.pop(other, None)
    return kept


def _fits(job: Job) -> bool:
    held, entry = job.held, job.entry
    return (
        type(held) is (nn.Parameter if entry.parameter else Tensor)
        and held.layout == torch.strided
        and held.device == job.device
        and held.dtype == dtype_of(entry.dtype)
        and tuple(held.shape) == entry.shape
        and held.stride() == entry.stride
        and (held.is_conj(), held.is_neg()) == (entry.conj, entry.neg)
    )


def _flagged(made: Tensor, entry: TensorEntry) -> Tensor:
    made = made.conj() if entry.conj else made
    made = made._neg_view() if entry.neg else made
    return nn.Parameter(made, requires_grad=entry.requires_grad) if entry.parameter else made


def _subclass(entry: TensorEntry, held: Any, owner: Tensor | None) -> Tensor:
    for candidate in (held, None if owner is None else torch.zeros_like(owner)):
        if isinstance(candidate, Tensor) and type(candidate).__qualname__ == entry.subclass:
            return candidate
    raise StructureError(f"{entry.name} is a {entry.subclass}; none can be made from its parameter")


@dataclass
class _Spot:
    """The memory of a tie: byte *offset* of the extent lies where *anchor* begins."""

    anchor: Tensor
    offset: int
    alike: dict[tuple[Any, ...], Tensor]

    @classmethod
    def of(
        cls, tie: Tie, places: Places, kept: dict[Path, Tensor], device: torch.device
    ) -> "_Spot":
        """Find the memory: of a live tensor; of one that is kept and reaches all; or make it."""
        held = {e.path: places[e.path] for e in tie.entries if e.path in places}
        alike = {_kind(e): held[e.path] for e in tie.entries if _is_kind(e, held.get(e.path))}
        for entry in tie.entries:
            anchor = held.get(entry.path) if held else kept.get(entry.path)
            if anchor is not None and (
                held or all(_reaches(anchor, entry, other) for other in tie.entries)
            ):
                return cls(anchor, entry.offset, alike)
        if tie.entries[0].packed:
            one = tie.entries[0]
            made = torch.empty_strided(
                one.shape, one.stride, dtype=dtype_of(one.dtype), device=device
            )
            return cls(made, one.offset, alike)
        shift = _shift(tie)
        size = tie.end - tie.begin + shift
        return cls(torch.zeros(size, dtype=torch.uint8, device=device), tie.begin - shift, alike)

    def tensor_for(self, entry: TensorEntry, held: Tensor | None) -> Tensor:
        """Return *held* if it lies where *entry* does, else a view of this memory."""
        address = self.anchor.data_ptr() + entry.offset - self.offset
        if held is not None and held.data_ptr() == address:
            self.alike.setdefault(_kind(entry), held)
            return held
        if _kind(entry) not in self.alike:
            self.alike[_kind(entry)] = _flagged(self._view(entry, address), entry)
        return self.alike[_kind(entry)]

    def _view(self, entry: TensorEntry, address: int) -> Tensor:
        anchor, dtype = self.anchor.detach(), dtype_of(entry.dtype)
        stride = anchor.stride() if entry.packed else entry.stride
        at = (address - anchor.untyped_storage().data_ptr()) // dtype.itemsize
        if anchor.dtype == dtype and not anchor.is_conj() and not anchor.is_neg():
            return anchor.as_strided(entry.shape, stride, at)  # has the anchor's version counter
        return torch.empty(0, dtype=dtype, device=anchor.device).set_(
            anchor.untyped_storage(), at, entry.shape, stride
        )


def _kind(entry: TensorEntry) -> tuple[Any, ...]:
    """Return all that is stored of what a tensor is; the same within a tie: the same object."""
    return *_form(entry), entry.conj, entry.neg, entry.parameter, entry.requires_grad


def _is_kind(entry: TensorEntry, tensor: Tensor | None) -> bool:
    """Is *tensor*, which a model holds, of the class and form that *entry* says?"""
    return (
        tensor is not None
        and isinstance(tensor, nn.Parameter) == entry.parameter
        and (tensor.is_conj(), tensor.is_neg()) == (entry.conj, entry.neg)
        and (entry.packed or tensor.stride() == entry.stride)
    )
