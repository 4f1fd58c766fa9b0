"""Overlap: which of many strided tensors have bytes in common. Exact, and without torch.

The spans of two columns of a matrix cross, but they have no byte in common; a flat buffer has
bytes in common with each of its pieces. A tensor is taken as runs of adjacent bytes, repeated
along dimensions. Two tensors with the same outer stride, whose rows are no longer than it, meet
only where row i of one meets row i + q or i + q + 1 of the other, for one q; so a dimension of
any length costs two comparisons. Where strides differ, rows are compared one by one.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Dims = tuple[tuple[int, int], ...]  # (stride in bytes, how many), outer ones first


class Reach(NamedTuple):
    """The bytes of a tensor: runs of ``run`` bytes, the first at ``begin``."""

    begin: int
    run: int
    dims: Dims

    @property
    def end(self) -> int:
        return self.begin + _width(self.run, self.dims)


def reach_of(begin: int, itemsize: int, shape: Sequence[int], stride: Sequence[int]) -> Reach:
    """Return the bytes that a tensor reaches; it has at least one element."""
    pairs = zip(shape, stride, strict=True)
    dims = sorted((s * itemsize, n) for n, s in pairs if n > 1 and s > 0)
    run = itemsize
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    return Reach(begin, run, tuple(reversed(dims)))


def meetings(reaches: Sequence[Reach]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of indexes, the smaller one first, whose tensors have bytes in common."""
    active: list[tuple[int, int, Reach]] = []
    for index, one in sorted(enumerate(reaches), key=lambda item: item[1].begin):
        active = [entry for entry in active if entry[0] > one.begin]
        for _, other, reach in active:
            if _meet(one.begin - reach.begin, reach.run, reach.dims, one.run, one.dims):
                yield min(index, other), max(index, other)
        active.append((one.end, index, one))


def _width(run: int, dims: Dims) -> int:
    return run + sum(stride * (n - 1) for stride, n in dims)


def _meet(gap: int, run: int, dims: Dims, other_run: int, other_dims: Dims) -> bool:
    """Do two tensors meet, of which the other begins *gap* bytes behind the one?"""
    if gap >= _width(run, dims) or gap + _width(other_run, other_dims) <= 0:
        return False
    if not dims and not other_dims:
        return True
    if (other_dims[0] if other_dims else (0, 0)) > (dims[0] if dims else (0, 0)):
        return _meet(-gap, other_run, other_dims, run, dims)
    (stride, count), rest = dims[0], dims[1:]
    same = bool(other_dims) and other_dims[0][0] == stride
    other_count, other_rest = (other_dims[0][1], other_dims[1:]) if same else (1, other_dims)
    if max(_width(run, rest), _width(other_run, other_rest)) > stride:
        return any(_meet(gap - i * stride, run, rest, other_run, other_dims) for i in range(count))
    row, inside = divmod(gap, stride)
    return any(
        -other_count < q < count and _meet(at, run, rest, other_run, other_rest)
        for q, at in ((row, inside), (row + 1, inside - stride))
    )
