"""Which plan a step follows, of those that are known.

Problem: a step may begin like several planned ones, may be smaller than one, and may have other
gradients to allocate or less room than when its plan was made. Invariant: a plan that is chosen
fits into what the allowance says the step may take; if none does, the step goes without. Imports
engine, knowledge, margins and the planner; knows nothing of recordings. Rejected: a plan made anew
for each step, which takes longer than the step.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide import _compat, engine
from lowtide.learning.knowledge import Knowledge
from lowtide.memory import margins
from lowtide.observing.rebuild import with_gradients
from lowtide.observing.seen import Seen
from lowtide.planner import Graph, solve
from lowtide.running.prepared import Prepared, Signature


class Choosing:
    """The part of a budget that chooses plans.

    Attributes:
        freezes_inside: steps freeze or unfreeze parameters while they run.
    """

    def __init__(self, knows: Knowledge) -> None:
        self._knows, self._plans, self._allowance = knows, knows.plans, knows.allowance
        self.freezes_inside = False

    def expected(self) -> Prepared | None:
        """The plan that the step will most likely follow."""
        return self._plans.expected(self._knows.place, any_leaves=self.freezes_inside)

    def matching(
        self, seen: list[Signature], *, whole: bool, other_than: Prepared | None = None
    ) -> Prepared | None:
        """Another plan, for a step that began like this one or, if `whole`, consisted of it."""
        place = self._knows.place
        found = self._plans.of_step(seen, place, whole=whole, other_than=other_than)
        if found is None:
            return None
        self._allowance.plain_peak = found.plain_peak  # a fraction is relative to it
        self._allowance.renew()
        return self.fitting(found)

    def covering(
        self, seen: list[Signature], *, whole: bool, other_than: Prepared | None
    ) -> Prepared | None:
        """The plan for a larger step, than which this one has no more in memory at any moment: of
        steps that began like this one or, if `whole`, consisted of it."""
        place = self._knows.place
        found = self._plans.covering(seen, place, whole=whole, other_than=other_than)
        if found is None:
            return None
        self._allowance.follows(found.plain_peak)
        return self.fitting(found)

    def for_this_backward(self, prepared: Prepared) -> Prepared:
        """This plan, or another for the same step if the backward has to allocate gradients that
        existed when the plan was made, or retains a graph that was released then."""
        seen = prepared.seen
        appeared = seen.appeared()
        retains = _compat.backward_retains_graph() and not seen.retains
        if not appeared and not retains:
            return prepared
        known = None if retains else self._plans.with_gradients(prepared)
        if known is not None:
            return known
        graph = with_gradients(prepared.graph, appeared.values())
        seen = replace(seen, parameters={**seen.parameters, **appeared})
        if retains:
            graph, seen = graph.retained(), replace(seen, retains=True)
        self._allowance.renew()
        assert self._allowance.now is not None
        return self._planned_again(prepared, graph, seen, self._allowance.now)

    def fitting(self, prepared: Prepared) -> Prepared | None:
        """This plan, or another for the same step if earlier steps have left less room than when
        the plan was made; None: it would not fit."""
        allowance = self._allowance
        before = allowance.before
        plain, room = allowance.plain_peak or 0, allowance.shortage.room
        if not prepared.measured and prepared.peak > allowance.of(plain, prepared.seen.before):
            # The best for what was computed from sizes. Without it, each backward is planned when
            # it begins, from what is there, and is refused if that does not fit.
            return None
        limit = allowance.planned(plain, before)
        short = room is not None and prepared.peak + before > room
        if prepared.peak <= limit or (before <= prepared.seen.before and not short):
            return prepared
        seen = replace(prepared.seen, before=before)
        found = self._planned_again(prepared, prepared.graph, seen, limit)
        fits = found.peak <= allowance.of(plain, before)
        if fits:
            allowance.shortage.needs(found.peak + before)
        return found if fits else None

    def _planned_again(self, old: Prepared, graph: Graph, seen: Seen, limit: int) -> Prepared:
        margin = int(limit * margins.of_step(old.measured))
        # Ranks plan alike here without communicating, so they use only what all of them have.
        polish = engine.annealing() if old.measured and self._knows.ranks is None else None
        solution = solve(graph, limit, margin=margin, polish_with=polish)
        found = Prepared.of(
            solution.plan,
            graph,
            solution.peak,
            seen,
            old.measured,
            old.lessons,
            grown=old.grown,
            apart=old.apart,
        )
        if found.peak <= limit:  # else the step is refused, and a later one may have more room
            self._plans.add(found)
        return found
