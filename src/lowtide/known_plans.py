"""The plans that a budget has made, for the steps that they were made for.

Problem: shapes and branches change from step to step, and a step that was planned once should not
be planned again. Invariant: a plan is for one forward, operation by operation, at one place among
the steps of a context, for the leaves that collect gradients, and for the gradients that it has to
allocate: an attack on the input and the training step after it run the same forward, but other
backwards, and so do the first and the second step of an accumulation. Imports prepared. Rejected:
a plan a shape, as shapes do not tell branches apart.
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
        others = [p for p in self._plans if _key(p) != _key(prepared)]
        self._plans = [prepared, *others][:_KEPT]

    def expected(self, place: int, *, any_leaves: bool = False) -> Prepared | None:
        """The plan that was followed last at this place in its context, for the leaves that collect
        gradients now; for others if need be, where that is known to change within a step."""
        here = [prepared for prepared in self._plans if prepared.seen.place == place]
        current = [prepared for prepared in here if prepared.seen.current()]
        if current:
            same = (p for p in current if p.signatures == current[0].signatures)
            return _for_gradients(list(same))
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
        found: list[Prepared] = []
        for prepared in self._plans:
            if prepared is other_than or prepared.seen.place != place:
                continue
            if whole and prepared.seen.forward != count:
                continue
            if found and prepared.signatures != found[0].signatures:
                continue
            if prepared.seen.current() and list(prepared.signatures[:count]) == seen:
                found.append(prepared)
        if not found:
            return None
        prepared = _for_gradients(found)
        self._plans.remove(prepared)
        self._plans.insert(0, prepared)
        return prepared

    def with_gradients(self, other: Prepared) -> Prepared | None:
        """The plan for the same step as this one with the gradients to allocate that there are."""
        for prepared in self._plans:
            if (
                prepared.signatures == other.signatures
                and prepared.seen.place == other.seen.place
                and prepared.seen.current()
                and prepared.seen.same_gradients()
            ):
                return prepared
        return None


def _key(prepared: Prepared) -> tuple[object, ...]:
    return prepared.signatures, prepared.seen.place, frozenset(prepared.seen.parameters)


def _for_gradients(plans: list[Prepared]) -> Prepared:
    """Of plans for one forward, that for the gradients to be allocated; else one for no fewer."""
    if len(plans) > 1:
        for prepared in plans:
            if prepared.seen.same_gradients():
                return prepared
        for prepared in plans:
            if not prepared.seen.appeared():
                return prepared
    return plans[0]
