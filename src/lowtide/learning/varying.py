"""Steps of the same operations whose sizes vary each in its own way.

Problem: where data decides how many rows an expert, a mask or a neighborhood has, no step is larger
than another in everything. Each outgrows every other's plan in some operation, and a plan for steps
that are so many times larger in everything recomputes far too much. Invariant: bounds are per
operation: the most that any step has made, or the largest share of what all of a step makes,
whichever is less, and a part of the range seen beyond that, as nobody knows the most that there is;
what never varied has no slack. Imports prepared. Rejected: a plan for each step, as none comes
again; one for the largest step so far, which bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lowtide.running.prepared import Signature

LARGER = 1.15  # where steps grow, plans are also made for this many times the bytes
_KEPT = 8  # kinds of steps
_COMPARED = 4  # steps of a kind
_NOTABLE = 1.05  # times the bytes, from which on one step makes more than another
_SMALLER = 0.85  # of the bytes of the bounds for all steps, the most that those for some have

_Size = TypeVar("_Size", int, float)
Sizes = tuple[tuple[int, ...], ...]
"""For each operation, the bytes that it makes, and those of the gradients that it wants."""

Shares = tuple[tuple[float, ...], ...]
"""The same as shares of what all operations make."""

Kind = tuple[int, tuple[tuple[str, int, tuple[int, ...]], ...]]


@dataclass(slots=True)
class _Seen:
    """What the steps of one kind have made so far."""

    least: Sizes
    most: Sizes
    shares: tuple[Shares, Shares]  # the least and the most
    whole: int  # the most bytes of a step
    last: list[Sizes] = field(default_factory=list)
    apart: bool = False  # whether one of two steps made more here, and the other there
    steps: int = 0
    missed: int = 0  # steps that no plan covered, since bounds were last asked for
    asked: int = 0  # how often they were


class Varying:
    """What the operations of each kind of step make: the same operations on the same values."""

    def __init__(self) -> None:
        self._seen: dict[Kind, _Seen] = {}

    def note(self, seen: Sequence[Signature], place: int) -> None:
        """A step has ended that followed no plan of its own."""
        kind, sizes = kind_of(seen, place), sizes_of(seen)
        whole = max(total(sizes), 1)
        shares = tuple([tuple([size / whole for size in made]) for made in sizes])
        known = self._seen.pop(kind, None)
        if known is None:
            known = _Seen(sizes, sizes, (shares, shares), whole)
        known.apart = known.apart or any(_differ(sizes, other) for other in known.last)
        known.last = [sizes, *known.last][:_COMPARED]
        known.least, known.most = _each(min, known.least, sizes), _each(max, known.most, sizes)
        least, most = known.shares
        known.shares = _each(min, least, shares), _each(max, most, shares)
        known.whole = max(known.whole, whole)
        known.steps += 1
        known.missed += 1
        self._seen[kind] = known
        if len(self._seen) > _KEPT:
            del self._seen[next(iter(self._seen))]

    def apart(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether steps like this one are known to vary each in its own way."""
        known = self._seen.get(kind_of(seen, place))
        return known is not None and known.apart

    def due(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether bounds are worth a plan: more steps were not covered since the last ones than
        there were bounds before."""
        known = self._seen.get(kind_of(seen, place))
        return known is not None and known.missed > known.asked

    def served(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether steps like this one were planned for all together: a plan of its own would serve
        none of them."""
        known = self._seen.get(kind_of(seen, place))
        return known is not None and known.asked > 0

    def bounds(self, seen: Sequence[Signature], place: int) -> Sizes:
        """For all steps like this one, which is known."""
        known = self._seen[kind_of(seen, place)]
        known.missed, known.asked = 0, known.asked + 1
        return _bounds(known, known.whole)

    def smaller(self, seen: Sequence[Signature], place: int) -> Sizes | None:
        """For steps like this one, which is known, with about as many bytes together; None: they
        take about as much as those of the largest."""
        known, sizes = self._seen[kind_of(seen, place)], sizes_of(seen)
        found = _each(max, _bounds(known, total(sizes)), sizes)
        return found if total(found) < _SMALLER * total(_bounds(known, known.whole)) else None


def sizes_of(seen: Sequence[Signature]) -> Sizes:
    """The sizes in a step's signatures."""
    return tuple([(*made, wanted) for _, made, _, wanted in seen])


def total(sizes: Sizes) -> int:
    """All of them together."""
    return sum(map(sum, sizes))


def kind_of(seen: Sequence[Signature], place: int) -> Kind:
    return place, tuple([(name, len(made), reads) for name, made, reads, _ in seen])


def _differ(one: Sizes, other: Sizes) -> bool:
    """Whether each makes notably more than the other somewhere."""
    more = less = False
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            more, less = more or a > _NOTABLE * b, less or b > _NOTABLE * a
    return more and less


def _each(
    which: Callable[[_Size, _Size], _Size],
    one: tuple[tuple[_Size, ...], ...],
    other: tuple[tuple[_Size, ...], ...],
) -> tuple[tuple[_Size, ...], ...]:
    return tuple([tuple(map(which, a, b)) for a, b in zip(one, other, strict=True)])


def _bounds(known: _Seen, whole: int) -> Sizes:
    """The bounds for steps that make about so many bytes in all.

    Of sizes as they are drawn from a normal distribution, four steps give a bound of three standard
    deviations, and thirty four.
    """
    part = 0.5 + 2 / known.steps
    most = _each(lambda low, high: high + math.ceil(part * (high - low)), known.least, known.most)
    shares = _each(lambda low, high: high + part * (high - low), *known.shares)
    usual = tuple([tuple([math.ceil(LARGER * whole * share) for share in made]) for made in shares])
    return _each(min, most, usual)
