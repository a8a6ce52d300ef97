"""How a budget gets the plans of its steps.

Problem: a step is planned from one that was watched, may have other gradients to allocate or less
room than that one had, and may not fit at all. Invariant: every plan is for what the allowance says
the step may take, and only a step that no plan brings below that is refused. Imports engine,
resizing, learned, checkups, refusals, shortfalls, ranks; knows nothing of recordings. Rejected:
planning in `lowtide.loop`, which says when, not how.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lowtide import _compat, engine
from lowtide.errors import BudgetError
from lowtide.learning.checkups import CheckUps, as_planned
from lowtide.learning.depth import Depth
from lowtide.learning.effort import LESSONS, annealings
from lowtide.learning.learned import Learned
from lowtide.learning.partings import Partings
from lowtide.learning.ranks import Ranks, Step
from lowtide.learning.refusals import Refusals
from lowtide.learning.resizing import Resizing
from lowtide.learning.shortfalls import Shortfalls
from lowtide.memory import margins
from lowtide.observing.graphs import graph_of
from lowtide.observing.observer import Observer
from lowtide.observing.rebuild import with_gradients
from lowtide.observing.seen import Seen
from lowtide.planner import Graph, solve
from lowtide.report import refusal, unrecorded
from lowtide.running.decide import StepDecisions
from lowtide.running.prepared import Prepared, Signature, signatures_of


class Planning(Resizing):
    """The part of a budget that plans.

    Attributes:
        place: of the running step among those of the context.
    """

    def __init__(self, limit: int | float, ranks: Ranks | None) -> None:
        super().__init__(limit, ranks)
        self.place = 0
        self._news: dict[Step, Learned] = {}  # learned since the ranks have last planned
        self._wanted: dict[Step, None] = {}  # what of it this rank wants to plan
        self._check_ups = CheckUps()
        self._depth = Depth()
        self._partings = Partings()
        self._shortfalls = Shortfalls()
        self._freezes_inside = False  # steps freeze or unfreeze parameters while they run
        self._last: StepDecisions | None = None
        self._measured: tuple[int, tuple[Signature, ...]] | None = None  # the last peak, and whose
        self._peaks = 0, 0  # how many peaks were measured, and the highest of them
        self._refusal: BudgetError | None = None
        self._halfway: BudgetError | None = None  # raised in the forward that runs
        self._refused = Refusals()

    def _know(self, learned: Learned, ranks: Ranks | None = None) -> None:
        """Note what a watched step would take plain, and what its loss takes."""
        allowance = self.allowance
        allowance.plain_peak, allowance.outside = learned.plain_peak, learned.outside
        if self._ranks is not None and ranks is None:
            return  # the other ranks would not know, and would plan for other limits
        if learned.measured:
            self._knows_a_peak(learned.plain_peak + learned.seen.before)

    def _knows_a_peak(self, whole: int) -> None:
        if self.allowance.measured(whole):  # what did not fit into a smaller limit may now
            self._refused, self._refusal = Refusals(), None
            self._effort.more_room()

    # ------------------------------------------------------------------ plans

    def _expected(self) -> Prepared | None:
        """The plan that the step will most likely follow."""
        return self._plans.expected(self.place, any_leaves=self._freezes_inside)

    def matching(
        self, seen: list[Signature], *, whole: bool, other_than: Prepared | None = None
    ) -> Prepared | None:
        """Another plan, for a step that began like this one or, if `whole`, consisted of it."""
        found = self._plans.of_step(seen, self.place, whole=whole, other_than=other_than)
        if found is None:
            return None
        self.allowance.plain_peak = found.plain_peak  # a fraction is relative to it
        self.allowance.renew()
        return self._fitting(found)

    def covering(
        self, seen: list[Signature], *, whole: bool, other_than: Prepared | None
    ) -> Prepared | None:
        """The same for a larger step, than which this one has no more in memory at any moment."""
        found = self._plans.covering(seen, self.place, whole=whole, other_than=other_than)
        if found is None:
            return None
        self.allowance.follows(found.plain_peak)
        return self._fitting(found)

    def _for_this_backward(self, prepared: Prepared) -> Prepared:
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
        self.allowance.renew()
        assert self.allowance.now is not None
        return self._planned_again(prepared, graph, seen, self.allowance.now)

    def _fitting(self, prepared: Prepared) -> Prepared | None:
        """This plan, or another for the same step if earlier steps have left less room than when
        the plan was made; None: it would not fit."""
        allowance, before = self.allowance, self.allowance.before
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
        polish = engine.annealing() if old.measured and self._ranks is None else None
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

    # ------------------------------------------------------------------ learning

    def _learn(self, observer: Observer, decisions: StepDecisions) -> None:
        """Plan the next step from one that was watched."""
        if decisions.partial or decisions.estimated:
            return  # the next step will be recorded and watched, and keep nothing whole
        timeline, followed = observer.timeline, decisions.followed
        measured = timeline is not None
        if timeline is not None:
            peak = timeline.peak + observer.before
            self._measured = peak, signatures_of(observer.ops)
            self._peaks = self._peaks[0] + 1, max(self._peaks[1], peak)
            self._effort.measured(followed)
        if followed is not None:
            if timeline is None:
                return
            plain, before, covered = followed.plain_peak, observer.before, decisions.covered
            if timeline.peak <= self.allowance.of(plain, before, covered=covered):
                followed = self._plans.tried(followed)
        usual = as_planned(followed, None if timeline is None else timeline.peak)
        if timeline is not None and followed is not None and timeline.peak <= followed.peak:
            usual = usual or self._partings.concern(followed)
        if decisions.check_up and not decisions.covered:
            self._check_ups.seen(new=not usual)
        if self._depth.shallower(signatures_of(observer.ops), len(observer.requests), followed):
            if followed is not None:
                self._asked_in_part(followed)
            return
        if not observer.requests:
            self._nothing_recorded(observer, followed)
            return
        if self._ranks is None and followed is None:
            seen = signatures_of(observer.ops)
            self._varying.came(seen)
            self._varying.note(seen, observer.place)
        if self._ranks is None and not measured and self._grown(observer):
            return
        graph = graph_of(observer)
        if not measured:  # the loss of an earlier step is the best guess
            graph = replace(graph, turn=int(self.allowance.outside * graph.saved))
        lessons = measured + (0 if followed is None else followed.lessons)
        learned = Learned(graph, observer.seen(), observer.ran, measured, lessons)
        if self._ranks is None:
            self._know(learned)
        covered = followed is not None and decisions.covered
        if followed is not None and covered and not self._outdone(followed, decisions, observer):
            return
        limit = self.allowance.planned(learned.plain_peak, learned.seen.before)
        kept = timeline is not None and timeline.peak <= limit
        over = timeline is not None and not kept
        if self._ranks is None:
            if over and (parted := decisions.parted or decisions.strange) is not None:
                self._make_room(*parted, learned, limit)
            elif over and timeline is not None and followed is not None and not covered:
                self._shortfalls.note(learned, timeline.peak)
            learned = self._shortfalls.with_room(self._partings.with_room(learned))
        worth = covered or over or self._worth_planning(decisions, learned, usual)
        if self._ranks is not None:  # planned where all ranks enter the next step
            self._news[learned.step] = learned
            if worth:
                self._wanted[learned.step] = None
            return
        if not worth:
            return
        if followed is not None and kept:
            self._plan_better(learned, followed, limit, only_if_faster=decisions.check_up and usual)
        else:
            self._plan_next(learned, kept=kept and followed is None, left=observer.left())

    def _make_room(self, left: Prepared, index: int, learned: Learned, limit: int) -> None:
        """A step took more than its limit. It left a plan at an operation, or did there what that
        plan knows nothing of: it took this beside what that plan held, and will again."""
        found = self._partings.note(left, index, learned, limit)
        if found is not None:
            self._plans.add(found)

    def _asked_in_part(self, followed: Prepared) -> None:
        """The backward of a step that followed its plan asked for less than planned: what it passed
        over stayed in memory. Plan for that, as nothing shows whether it kept the limit."""
        if followed.graph == followed.graph.retained():
            return  # planned for that already
        before = followed.seen.before
        limit = self.allowance.planned(followed.plain_peak, before)
        found = Learned.of(followed).in_part().search(limit)
        if found is None:
            self._plans.remove(followed)
        else:
            self._plans.add(replace(found, of_plain=followed.plain_peak))

    def _nothing_recorded(self, observer: Observer, followed: Prepared | None) -> None:
        """None of this step's memory can be saved, as backward requested no recorded value.

        A step after others in the same context may partly be theirs, if its backward continues into
        their graphs. Its peak is then not that of a whole step, and no fraction can refuse it.
        """
        if observer.timeline is None:
            return
        before, peak = observer.before, observer.timeline.peak + observer.before
        if not before:
            self._knows_a_peak(peak)
        elif isinstance(self.allowance.limit, float):
            return
        limit = self.allowance.of(peak - before, before) + before
        if peak > limit:
            self._refusal = unrecorded(limit, peak, before)
            if self._ranks is None:
                self._refused.add(observer.seen(), self._refusal)
        elif self._ranks is None and not before:
            # A plan with nothing to decide: steps like it need not be watched.
            lessons = 1 + (0 if followed is None else followed.lessons)
            learned = Learned(graph_of(observer), observer.seen(), None, True, lessons)
            found = learned.prepared(*learned.solve(limit))
            self._plans.add(replace(found, tried=True))

    def _worth_planning(self, decisions: StepDecisions, learned: Learned, usual: bool) -> bool:
        """Whether to plan steps like a watched one that did not exceed its limit. `usual`: it took
        the memory that was predicted."""
        if decisions.check_up:  # times may have changed, which matters if anything is recomputed
            return not usual or decisions.followed is None or decisions.followed.bytes()[1] > 0
        if decisions.followed is not None:
            return self._effort.again(decisions.followed)
        return self._effort.first(decisions.seen, learned.seconds, measured=learned.measured)

    def _plan_next(
        self, learned: Learned, ranks: Ranks | None = None, *, kept: bool = False, left: int = 0
    ) -> None:
        """Plan the next step like this one, or refuse it. `kept`: this one kept the limit without
        a plan: its backwards were planned one by one, from what was there when each began. No plan
        for all of them may do that, and then the next one goes without a plan as well. `left`:
        bytes of neither gradients nor results that this one has left, such as the state of an
        optimizer whose steps are hooks of the backward."""
        self._know(learned, ranks)
        before = learned.seen.before
        limit = self.allowance.planned(learned.plain_peak, before)
        seen, place = learned.signatures, learned.seen.place
        if self._ranks is None and kept and self._varying.served(seen, place):
            self._plan_larger(learned, limit)
            return
        # Training waits for this plan, and a better one is soon searched for beside it: annealing
        # would take most of the wait. No group of ranks searches beside training.
        final = learned.lessons >= LESSONS or (learned.measured and self._ranks is not None)
        search = partial(learned.solve, limit, engine.annealing() if final else None)
        begin = time.perf_counter()
        plan, peak = search() if ranks is None else ranks.of_first(search)
        if self._ranks is None:
            self._effort.spent_first(time.perf_counter() - begin)
        allowed = self.allowance.of(learned.plain_peak, before)
        if peak > allowed and (learned.own is not None or learned.missing):
            learned = learned.alone()
            plan, peak = learned.solve(limit)
        if peak <= allowed:
            self.allowance.shortage.needs(peak + before)
        elif learned.measured and kept:
            self._effort.planless(learned.signatures)
            return
        elif (
            learned.measured
            and self._ranks is None
            and peak - left <= allowed
            and self._refused.not_yet(learned.seen)
        ):
            return  # what it has left is allocated once: the next one like it will tell
        elif learned.measured:
            followed = self._last.followed_unmeasured if self._last is not None else None
            graph = learned.graph
            refused = self._refusing(
                graph, allowed, plan.retain, learned.seen, measured=True, predicted=followed
            )
            if self._ranks is None or ranks is not None:  # else the other ranks would not know
                self._refused.add(learned.seen, refused)
            if self._ranks is not None or not before or isinstance(self.allowance.limit, int):
                self._refusal = refused
            # Else the same step may have more room in the next context, where those before it
            # leave less: an optimizer's state is allocated once.
            return
        if self._ranks is None and learned.measured:
            self._plan_larger(learned, limit)
        self._plans.add(learned.prepared(plan, peak))

    def _plan_better(
        self, learned: Learned, followed: Prepared, limit: int, *, only_if_faster: bool
    ) -> None:
        """The step keeps its limit under its plan: confirm that, and search for a cheaper one."""
        self._plans.confirm(followed)
        search = learned.faster if only_if_faster else learned.search
        polish = engine.annealing(annealings(learned.seconds))
        self._beside.ask(partial(search, limit, polish))

    def _agree(self, ranks: Ranks) -> None:
        """Plan alike on all ranks, or refuse on all of them. A collective of the group."""
        news, self._news = self._news, {}
        wanted, self._wanted = self._wanted, {}
        if not ranks.any(bool(wanted) or self._refusal is not None):
            return
        known = {**{learned.step: learned for learned in map(Learned.of, self._plans)}, **news}
        told = {step: learned.known for step, learned in known.items()}
        common = ranks.common(self.allowance.limit, wanted, told)
        for step, everywhere in common.items():  # another rank may want what this one has planned
            self._plan_next(known[step].as_known(everywhere), ranks)
        for step in wanted:
            if step not in common:
                self._plan_next(news[step])
        refused, self._refusal = self._refusal, None
        ranks.refuse_together(refused)

    # ------------------------------------------------------------------ refusals

    @staticmethod
    def _refusing(
        graph: Graph, limit: int, retain: Sequence[int], seen: Seen, **known: Any
    ) -> BudgetError:
        before, more = seen.before, seen.withheld
        return refusal(graph, limit + before, retain, before=before, more=more, **known)
