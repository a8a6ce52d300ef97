"""The plans that a budget has made, for the steps that they were made for.

Problem: shapes and branches change from step to step, and a step that was planned once should not
be planned again. Invariant: a plan is for one forward, operation by operation, at one place among
the steps of a context: an attack on the input and the training step after it run the same forward,
but other backwards. Imports prepared. Rejected: a plan a shape, as shapes do not tell branches
apart.
"""

from __future__ import annotations

from lowtide.prepared import Prepared, Signature

_KEPT = 32
PLACES = 16
"""Steps of one context that are told apart; those after them are taken for one another."""


class KnownPlans:
    """Plans, the most recently used first."""

    def __init__(self) -> None:
        self._plans: list[Prepared] = []

    def add(self, prepared: Prepared) -> None:
        """A plan, in place of the one that the same step had."""
        key = prepared.signatures, prepared.seen.place
        others = [p for p in self._plans if (p.signatures, p.seen.place) != key]
        self._plans = [prepared, *others][:_KEPT]

    def at(self, place: int) -> Prepared | None:
        """The plan that a step at this place in its context followed last."""
        return next((p for p in self._plans if p.seen.place == place), None)

    def of_step(self, seen: list[Signature], place: int, *, whole: bool) -> Prepared | None:
        """The plan for a step that began like this, or that was the whole of it."""
        count = len(seen)
        for prepared in self._plans:
            if prepared.seen.place != place or (whole and prepared.seen.forward != count):
                continue
            if list(prepared.signatures[:count]) == seen:
                self._plans.remove(prepared)
                self._plans.insert(0, prepared)
                return prepared
        return None
