"""Which steps a budget measures, and which it plans.

Problem: to measure a step and to plan it pays if a step like it comes again; loops alternate
between a few steps, end an epoch with a short batch, or never take the same step twice. Invariant:
what is decided here costs time or saves it and never decides whether the limit holds: a step that
was measured above its limit is always planned, or refused. Imports prepared. Rejected: planning
every step that no plan covers, which took a hundred times a step's own time where teacher forcing
is drawn by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.prepared import Prepared, Signature

_LESSONS = 2  # measured steps that a plan is made from
_AWAITED = 16  # steps that are measured in vain for one that was not
_PATIENCE = 4  # plans that nobody followed, for each time that a step is to come before it has one
_COUNTED = 1000


class Effort:
    """What a budget remembers of its steps for this; one for each budget."""

    def __init__(self) -> None:
        self._awaited = 0  # measured steps to come in which one that has not been may come
        self._barren = 0  # plans that were made and not followed
        self._came: dict[int, int] = {}  # how often steps came that no plan covers

    def to_measure(self, expected: Prepared | None, known: Iterable[Prepared]) -> bool:
        """Whether to measure a step that begins now."""
        if expected is None or expected.lessons < _LESSONS:
            return True
        return self._awaited > 0 and not all(prepared.measured for prepared in known)

    def followed(self) -> None:
        """A step went by one of the plans."""
        self._barren //= 2

    def again(self, prepared: Prepared) -> bool:
        """Whether to plan a step anew that followed a plan and was measured."""
        self._awaited = max(0, self._awaited - 1)
        return prepared.lessons < _LESSONS

    def first(self, seen: Sequence[Signature]) -> bool:
        """Whether to plan a step that no plan covered."""
        key = hash(tuple(seen))
        came = self._came.pop(key, 0)
        self._came[key] = came + 1
        if len(self._came) > _COUNTED:
            del self._came[next(iter(self._came))]
        if came < self._barren // _PATIENCE:
            return False
        self._barren += 1
        self._awaited = _AWAITED
        return True
