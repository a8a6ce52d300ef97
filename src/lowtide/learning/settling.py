"""How a budget plans the rest of a step, or refuses it: when its backward begins, or halfway.

Problem: a step that does not go as planned comes to its backward with whatever is still held, and
one that nobody knows may have nothing left to drop. Invariant: the rest is planned from what is
held; a step is refused only if no plan for the rest keeps the limit, and the error names a limit
under which it would run, or says that this is an estimate. Imports knowledge, guesses, learned,
refusal, refusals, rests, planner. Rejected: going on, which is how other tools run out of memory.
"""

from __future__ import annotations

from functools import partial

import torch

from lowtide import _compat, engine
from lowtide.errors import BudgetError
from lowtide.learning.guesses import least_peak, sparing_graph, sparingly, what_was_guessed
from lowtide.learning.knowledge import Knowledge
from lowtide.learning.learned import Learned
from lowtide.learning.refusals import refusing
from lowtide.learning.rests import Rests
from lowtide.memory import margins
from lowtide.observing.graphs import graph_before, graph_of, whole_graph, with_earlier
from lowtide.observing.observer import Observer
from lowtide.planner import Graph, minimum, plain_peak
from lowtide.planner.resume import forward_over, from_held, settled_in, with_margin
from lowtide.planner.simulate import Simulator
from lowtide.refusal import too_small
from lowtide.running.decide import StepDecisions
from lowtide.running.prepared import Prepared

_ROOM_FOR_REST = 50  # after this many operations, half of the live bytes is added for the rest


class Settling:
    """The part of a budget that deals with steps that are not as planned."""

    def __init__(self, knows: Knowledge) -> None:
        self._knows, self._allowance, self._refused = knows, knows.allowance, knows.refused
        self._rests = Rests()
        self._halfway: BudgetError | None = None  # what the forward that runs was refused with

    # ------------------------------------------------------------------ when backward begins

    def settle(self, decisions: StepDecisions, observer: Observer, *, again: bool = False) -> None:
        """The step differs from its plan: plan its backward from what is still held. `again`: an
        earlier backward of the step has run, and has decided for good what it held."""
        prepared, core = decisions.prepared, engine.core()
        observer.spans = None if core is None else core.reached()
        graph = graph_before(observer, decisions.first) if prepared is None else prepared.graph
        to_come = observer.to_come if prepared is None else []
        held = observer.held_from_forward()
        if not graph.events:
            return
        measured = prepared is not None and prepared.measured
        margin = margins.of_step(measured)
        plain = (
            plain_peak(graph)
            if prepared is None or prepared.of_plain is not None
            else prepared.plain_peak
        )
        later_steps, before = observer.place != self._knows.place, self._allowance.before
        if later_steps:
            # What this step holds is part of its graph. For those after it, it was left by others.
            before = max(observer.before, before - decisions.live[0])
        if self._allowance.plain_peak is None:
            self._allowance.plain_peak = plain
        limit = self._allowance.planned(plain, before)
        # A fraction of a modelled peak is not refused before that peak is measured.
        of_bytes = isinstance(self._allowance.limit, int)
        # A backward of a later step's that comes here is measured with that step.
        strict = (measured or (of_bytes and not decisions.partial)) and not later_steps
        later = self.further_behind(prepared)
        if prepared is not None and not again:
            find = partial(self._rests.of, graph)
        else:
            rest = forward_over(graph, held)
            if again:
                rest = settled_in(rest, observer.settled())
            if prepared is None:
                later = max(later, self._for_later(observer, rest, held))
            find = partial(with_margin, rest)
        found = find(held, limit - later, margin, search=strict)
        if later and found.result.peak > limit:
            found = find(held, limit, margin, search=strict)
        if found.result.peak > limit and (decisions.covered or _releases(prepared)):
            decisions.prepared, decisions.covered = None, False  # this smaller step may need less
            self.settle(decisions, observer, again=again)
            return
        if found.result.peak > self._allowance.of(plain, before) and strict:
            self._refuse_backward(decisions, observer, graph, held, found.retain)
        self._allowance.shortage.needs(found.result.peak + before)
        decisions.settle(found.retain[: graph.recorded], found.result.peak)
        if to_come:
            decisions.expects(to_come, lambda: Simulator(graph).lifetimes(found.retain))

    def settle_with_room(
        self, decisions: StepDecisions, observer: Observer, prepared: Prepared
    ) -> None:
        """The step is as planned, but its backward may take more in the graphs of earlier ones: let
        it hold less where that is possible, or else follow its plan."""
        graph, held = prepared.graph, observer.held_from_forward()
        limit = self._allowance.planned(prepared.plain_peak, self._allowance.before)
        margin = margins.of_step(prepared.measured)
        less = limit - self.further_behind(prepared)
        found = self._rests.of(graph, held, less, margin, search=True)
        if found.result.peak <= limit:
            decisions.settle(found.retain[: graph.recorded], found.result.peak)
        else:
            decisions.settle(prepared.plan.retain[: graph.recorded], prepared.peak)

    def further_behind(self, prepared: Prepared | None) -> int:
        """Bytes that this backward may take in the graphs of earlier steps, and that its plan has
        no room for, as far as that was not measured."""
        if prepared is None:
            return self._knows.behind.nbytes
        return 0 if prepared.tried else max(0, self._knows.behind.nbytes - prepared.seen.behind)

    @staticmethod
    def _for_later(observer: Observer, graph: Graph, held: set[int]) -> int:
        """Bytes that later backwards take more than this one, which keeps the graph for them: they
        may go through all of it, cannot drop what this one holds for good, and begin with the
        gradients that this one makes."""
        if not _compat.backward_retains_graph():
            return 0
        gradients = sum(nbytes for _, nbytes in observer.leaves.gradients.values())
        if not observer.passed:
            return gradients
        whole = forward_over(whole_graph(observer), held)
        return max(gradients, plain_peak(whole) - plain_peak(graph))

    def _refuse_backward(
        self,
        decisions: StepDecisions,
        observer: Observer,
        whole: Graph,
        held: set[int],
        retain: list[int],
    ) -> None:
        """Refuse a step of which no plan for the rest keeps the limit, unless only a guess says so.

        Args:
            decisions: of the step.
            observer: what was seen of it.
            whole: the step, before this backward.
            held: the values that are in memory.
            retain: the plan with the lowest peak that was found.
        """
        prepared, plain, before = decisions.prepared, plain_peak(whole), self._allowance.before
        allowed, least = self._allowance.of(plain, before), None
        graphs = [whole]
        sparing = sparing_graph(observer, decisions.first) if prepared is None else None
        if sparing is not None:
            limit = self._allowance.planned(plain, before)
            least = least_peak(sparing, held, limit)
            if least <= allowed:
                return
            graphs.append(sparing)
        observer.mark_end()
        again = (
            prepared is None
            and not decisions.estimated
            and any(
                self._planned_from_the_start(with_earlier(observer, graph), observer)
                for graph in graphs
            )
        )
        raise refusing(
            forward_over(whole, held),
            allowed,
            retain,
            observer.seen(),
            measured=prepared is not None and prepared.measured,
            again=again,
            plain=plain,
            least=least,
            guessed=[] if least is None else what_was_guessed(observer),
            unwatched=decisions.estimated,
        )

    def _planned_from_the_start(self, graph: Graph, observer: Observer) -> bool:
        """An unplanned step is refused at its backward, as its forward has dropped too little:
        whether there is a plan for it that fits, which the next step like it will follow."""
        if self._knows.ranks is not None:  # the other ranks would not know
            return False
        learned = Learned(graph, observer.seen(), None, measured=False, lessons=0)
        found = learned.search(self._allowance.planned(learned.plain_peak, self._allowance.before))
        if found is not None:
            self._knows.plans.add(found)
        return found is not None

    # ------------------------------------------------------------------ halfway

    def cannot_fit(
        self,
        observer: Observer,
        name: str,
        live: int,
        need: int,
        *,
        in_part: bool,
        model: torch.nn.Module | None,
    ) -> None:
        """Nothing is left to drop in an unplanned forward: refuse it if it exceeds the limit.

        `in_part`: a part of it cannot be dropped, see `Decisions.kept_whole` and `Decisions.woken`:
        it is refused only if the other part alone exceeds the limit. `model`: whose forward it is,
        if that is known.
        """
        limit, before = self._allowance.limit, self._allowance.before
        if not isinstance(limit, int) or live + need <= limit - before:
            return
        if in_part:
            # Only what was not recorded might take less than is allowed for it.
            before -= self._knows.compared.nbytes
            if not self._knows.compared.nbytes or live + need <= limit - before:
                return
        besides = before + (0 if model is None else observer.leaves.to_come(model))
        least, named = _least_and_named(observer, live, need, besides)
        refused = too_small(
            name,
            limit=limit,
            live=live,
            need=need,
            count=self._knows.compared.calls + len(observer.ops),
            least=least,
            named=named,
            before=before,
        )
        self._halfway = refused.again()
        try:
            raise refused
        finally:
            del refused  # otherwise its traceback and this frame would hold each other

    # ------------------------------------------------------------------ what is known

    def refusal(self, decisions: StepDecisions, error: BaseException | None) -> BudgetError | None:
        """The refusal of a step whose forward has ended, or was ended by `error`."""
        halfway, self._halfway = self._halfway, None
        if isinstance(error, RuntimeError) and _compat.torchscripts(error):
            return halfway  # TorchScript replaces Python's errors by its own
        return None if error is not None or decisions.idle else self.known_refusal(decisions)

    def known_refusal(self, decisions: StepDecisions) -> BudgetError | None:
        """The refusal of a step that was measured before and that no plan can fit."""
        observer = decisions.observer
        if decisions.ended or not self._refused:
            return None
        if observer is None and decisions.strange is not None:
            observer = decisions.watched(decisions.operations)  # the plan is another step's
        if observer is None:
            return None
        observer.leaves.look_again()  # gradients may have been cleared after the forward
        gradients = observer.leaves.gradients
        return self._refused.of(decisions.seen, decisions.calls, gradients, observer.before)


def _least_and_named(observer: Observer, live: int, need: int, besides: int) -> tuple[int, int]:
    """What a forward takes at least that was cut short, and a limit that should suffice for it.
    `besides`: what is there in any case."""
    later = sum(nbytes for _, nbytes in observer.leaves.gradients.values())
    if observer.last_save:
        graph = sparingly(observer, lambda: graph_of(observer))
        found = from_held(forward_over(graph, ()), set(), 0).result.peak
        later = max(later, min(found, minimum(graph).peak))
    # The less is known, the more is added: else each retry gets a few operations further.
    rest = live * _ROOM_FOR_REST // (_ROOM_FOR_REST + len(observer.ops)) + besides
    share = 1 - margins.MODELLED
    # What the operation itself takes is known, and no model's margin is left free for it.
    named = max(int((live + rest) / share) + need, int((later + rest) / share))
    return max(live + need, later) + besides, named


def _releases(prepared: Prepared | None) -> bool:
    """Whether the plan is for a backward that retained its graph, and the one that begins does not:
    it releases what it has asked for."""
    if prepared is None or not prepared.seen.retains:
        return False
    return not _compat.backward_retains_graph()
