"""Steps of the same operations whose sizes vary each in its own way.

Problem: where data decides how many rows an expert, a mask or a neighborhood has, no step is larger
than another in everything. Each outgrows every other's plan in some operation, and a plan for steps
that are so many times larger in everything recomputes far too much. Invariant: bounds are per
operation: the most that any step has made, or the largest share of what all of a step makes,
whichever is less, and a part of the range seen beyond that, as nobody knows the most that there is;
what never varied has no slack. Imports newest and prepared. Rejected: a plan for each step, as none
comes again; one for the largest step so far, which bounds nothing; room for the most seen, without
slack, as no step makes the most everywhere: one of 600 steps then took 1 % more than its limit.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowtide.learning.newest import Newest
from lowtide.running.prepared import Signature

LARGER = 1.15  # where steps grow, plans are also made for this many times the bytes
_KEPT = 8  # kinds of steps
_MOST = 1 << 62  # bytes: a gradient of something expanded may have more, and is never made
_COMPARED = 4  # steps of a kind
_FEWEST = 3  # steps without a plan of their own before they are planned for together
_REMEMBERED = 1000  # steps
_NOTABLE = 1.05  # times the bytes, from which on one step makes more than another
_SMALLER = 0.85  # of the bytes of the bounds for all steps, the most that those for some have

Sizes = tuple[tuple[int, ...], ...]
"""For each operation, the bytes that it makes, and those of the gradients that it wants."""

_Kind = tuple[int, int, int]  # hashed, as it is kept for long


@dataclass(slots=True)
class _Seen:
    """What the steps of one kind have made so far."""

    least: array[int]
    most: array[int]
    least_share: array[float]  # of what all operations of a step make
    most_share: array[float]
    whole: int  # the most bytes of a step
    last: list[array[int]] = field(default_factory=list)
    apart: bool = False  # whether one of two steps made more here, and the other there
    steps: int = 0
    missed: int = 0  # steps that no plan covered, since bounds were last asked for
    asked: int = 0  # how often they were
    missing: int = 0  # bytes that a step took above the peak of bounds


class Varying:
    """What the operations of each kind of step make: the same operations on the same values.

    Attributes:
        again: whether the step that has just ended had come before, exactly as it was.
    """

    def __init__(self) -> None:
        self._seen = Newest[_Kind, _Seen](_KEPT)
        self._came = Newest[int, None](_REMEMBERED)  # hashes of steps
        self.again = False

    def came(self, seen: Sequence[Signature]) -> None:
        """A step has ended that followed no plan of its own."""
        step = hash(tuple(seen))
        self.again = step in self._came
        self._came.put(step, None)

    def note(self, seen: Sequence[Signature], place: int) -> None:
        """Learn the sizes of such a step."""
        kind, sizes = _kind(seen, place), _row(seen)
        whole = max(sum(sizes), 1)
        shares = array("d", [size / whole for size in sizes])
        known = self._seen.get(kind)
        if known is None:
            known = _Seen(sizes, sizes, shares, shares, whole)
        known.apart = known.apart or any(_differ(sizes, other) for other in known.last)
        known.last = [sizes, *known.last][:_COMPARED]
        known.least = array("q", map(min, known.least, sizes))
        known.most = array("q", map(max, known.most, sizes))
        known.least_share = array("d", map(min, known.least_share, shares))
        known.most_share = array("d", map(max, known.most_share, shares))
        known.whole = max(known.whole, whole)
        known.steps += 1
        known.missed += 1
        self._seen.put(kind, known)

    def apart(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether steps like this one are known to vary each in its own way."""
        known = self._seen.get(_kind(seen, place))
        return known is not None and known.apart and known.steps >= _FEWEST

    def due(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether bounds are worth a plan: more steps were not covered since the last ones than
        there were bounds before."""
        known = self._seen.get(_kind(seen, place))
        return known is not None and known.missed > known.asked

    def served(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether steps like this one were planned for all together: a plan of its own would serve
        none of them."""
        known = self._seen.get(_kind(seen, place))
        return known is not None and known.asked > 0 and not self.again

    def lacked(self, seen: Sequence[Signature], place: int, nbytes: int) -> None:
        """A step that followed bounds took so many bytes more than they predict."""
        known = self._seen.get(_kind(seen, place))
        if known is not None:
            known.missing += max(nbytes, 0)

    def missing(self, seen: Sequence[Signature], place: int) -> int:
        """What to keep free beside what the bounds predict."""
        known = self._seen.get(_kind(seen, place))
        return 0 if known is None else known.missing

    def bounds(self, seen: Sequence[Signature], place: int) -> Sizes:
        """For all steps like this one, which is known."""
        known = self._seen[_kind(seen, place)]
        known.missed, known.asked = 0, known.asked + 1
        return _sizes(_bounds(known, known.whole), seen)

    def smaller(self, seen: Sequence[Signature], place: int) -> Sizes | None:
        """For steps like this one, which is known, with about as many bytes together; None: they
        take about as much as those of the largest."""
        known, sizes = self._seen[_kind(seen, place)], _row(seen)
        most = list(map(max, _bounds(known, sum(sizes)), sizes))
        if sum(most) >= _SMALLER * sum(_bounds(known, known.whole)):
            return None
        return _sizes(most, seen)


def sizes_of(seen: Sequence[Signature]) -> Sizes:
    """The sizes in a step's signatures."""
    return tuple([(*made, wanted) for _, made, _, wanted in seen])


def total(sizes: Sizes) -> int:
    """All of them together."""
    return sum(map(sum, sizes))


def _row(seen: Sequence[Signature]) -> array[int]:
    every = [min(size, _MOST) for _, made, _, wanted in seen for size in (*made, wanted)]
    return array("q", every)


def _sizes(row: Iterable[int], seen: Sequence[Signature]) -> Sizes:
    numbers = iter(row)
    return tuple([tuple([next(numbers) for _ in (*made, wanted)]) for _, made, _, wanted in seen])


def _kind(seen: Sequence[Signature], place: int) -> _Kind:
    """What tells steps from others, whatever their sizes."""
    operations = tuple([(name, len(made), reads) for name, made, reads, _ in seen])
    return place, sum(len(made) + 1 for _, made, _, _ in seen), hash(operations)


def _differ(one: array[int], other: array[int]) -> bool:
    """Whether each makes notably more than the other somewhere."""
    more = any(a > _NOTABLE * b for a, b in zip(one, other, strict=True))
    return more and any(b > _NOTABLE * a for a, b in zip(one, other, strict=True))


def _bounds(known: _Seen, whole: int) -> list[int]:
    """The bounds for steps that make about so many bytes in all.

    Of sizes as they are drawn from a normal distribution, four steps give a bound of three standard
    deviations, and thirty four.
    """
    part, most = 0.5 + 2 / known.steps, LARGER * whole
    bytes_ = zip(known.least, known.most, strict=True)
    shares = zip(known.least_share, known.most_share, strict=True)
    return [
        min(
            high + math.ceil(part * (high - low)),
            math.ceil(most * (larger + part * (larger - smaller))),
        )
        for (low, high), (smaller, larger) in zip(bytes_, shares, strict=True)
    ]
