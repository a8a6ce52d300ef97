"""The plans that a budget has made, and which step each is for.

Problem: shapes and branches change from step to step, and a step that was planned once should not
be planned again. Invariant: a plan is for one forward, operation by operation, at one place among
the steps of a context, for the leaves that get gradients, and for the gradients to be allocated: an
attack on the input and the training step after it run the same forward, but different backwards,
and so do the first and the second step of an accumulation. A smaller step with the same operations
may follow it too: at each moment it has no more in memory. Imports effort, prepared and turns.
Rejected: one plan per shape, as shapes do not tell branches apart, and never recur where each batch
has another length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.learning.effort import LESSONS
from lowtide.learning.turns import Turns
from lowtide.running.prepared import Prepared, Signature, covers, outgrown_by

_KEPT = 32
_BASES = 8
_NEAR, _MORE = 0.85, 1.05  # of the bytes of new bounds, between which older ones are replaced
PLACES = 16
"""Steps of one context that are told apart; all later ones count as being at one place."""


class KnownPlans:
    """Plans, the most recently used first.

    Attributes:
        version: increases with each change.
    """

    def __init__(self) -> None:
        self._plans: list[Prepared] = []
        self._bases: list[Prepared] = []  # what bounds were made from, the latest first
        self._turns = Turns()
        self._same: dict[int, list[Prepared]] = {}  # a plan's id -> the result of `_of_same_step`
        self.version = 0

    def __iter__(self) -> Iterator[Prepared]:
        return iter(self._plans)

    def add(self, prepared: Prepared) -> None:
        """Add a plan, in place of the one that the same step had. One for all steps that vary each
        in its own way takes the place of those of single ones, none of which comes again."""
        others = [known for known in self._plans if not _same_step(known, prepared)]
        if prepared.apart and prepared.measured:
            replaced = [known for known in self._plans if _replaced_by(prepared, known)]
            others = [known for known in others if not any(known is one for one in replaced)]
            self._bases = [*filter(_is_base, replaced), *self._bases][:_BASES]
        self._change([prepared, *others])
        if len(self._plans) > _KEPT:
            last = next(filter(self._covered, reversed(self._plans)), self._plans[-1])
            self._change([known for known in self._plans if known is not last])

    def followed(self, prepared: Prepared) -> None:
        """A step followed this plan to its end."""
        self._turns.followed(prepared)

    def confirm(self, prepared: Prepared) -> None:
        """A step that followed this plan was measured and kept its limit."""
        self._exchange(prepared, replace(prepared, lessons=prepared.lessons + 1, tried=True))

    def tried(self, prepared: Prepared) -> Prepared:
        """A step that followed this plan kept its limit, and nothing else is to be learned from it;
        returns the plan, as it is known from now on."""
        if prepared.tried:
            return prepared
        known = replace(prepared, tried=True)
        self._exchange(prepared, known)
        return known

    def _exchange(self, old: Prepared, new: Prepared) -> None:
        self._change([new if known is old else known for known in self._plans])

    def unmeasured(self) -> bool:
        """Whether there is a plan for a step that was never measured.

        A plan from a dry run or a file has leaves of its own, so it stays next to the plan for the
        real step, and does not count. Nor does one whose step was measured since: a plan from that
        is on its way. Nor does one for steps none of which comes again.
        """
        return any(
            not (prepared.measured or prepared.tried or prepared.apart)
            and not any(known.measured and known.same_forward(prepared) for known in self._plans)
            for prepared in self._plans
        )

    def remove(self, prepared: Prepared) -> None:
        """A step that followed this plan exceeded its limit: forget the plan."""
        self._change([known for known in self._plans if not _same_step(known, prepared)])

    def outgrown(self, seen: Sequence[Signature], place: int) -> tuple[Prepared | None, float]:
        """Among the plans of measured steps with the same operations on fewer bytes, the nearest,
        and how many times larger this step is; None if it can follow some plan as it is."""
        alike = [
            known
            for known in (*self._possible(len(seen), place, False, None), *self._bases)
            if len(known.signatures) == len(seen)
            and known.seen.place == place
            and known.seen.current()
            and all(
                planned[0] == ran[0] and planned[2] == ran[2] and len(planned[1]) == len(ran[1])
                for planned, ran in zip(known.signatures, seen, strict=True)
            )
        ]
        ratios = [outgrown_by(known.signatures, seen) for known in alike]
        if 1.0 in ratios:
            return None, 1.0
        pairs = zip(alike, ratios, strict=True)
        measured = [(known, by) for known, by in pairs if _is_base(known)]
        return min(measured, key=lambda pair: pair[1], default=(None, 1.0))

    def _covered(self, prepared: Prepared) -> bool:
        """Whether the step of this plan could follow another one."""
        step, place = prepared.signatures, prepared.seen.place
        return any(
            len(known.signatures) == len(step) and all(map(covers, known.signatures, step))
            for known in self._possible(len(step), place, False, prepared)
        )

    def expected(self, place: int, *, any_leaves: bool = False) -> Prepared | None:
        """The plan that the next step at this place in the context will most likely follow, for the
        leaves that get gradients now: the one that was followed last, unless steps take turns that
        are known. `any_leaves`: else one for others, as they change within a step."""
        here = [prepared for prepared in self._plans if prepared.seen.place == place]
        turn = self._turns.next(place)
        if turn is not None:
            here.sort(key=lambda prepared: prepared.digest != turn)
        for first in here:
            if first.seen.current():
                same = self._of_same_step(first)
                return _for_gradients([p for p in same if p is first or p.seen.current()])
        return here[0] if here and any_leaves else None

    def of_step(
        self,
        seen: list[Signature],
        place: int,
        *,
        whole: bool,
        other_than: Prepared | None,
    ) -> Prepared | None:
        """The plan for a step that began with these operations, or consists of them if `whole`."""
        count = len(seen)
        for prepared in self._possible(count, place, whole, other_than):
            if list(prepared.signatures[:count]) == seen and prepared.seen.current():
                return self._followed(prepared, other_than)
        return None

    def covering(
        self,
        seen: list[Signature],
        place: int,
        *,
        whole: bool,
        other_than: Prepared | None,
    ) -> Prepared | None:
        """The plan for the smallest of the larger steps: those with the same operations so far,
        none of which made fewer bytes."""
        found = [
            prepared
            for prepared in self._possible(len(seen), place, whole, other_than)
            if all(map(covers, prepared.signatures, seen)) and prepared.seen.current()
        ]
        if not found:
            return None
        last = len(seen) - 1
        least = min(found, key=lambda known: (sum(known.signatures[last][1]), -known.allocates))
        return self._followed(least, other_than)

    def _possible(
        self, count: int, place: int, whole: bool, other_than: Prepared | None
    ) -> Iterator[Prepared]:
        """Plans for steps of exactly `count` operations if `whole`, else of at least as many."""
        for prepared in tuple(self._plans):
            length = prepared.seen.forward if whole else len(prepared.signatures)
            fits = length == count if whole else length >= count
            other = other_than is None or prepared.plan is not other_than.plan
            if other and prepared.seen.place == place and fits:
                yield prepared

    def _followed(self, prepared: Prepared, other_than: Prepared | None) -> Prepared:
        """This plan, or that of the same step for the gradients to be allocated now."""
        prepared = _for_gradients(
            [
                known
                for known in self._of_same_step(prepared)
                if (other_than is None or known.plan is not other_than.plan)
                and known.seen.current()
            ]
        )
        if prepared is not self._plans[0]:
            self._change([prepared, *(known for known in self._plans if known is not prepared)])
        return prepared

    def _of_same_step(self, prepared: Prepared) -> list[Prepared]:
        """The plans for the same forward as this one, whatever the gradients."""
        same = self._same.get(id(prepared))
        if same is None:
            same = self._same[id(prepared)] = [
                known for known in self._plans if known.same_forward(prepared)
            ]
        return same

    def _change(self, plans: list[Prepared]) -> None:
        self._plans = plans
        self._same.clear()
        self.version += 1

    def with_gradients(self, other: Prepared) -> Prepared | None:
        """The plan for the same step as this one, for the gradients to be allocated now."""
        for prepared in self._plans:
            if (
                prepared.same_forward(other)
                and prepared.seen.current()
                and prepared.seen.same_gradients()
            ):
                return prepared
        return None


def _same_step(one: Prepared, other: Prepared) -> bool:
    leaves = set(one.seen.parameters) == set(other.seen.parameters)
    return leaves and one.same_forward(other)


def _is_base(known: Prepared) -> bool:
    """Whether plans for other sizes can be made from it."""
    return known.measured and not known.grown


def _replaced_by(bounds: Prepared, known: Prepared) -> bool:
    """Whether steps of this plan can follow a new one as well, or the new bounds take the place of
    older ones: between bounds for much the same bytes, steps would only change back and forth."""
    if set(known.seen.parameters) != set(bounds.seen.parameters):
        return False
    if known.seen.place != bounds.seen.place or len(known.signatures) != len(bounds.signatures):
        return False
    if not known.apart:
        once = known.grown or known.lessons < LESSONS  # else its step has come again
        return once and all(map(covers, bounds.signatures, known.signatures))
    near = _NEAR * bounds.allocates <= known.allocates <= bounds.allocates * _MORE
    return near and all(
        new[0] == old[0] and new[2] == old[2]
        for new, old in zip(bounds.signatures, known.signatures, strict=True)
    )


def _for_gradients(plans: list[Prepared]) -> Prepared:
    """Among plans for one forward, that for the gradients to be allocated now, else for more."""
    if len(plans) > 1:
        for prepared in plans:
            if prepared.seen.same_gradients():
                return prepared
        for prepared in plans:
            if not prepared.seen.appeared():
                return prepared
    return plans[0]
