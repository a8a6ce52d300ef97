"""The plans that a budget has made, for the steps that they were made for.

Problem: shapes and branches change from step to step, and a step that was planned once should not
be planned again. Invariant: a plan is for one forward, operation by operation, at one place among
the steps of a context, for the leaves that collect gradients: an attack on the input and the
training step after it run the same forward, but other backwards. Imports prepared. Rejected: a plan
a shape, as shapes do not tell branches apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.prepared import Prepared, Signature

_KEPT = 32
PLACES = 16
"""Steps of one context that are told apart; those after them are taken for one another."""


class KnownPlans:
    """Plans, the most recently used first."""

    def __init__(self) -> None:
        self._plans: list[Prepared] = []

    def __iter__(self) -> Iterator[Prepared]:
        return iter(self._plans)

    def add(self, prepared: Prepared) -> None:
        """A plan, in place of the one that the same step had."""
        key = prepared.signatures, prepared.seen.place
        others = [p for p in self._plans if (p.signatures, p.seen.place) != key]
        self._plans = [prepared, *others][:_KEPT]

    def expected(self, place: int, *, any_leaves: bool = False) -> Prepared | None:
        """The plan that was followed last at this place in its context, for the leaves that collect
        gradients now; for others if need be, where that is known to change within a step."""
        here = [prepared for prepared in self._plans if prepared.seen.place == place]
        for prepared in here:
            if prepared.seen.current():
                return prepared
        return here[0] if here and any_leaves else None

    def of_step(
        self,
        seen: list[Signature],
        place: int,
        *,
        whole: bool = False,
        other_than: Prepared | None = None,
    ) -> Prepared | None:
        """The plan for a step that began like this, or that was the whole of it."""
        count = len(seen)
        for prepared in self._plans:
            if prepared is other_than or prepared.seen.place != place:
                continue
            if whole and prepared.seen.forward != count:
                continue
            if prepared.seen.current() and list(prepared.signatures[:count]) == seen:
                self._plans.remove(prepared)
                self._plans.insert(0, prepared)
                return prepared
        return None
