"""How a budget gets the plans of its steps.

Problem: a step is planned from one that was watched, may be refused for good, and a plan may turn
out wrong or wanting when it is followed. Invariant: every plan is for what the allowance says the
step may take, and only a step that no plan brings below that is refused. Imports engine, knowledge,
resizing, reported, learned, checkups, refusals, shortfalls, ranks; knows nothing of recordings.
Rejected: planning in `lowtide.loop`, which says when, not how.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lowtide import engine
from lowtide.errors import BudgetError
from lowtide.learning.checkups import CheckUps, as_planned
from lowtide.learning.depth import Depth
from lowtide.learning.effort import LESSONS, annealings
from lowtide.learning.knowledge import Knowledge
from lowtide.learning.learned import Learned
from lowtide.learning.partings import Partings
from lowtide.learning.ranks import Ranks, Step
from lowtide.learning.refusals import refusing
from lowtide.learning.reported import Reported
from lowtide.learning.resizing import Resizing
from lowtide.learning.shortfalls import Shortfalls
from lowtide.observing.graphs import graph_of
from lowtide.observing.observer import Observer
from lowtide.refusal import unrecorded
from lowtide.running.decide import StepDecisions
from lowtide.running.prepared import Prepared, signatures_of


class Planning:
    """The part of a budget that learns from its steps.

    Attributes:
        refusal: what the next step is refused with, if this was learned.
        check_ups, depth, partings: what is known of steps that followed their plans.
    """

    def __init__(self, knows: Knowledge, resizing: Resizing, reported: Reported) -> None:
        self._ranks, self._allowance, self._plans = knows.ranks, knows.allowance, knows.plans
        self._refused, self._effort, self._beside = knows.refused, knows.effort, knows.beside
        self._resizing, self._reported = resizing, reported
        self._news: dict[Step, Learned] = {}  # learned since the ranks have last planned
        self._wanted: dict[Step, None] = {}  # what of it this rank wants to plan
        self.check_ups = CheckUps()
        self.depth = Depth()
        self.partings = Partings()
        self._shortfalls = Shortfalls()
        self.refusal: BudgetError | None = None

    def _note(self, learned: Learned, ranks: Ranks | None = None) -> None:
        """Note what a watched step would take plain, and what its loss takes."""
        allowance = self._allowance
        allowance.plain_peak, allowance.outside = learned.plain_peak, learned.outside
        if self._ranks is not None and ranks is None:
            return  # the other ranks would not know, and would plan for other limits
        if learned.measured:
            self._note_peak(learned.plain_peak + learned.seen.before)

    def _note_peak(self, whole: int) -> None:
        if self._allowance.measured(whole):  # what did not fit into a smaller limit may now
            self._refused.clear()
            self.refusal = None
            self._effort.more_room()

    # ------------------------------------------------------------------ learning

    def followed(self, plan: Prepared, decisions: StepDecisions, far_below: bool) -> bool:
        """A step is over that followed this plan, far below its limit or not; returns whether it
        was recorded unwatched and went as planned to its end."""
        observer, covered = decisions.observer, decisions.covered
        self._effort.followed(
            plan,
            covered=covered,
            measured=observer is not None and observer.memory is not None,
            strange=decisions.strange is not None,
            far_below=far_below,
        )
        self._plans.followed(plan)
        if observer is not None:
            return False  # its requests were noted
        asked = decisions.event + 1
        if self.depth.strayed(plan, asked):
            self._plans.remove(plan)
        elif asked < len(plan.graph.events):
            self._asked_in_part(plan)
        elif covered:
            self._resizing.plan_smaller(plan, decisions.seen)
        else:
            return True
        return False

    def learn(self, observer: Observer, decisions: StepDecisions) -> None:
        """Plan the next step from one that was watched."""
        timeline, followed = observer.timeline, decisions.followed
        if timeline is not None:
            peak = timeline.peak + observer.before
            self._reported.measured(peak, signatures_of(observer.ops))
        if decisions.partial or decisions.estimated:
            return  # the next step will be recorded and watched, and keep nothing whole
        if timeline is not None:
            self._effort.measured(followed)
        elif followed is not None:
            return
        if followed is not None and timeline is not None:
            plain, before, covered = followed.plain_peak, observer.before, decisions.covered
            if timeline.peak <= self._allowance.of(plain, before, covered=covered):
                followed = self._plans.tried(followed)
        usual = self._as_usual(None if timeline is None else timeline.peak, followed)
        if decisions.check_up and not decisions.covered:
            self.check_ups.seen(new=not usual)
        if self.depth.shallower(signatures_of(observer.ops), len(observer.requests), followed):
            if followed is not None:
                self._asked_in_part(followed)
        elif not observer.requests:
            self._nothing_recorded(observer, followed)
        elif not self._of_another_size(observer, followed):
            self._plan_from(observer, decisions, followed, usual=usual)

    def _as_usual(self, peak: int | None, followed: Prepared | None) -> bool:
        """Whether a step took the memory that was predicted."""
        if as_planned(followed, peak):
            return True
        below = peak is not None and followed is not None and peak <= followed.peak
        return below and followed is not None and self.partings.concern(followed)

    def _of_another_size(self, observer: Observer, followed: Prepared | None) -> bool:
        """Whether steps like this one have been planned for now, as larger ones."""
        if self._ranks is not None:
            return False
        if followed is None:
            self._resizing.came(signatures_of(observer.ops), observer.place)
        return observer.timeline is None and self._resizing.grown(observer)

    def _plan_from(
        self,
        observer: Observer,
        decisions: StepDecisions,
        followed: Prepared | None,
        *,
        usual: bool,
    ) -> None:
        """Plan from what a step has shown, if that pays or it exceeded its limit. `usual`: it took
        the memory that was predicted."""
        timeline, learned = observer.timeline, self._learned(observer, followed)
        if self._ranks is None:
            self._note(learned)
        covered = followed is not None and decisions.covered
        if decisions.covered and followed is not None:
            outdone = self._resizing.outdone(followed, decisions, observer)
            if not outdone:
                return
        limit = self._allowance.planned(learned.plain_peak, learned.seen.before)
        kept = timeline is not None and timeline.peak <= limit
        over = timeline is not None and not kept
        if self._ranks is None:
            if over and (parted := decisions.parted or decisions.strange) is not None:
                self._make_room(*parted, learned, limit)
            elif over and timeline is not None and followed is not None and not covered:
                self._shortfalls.note(learned, timeline.peak)
            learned = self._shortfalls.with_room(self.partings.with_room(learned))
        more = followed is not None and len(observer.requests) > len(followed.graph.events)
        worth = covered or over or more or self._worth_planning(decisions, learned, usual)
        if self._ranks is not None:  # planned where all ranks enter the next step
            self._news[learned.step] = learned
            if worth:
                self._wanted[learned.step] = None
        elif worth and followed is not None and kept and not more:
            self._plan_better(learned, followed, limit, only_if_faster=decisions.check_up and usual)
        elif worth:
            without = followed is None or more  # a plan for all that was asked for
            self._plan_next(learned, kept=kept and without, left=observer.left())

    def _learned(self, observer: Observer, followed: Prepared | None) -> Learned:
        graph, measured = graph_of(observer), observer.timeline is not None
        if not measured:  # the loss of an earlier step is the best guess
            graph = replace(graph, turn=int(self._allowance.outside * graph.saved))
        lessons = measured + (0 if followed is None else followed.lessons)
        return Learned(graph, observer.seen(), observer.ran, measured, lessons)

    def _make_room(self, left: Prepared, index: int, learned: Learned, limit: int) -> None:
        """A step took more than its limit. It left a plan at an operation, or did there what that
        plan knows nothing of: it took this beside what that plan held, and will again."""
        found = self.partings.note(left, index, learned, limit)
        if found is not None:
            self._plans.add(found)

    def _asked_in_part(self, followed: Prepared) -> None:
        """The backward of a step that followed its plan asked for less than planned: what it passed
        over stayed in memory. Plan for that, as nothing shows whether it kept the limit."""
        if followed.graph == followed.graph.retained():  # planned for that already
            if self._ranks is None and self.depth.only_fewer():
                self._plans.remove(followed)
            return
        before = followed.seen.before
        limit = self._allowance.planned(followed.plain_peak, before)
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
            self._note_peak(peak)
        elif isinstance(self._allowance.limit, float):
            return
        limit = self._allowance.of(peak - before, before) + before
        if peak > limit:
            self.refusal = unrecorded(limit, peak, before)
            if self._ranks is None:
                self._refused.add(observer.seen(), self.refusal)
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
        """Plan the next step like this one, or refuse it.

        Args:
            learned: this one.
            ranks: those that plan it together; None: this rank alone does.
            kept: it kept the limit without a plan: its backwards were planned one by one, from what
                was there when each began. No plan for all of them may do that, and then the next
                step goes without a plan as well.
            left: bytes of neither gradients nor results that it has left, such as the state of an
                optimizer whose steps are hooks of the backward.
        """
        self._note(learned, ranks)
        before = learned.seen.before
        limit = self._allowance.planned(learned.plain_peak, before)
        seen, place = learned.signatures, learned.seen.place
        if self._ranks is None and kept and self._resizing.served(seen, place):
            self._resizing.plan_larger(learned, limit)
            return
        # Training waits for this plan, and a better one is soon searched for beside it: annealing
        # would take most of the wait. No group of ranks searches beside training.
        final = learned.lessons >= LESSONS or (learned.measured and self._ranks is not None)
        search = partial(learned.solve, limit, engine.annealing() if final else None)
        begin = time.perf_counter()
        plan, peak = search() if ranks is None else ranks.of_first(search)
        if self._ranks is None:
            self._effort.spent_first(time.perf_counter() - begin)
        allowed = self._allowance.of(learned.plain_peak, before)
        if peak > allowed and (learned.own is not None or learned.missing):
            learned = learned.alone()
            plan, peak = learned.solve(limit)
        if peak <= allowed:
            self._allowance.shortage.needs(peak + before)
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
            self._refuse(learned, allowed, plan.retain, everywhere=ranks is not None)
            return
        if self._ranks is None and learned.measured:
            self._resizing.plan_larger(learned, limit)
        self._plans.add(learned.prepared(plan, peak))

    def _refuse(
        self, learned: Learned, allowed: int, retain: Sequence[int], *, everywhere: bool
    ) -> None:
        """No plan brings a step like this one under what it may take. `everywhere`: all ranks learn
        this now."""
        seen, before = learned.seen, learned.seen.before
        last = self._reported.last
        followed = None if last is None else last.followed_unmeasured
        refused = refusing(learned.graph, allowed, retain, seen, measured=True, predicted=followed)
        if self._ranks is None or everywhere:  # else the other ranks would not know
            self._refused.add(seen, refused)
        if self._ranks is not None or not before or isinstance(self._allowance.limit, int):
            self.refusal = refused
        # Else the same step may have more room in the next context, where those before it leave
        # less: an optimizer's state is allocated once.

    def _plan_better(
        self, learned: Learned, followed: Prepared, limit: int, *, only_if_faster: bool
    ) -> None:
        """The step keeps its limit under its plan: confirm that, and search for a cheaper one."""
        self._plans.confirm(followed)
        search = learned.faster if only_if_faster else learned.search
        polish = engine.annealing(annealings(learned.seconds))
        self._beside.ask(partial(search, limit, polish))

    def agree(self, ranks: Ranks) -> None:
        """Plan alike on all ranks, or refuse on all of them. A collective of the group."""
        news, self._news = self._news, {}
        wanted, self._wanted = self._wanted, {}
        if not ranks.any(bool(wanted) or self.refusal is not None):
            return
        known = {**{learned.step: learned for learned in map(Learned.of, self._plans)}, **news}
        told = {step: learned.known for step, learned in known.items()}
        common = ranks.common(self._allowance.limit, wanted, told)
        for step, everywhere in common.items():  # another rank may want what this one has planned
            self._plan_next(known[step].as_known(everywhere), ranks)
        for step in wanted:
            if step not in common:
                self._plan_next(news[step])
        refused, self.refusal = self.refusal, None
        ranks.refuse_together(refused)
