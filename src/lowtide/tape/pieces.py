"""Which parts of uninitialized memory the record has written.

Problem: solvers and loops allocate with `torch.empty` and fill it piece by piece, while something
that the recorder does not see may fill such memory too (rule 5). Invariant: a part counts as
written only if recorded operations have overwritten every element of it; in doubt it does not, and
what reads it keeps the memory. Immutable. Imports nothing. Rejected: a flag for each
byte, which takes a quarter of the memory itself; one interval of bytes for each write, as a column
of a matrix is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Box = tuple[tuple[int, int], ...]
"""Of each dimension of the allocated tensor, from the largest stride down: where it begins and
ends."""


class Pieces:
    """The parts of one storage that were written, as boxes in the tensor that was allocated."""

    __slots__ = ("_boxes", "_dims", "_itemsize")

    def __init__(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        itemsize: int,
        boxes: tuple[Box, ...] = (),
    ) -> None:
        dims = [(st, n) for n, st in zip(size, stride, strict=True) if n != 1]
        self._dims = sorted(dims, reverse=True)
        self._itemsize = itemsize
        self._boxes = boxes

    @staticmethod
    def of(tensor: Any) -> Pieces | None:
        """For a tensor that was just allocated; None if it is not all of its storage."""
        itemsize, nbytes = tensor.dtype.itemsize, tensor.untyped_storage().nbytes()
        count = _in_one_piece(tensor.shape, tensor.stride())
        if count <= 0 or count * itemsize != nbytes:
            return None
        return Pieces(tensor.shape, tensor.stride(), itemsize)

    @property
    def untouched(self) -> bool:
        """Whether nothing was written so far."""
        return not self._boxes

    def after(self, ref: Any) -> Pieces | None:
        """When a recorded operation has written what this `Ref` views; None: all is written."""
        box = self._box(ref.size, ref.stride, ref.offset, ref.dtype.itemsize)
        if box is None:
            finer = self._in_steps(ref)
            return self if finer is None else finer.after(ref)
        boxes, whole = _merged([*self._boxes, box]), tuple([(0, n) for _, n in self._dims])
        # Where the boxes lie matters only once they have enough elements for all of it.
        if sum(map(_elements, boxes)) >= _elements(whole) and not _left([whole], boxes):
            return None
        return self._with(self._dims, boxes)

    def _with(self, dims: list[tuple[int, int]], boxes: Sequence[Box]) -> Pieces:
        other = Pieces((), (), self._itemsize, tuple(boxes))
        other._dims = dims
        return other

    def _in_steps(self, ref: Any) -> Pieces | None:
        """These parts, with a dimension that a view goes through in steps (`out[..., ::2]`, as
        rotary embeddings are written) as two: the steps, and the places in each. None: there is no
        such dimension, or the steps do not divide it or what was written of it."""
        if ref.dtype.itemsize != self._itemsize:
            return None
        known = {step for step, _ in self._dims}
        for step, _ in _runs(ref.size, ref.stride):
            if step in known:
                continue
            for d, (st, n) in enumerate(self._dims):
                times = step // st
                if step % st or not 1 < times < n:
                    continue
                if n % times or any(end % times for box in self._boxes for end in box[d]):
                    return None
                dims = [*self._dims[:d], (step, n // times), (st, times), *self._dims[d + 1 :]]
                split = [
                    (*b[:d], (b[d][0] // times, b[d][1] // times), (0, times), *b[d + 1 :])
                    for b in self._boxes
                ]
                return self._with(dims, split)
            return None
        return None

    def cover(self, tensor: Any) -> bool:
        """Whether everything that a tensor views was written."""
        if not tensor.numel():
            return True
        if not self._boxes:
            return False
        offset, itemsize = tensor.storage_offset(), tensor.dtype.itemsize
        box = self._box(tensor.shape, tensor.stride(), offset, itemsize)
        return box is not None and not _left([box], self._boxes)

    def _box(
        self, size: Sequence[int], stride: Sequence[int], offset: int, itemsize: int
    ) -> Box | None:
        """What a view covers; None: that is no box, or not easy to see."""
        if itemsize != self._itemsize or 0 in size:
            return None
        starts = []
        for step, n in self._dims:
            starts.append(offset // step)
            offset %= step
            if starts[-1] >= n:
                return None
        if offset:
            return None
        spans = [1] * len(self._dims)
        places = {step: place for place, (step, _) in enumerate(self._dims)}
        for step, n in _runs(size, stride):
            while n > 1:  # a run that goes on over whole rows is one of rows
                place = places.get(step)
                if place is None or spans[place] != 1:
                    return None
                most = self._dims[place][1]
                if starts[place] + n <= most:
                    spans[place] = n
                    break
                if starts[place] or n % most:
                    return None
                spans[place] = most
                step, n = step * most, n // most
        return tuple((start, start + span) for start, span in zip(starts, spans, strict=True))


def _runs(size: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """A view's (stride, size), with dimensions that continue each other as one. What is expanded
    is read more than once."""
    found: list[tuple[int, int]] = []
    for step, n in sorted((st, n) for n, st in zip(size, stride, strict=True) if n != 1 and st):
        if found and found[-1][0] * found[-1][1] == step:
            found[-1] = found[-1][0], found[-1][1] * n
        else:
            found.append((step, n))
    return found


def _merged(boxes: list[Box]) -> list[Box]:
    """Parts in fewer boxes, as far as the last one continues another."""
    last = boxes.pop()
    while True:
        for place, box in enumerate(boxes):
            differing = [d for d, (a, b) in enumerate(zip(box, last, strict=True)) if a != b]
            if not differing:
                return boxes
            d = differing[0]
            if len(differing) == 1 and box[d][0] <= last[d][1] and last[d][0] <= box[d][1]:
                span = min(box[d][0], last[d][0]), max(box[d][1], last[d][1])
                last = (*last[:d], span, *last[d + 1 :])
                del boxes[place]
                break
        else:
            return [*boxes, last]


def _elements(box: Box) -> int:
    return math.prod([end - start for start, end in box])


def _left(parts: list[Box], boxes: Sequence[Box]) -> list[Box]:
    """Whatever of these parts no box contains."""
    for box in boxes:
        parts = [piece for part in parts for piece in _without(part, box)]
        if not parts:
            break
    return parts


def _without(part: Box, box: Box) -> list[Box]:
    if any(a[0] >= b[1] or b[0] >= a[1] for a, b in zip(part, box, strict=True)):
        return [part]
    found = []
    for d, ((low, high), (first, last)) in enumerate(zip(part, box, strict=True)):
        if low < first:
            found.append((*part[:d], (low, first), *part[d + 1 :]))
        if last < high:
            found.append((*part[:d], (last, high), *part[d + 1 :]))
        part = (*part[:d], (max(low, first), min(high, last)), *part[d + 1 :])
    return found


def covers(ref: Any, nbytes: int) -> bool:
    """Whether a view, as a `Ref`, is the whole of a storage, each element once."""
    elements: int = nbytes // ref.dtype.itemsize
    whole = elements * ref.dtype.itemsize == nbytes and ref.offset == 0
    return whole and _in_one_piece(ref.size, ref.stride) == elements


def _in_one_piece(size: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements, if they lie next to each other in any order of the dimensions; else
    -1."""
    count = 1
    for step, n in sorted((st, n) for n, st in zip(size, stride, strict=True) if n != 1):
        if step != count:
            return -1
        count *= n
    return count
