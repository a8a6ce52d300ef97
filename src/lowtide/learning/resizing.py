"""Plans for steps of the same operations as known ones, on other sizes.

Problem: where batches have other lengths, or data decides how many rows a part of the network gets,
hardly any step comes again. Invariant: a plan for larger steps is a bound, which each operation of
a step that follows it is checked against; one that was measured above its limit is given up.
Imports engine, knowledge, learned, newest and varying. Rejected: planning each such step when it
comes, which takes many times its own time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lowtide import engine
from lowtide.learning.knowledge import Knowledge
from lowtide.learning.learned import MOST_GROWN, Learned
from lowtide.learning.newest import Newest
from lowtide.learning.varying import LARGER, Varying, sizes_of
from lowtide.observing.observer import Observer
from lowtide.running.decide import StepDecisions
from lowtide.running.prepared import Prepared, Signature, signatures_of

_NOTED = 12  # of the steps that a plan for larger ones covers
_PLANS = 64  # of which this is counted


class Resizing:
    """The part of a budget that plans for other sizes."""

    def __init__(self, knows: Knowledge) -> None:
        self._ranks, self._allowance, self._plans = knows.ranks, knows.allowance, knows.plans
        self._effort, self._beside = knows.effort, knows.beside
        self._varying = Varying()
        # For a plan, how many of the steps that it covered were noted.
        self._noted = Newest[int, int](_PLANS)

    def came(self, seen: Sequence[Signature], place: int) -> None:
        """A step came that followed no plan."""
        self._varying.came(seen)
        self._varying.note(seen, place)

    def served(self, seen: Sequence[Signature], place: int) -> bool:
        """Whether steps like this one were planned for all together: a plan of its own would serve
        none of them."""
        return self._varying.served(seen, place)

    # ------------------------------------------------------------------ larger steps

    def _larger(self, learned: Learned, seen: Sequence[Signature], place: int) -> Learned | None:
        """For a step that outgrew the known ones: a still larger step like a learned one. None if
        it can follow a plan as it is, or is too much larger."""
        near, ratio = self._plans.outgrown(seen, place)
        if near is None:
            return None
        if not self._varying.apart(seen, place):
            return learned.larger(min(ratio, MOST_GROWN))
        found = learned.bounded(self._varying.bounds(seen, place))
        missing = self._varying.missing(seen, place)
        return found if found is None else replace(found, missing=missing)

    def plan_larger(self, learned: Learned, limit: int) -> None:
        """If a measured step outgrew the known ones, the next one may be larger still."""
        larger = self._larger(learned, learned.signatures, learned.seen.place)
        if larger is not None:
            self._beside.ask(partial(larger.search, limit, engine.annealing()))

    def grown(self, observer: Observer) -> bool:
        """For an unmeasured step that is larger than the measured ones, plan for larger steps: a
        model of its own backward would need a wider margin, and it is not likely to recur."""
        seen, place = signatures_of(observer.ops), observer.place
        near, ratio = self._plans.outgrown(seen, place)
        if near is None:
            return False
        patient = self._effort.patient()
        if self._varying.apart(seen, place):
            worth = patient or self._varying.due(seen, place)
            if not worth and self._varying.served(seen, place):
                return True
        else:
            worth = ratio <= (MOST_GROWN if patient else LARGER)
        larger = self._larger(Learned.of(near), seen, place) if worth else None
        if larger is None:
            return False
        limit = self._allowance.under_plan_of(near.plain_peak, observer.before)
        found = larger.search(limit, engine.annealing())
        if found is None:
            self._effort.in_vain()
            return False
        self._plans.add(found)
        return True

    # ------------------------------------------------------------------ smaller steps

    def outdone(self, larger: Prepared, decisions: StepDecisions, observer: Observer) -> bool:
        """Whether a measured step that followed the plan for a larger one should have its own."""
        assert observer.timeline is not None
        before = observer.before
        if observer.timeline.peak > self._allowance.under_plan_of(larger.plain_peak, before):
            if larger.apart:
                short = observer.timeline.peak - larger.peak
                self._varying.lacked(decisions.seen, larger.seen.place, short)
            self._plans.remove(larger)
            return True
        self._plans.confirm(larger)
        if self._varying.apart(decisions.seen, larger.seen.place):
            self.plan_smaller(larger, decisions.seen)
            return False
        return self._effort.smaller(larger, decisions.seen, measured=True)

    def plan_smaller(self, larger: Prepared, seen: Sequence[Signature]) -> None:
        """Plan a step that followed the plan for a larger one, if that pays, from what is known of
        that."""
        if self._ranks is not None or self._beside.busy or len(seen) != len(larger.signatures):
            return
        self._varying.came(seen)
        noted = _NOTED if larger.apart else self._noted.get(larger.digest, 0)
        if noted < _NOTED:
            self._noted.put(larger.digest, noted + 1)
        worth = self._effort.smaller(larger, seen, measured=False)
        worth = worth or (self._varying.again and larger.apart)
        if worth or noted < _NOTED:
            self._varying.note(seen, larger.seen.place)
        if not worth:
            return
        smaller = self._smaller(larger, seen)
        if smaller is None:
            return
        before = larger.seen.before
        limit = self._allowance.under_plan_of(larger.plain_peak, before)
        polish = engine.annealing()

        def search() -> Prepared | None:
            begin = time.perf_counter()
            found = smaller.search(limit, polish)
            self._effort.spent(time.perf_counter() - begin, smaller.seconds)
            return None if found is None else replace(found, measured=False)

        self._beside.ask(search)

    def _smaller(self, larger: Prepared, seen: Sequence[Signature]) -> Learned | None:
        """What is known of a step that followed the plan for a larger one, or of all steps that
        make about as much."""
        learned, place = Learned.of(larger), larger.seen.place
        if not self._varying.apart(seen, place):
            return learned.of_sizes(sizes_of(seen))
        if self._varying.again:
            return replace(learned.of_sizes(sizes_of(seen)), grown=False, apart=False)
        sizes = self._varying.smaller(seen, place)
        if sizes is None and not larger.apart:
            sizes = self._varying.bounds(seen, place)
        if sizes is None:
            return None
        now = sizes_of(larger.signatures)
        most = [tuple(map(min, one, other)) for one, other in zip(now, sizes, strict=True)]
        missing = self._varying.missing(seen, place)
        return replace(learned.of_sizes(tuple(most)), grown=True, apart=True, missing=missing)
