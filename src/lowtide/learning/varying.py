"""Steps of the same operations whose sizes vary each in its own way.

Problem: where data decides how many rows an expert, a mask or a neighborhood has, no step is larger
than another in everything. Each outgrows every other's plan in some operation, and a plan for steps
that are so many times larger in everything recomputes far too much. Invariant: bounds are per
operation: the most that any step has made, and some more where that varied, as nobody knows the
most that there is; what never varied has no slack. Imports prepared. Rejected: a plan for each
step, as none comes again; one for the largest step so far, which bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.running.prepared import Signature

LARGER = 1.15  # where steps grow, plans are also made for this many times the bytes
_KEPT = 8  # kinds of steps
_ALIKE = 0.5  # of the growth in one operation, what all must grow by to be a larger step
_SMALLER = 0.85  # of the bytes of the bounds for all steps, the most that those for some have

Sizes = tuple[tuple[int, ...], ...]
"""For each operation, the bytes that it makes, and those of the gradients that it wants."""

_Kind = tuple[int, tuple[tuple[str, int, tuple[int, ...]], ...]]


@dataclass(slots=True)
class _Seen:
    """What the steps of one kind have made so far."""

    least: Sizes
    most: Sizes
    share: list[list[float]]  # the largest shares of a step's bytes
    steps: int = 0
    missed: int = 0  # steps that no plan covered, since bounds were last asked for
    asked: int = 0  # how often they were


class Varying:
    """What the operations of each kind of step make: the same operations on the same values."""

    def __init__(self) -> None:
        self._seen: dict[_Kind, _Seen] = {}

    def note(self, seen: Sequence[Signature], place: int) -> None:
        """A step has ended that followed no plan of its own."""
        kind, sizes = _kind(seen, place), sizes_of(seen)
        known = self._seen.pop(kind, None)
        if known is None:
            known = _Seen(sizes, sizes, [[0.0] * len(made) for made in sizes])
        known.least = _each(min, known.least, sizes)
        known.most = _each(max, known.most, sizes)
        whole = max(total(sizes), 1)
        for shares, made in zip(known.share, sizes, strict=True):
            shares[:] = map(max, shares, [size / whole for size in made])
        known.steps += 1
        known.missed += 1
        self._seen[kind] = known
        if len(self._seen) > _KEPT:
            del self._seen[next(iter(self._seen))]

    def due(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether bounds are worth a plan: more steps were not covered since the last ones than
        there were bounds before."""
        known = self._seen.get(_kind(seen, place))
        return known is not None and known.missed > known.asked

    def bounds(self, seen: Sequence[Signature], place: int) -> Sizes | None:
        """For all steps like this one; None: no two are known."""
        known = self._seen.get(_kind(seen, place))
        if known is None or known.least == known.most:
            return None
        known.missed, known.asked = 0, known.asked + 1
        return _bounds(known)

    def smaller(self, seen: Sequence[Signature], place: int) -> Sizes | None:
        """For steps like this one with about as many bytes together; None: they take about as much
        as those of the largest."""
        known = self._seen.get(_kind(seen, place))
        if known is None:
            return None
        sizes, most = sizes_of(seen), _bounds(known)
        whole = LARGER * total(sizes)
        found = tuple(
            [
                tuple(
                    min(bound, max(math.ceil(share * whole), size))
                    for bound, share, size in zip(bounds, shares, made, strict=True)
                )
                for bounds, shares, made in zip(most, known.share, sizes, strict=True)
            ]
        )
        return found if total(found) < _SMALLER * total(most) else None


def sizes_of(seen: Sequence[Signature]) -> Sizes:
    """The sizes in a step's signatures."""
    return tuple([(*made, wanted) for _, made, _, wanted in seen])


def total(sizes: Sizes) -> int:
    """All of them together."""
    return sum(map(sum, sizes))


def grew_apart(near: Sequence[Signature], seen: Sequence[Signature], ratio: float) -> bool:
    """Whether a step that has outgrown another by this ratio in some operation is not simply a
    larger one, as all of it grew much less."""
    together = total(sizes_of(seen)) / max(total(sizes_of(near)), 1)
    return together - 1 < _ALIKE * (ratio - 1)


def _kind(seen: Sequence[Signature], place: int) -> _Kind:
    return place, tuple([(name, len(made), reads) for name, made, reads, _ in seen])


def _each(which: Callable[[int, int], int], one: Sizes, other: Sizes) -> Sizes:
    return tuple([tuple(map(which, a, b)) for a, b in zip(one, other, strict=True)])


def _bounds(known: _Seen) -> Sizes:
    """The most so far, and a part of the range beyond it: of sizes as they are drawn from a normal
    distribution, four steps give a bound of three standard deviations, and thirty four."""
    part = 0.5 + 2 / known.steps

    def bound(least: int, most: int) -> int:
        return most + math.ceil(part * (most - least))

    return _each(bound, known.least, known.most)
