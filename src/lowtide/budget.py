"""`lowtide.budget`: one line around forward and loss keeps a step inside a memory limit.

Problem: nobody knows which activations to recompute, and the answer changes with every shape.
Invariant: the limit is a promise (rule 13): the first step is kept inside it by dropping values
while it runs, every later one by a plan made from what the first one showed; what cannot fit is
refused with the smallest limit that would do. A backward ends a step, also inside the context:
what is saved after it belongs to the next one, which has what is left of the limit. Imports step,
decide, observe, learned. Rejected: planning from the model's code, which does not say what autograd
saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat, margins
from lowtide.decide import StepDecisions, Tally
from lowtide.earlier import Earlier
from lowtide.effort import Effort
from lowtide.errors import BudgetError, UsageError
from lowtide.known_plans import PLACES, KnownPlans
from lowtide.learned import Learned
from lowtide.limits import parse_limit
from lowtide.marks import start_marks
from lowtide.observe import Observer
from lowtide.planner import Graph, minimum, plain_peak, solve
from lowtide.planner.resume import forward_over, from_held, with_margin
from lowtide.plans import Plan
from lowtide.prepared import Prepared, Signature, signatures_of
from lowtide.ranks import News, Ranks
from lowtide.rebuild import with_gradients
from lowtide.refusals import Refusals
from lowtide.report import BudgetReport, refusal, too_small
from lowtide.seen import Seen
from lowtide.step import Recording, current_recorder, recordable

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

_ROOM_FOR_REST = 50  # operations after which half as much again is named for those to come
_LEARNING_STEPS = 2
_MEASURE_EVERY = 50


class Budget:
    """A memory limit for training steps; see `budget`. One object serves all steps of a loop."""

    def __init__(
        self,
        limit: int | float | str | Plan,
        *,
        device: torch.device | str | None = None,
        group: Any = None,
    ):
        given = limit if isinstance(limit, Plan) else None
        if isinstance(limit, Plan):
            limit = limit.limit or max(1, limit.peak)
        self.limit = parse_limit(limit)
        self.device = torch.device(device) if device is not None else None
        self._ranks = None if group is None else Ranks(group)
        self._news: Learned | None = None  # what the ranks have not planned yet
        self._recording: Recording | None = None
        self._entered = False
        self._steps = 0
        self._effort = Effort()
        self._freezes_inside = False  # parameters are frozen or unfrozen within a step
        self._alike = _LEARNING_STEPS  # steps in a row that went as planned
        self._plans = KnownPlans()
        self._earlier = Earlier(self.device)  # steps of this context that are over
        self.before = 0  # bytes that they left to the one that runs
        self._active: list[StepDecisions] = []  # steps whose backward is not over
        self._last: StepDecisions | None = None
        self._plain_peak: int | None = None
        self._measured: tuple[int, tuple[Signature, ...]] | None = None  # a peak, and whose
        self._refusal: BudgetError | None = None
        self._refused = Refusals()
        self._outside = 0.0  # what a loss outside takes, in parts of what the forward saves
        if given is not None:
            self._plans.add(given.prepared())
            self._plain_peak = given.plain_peak
        self.limit_now: int | None = None  # in bytes, as far as known of the step that runs

    # ------------------------------------------------------------------ the context

    def __enter__(self) -> Budget:
        if self._entered:
            raise UsageError(
                "this budget is already entered: leave it before entering it again. One budget "
                "object serves all steps, one after the other."
            )
        if not recordable():
            self._entered = True
            return self
        if current_recorder() is not None:
            raise UsageError(
                "a budget cannot be entered inside another budget or checkpointed region of the "
                "same thread: the outer one already decides for everything that runs in it."
            )
        for decisions in tuple(self._active):
            self._finish(decisions)
        if self._ranks is not None:
            self._agree(self._ranks)
        if self._refusal is not None:
            refused, self._refusal = self._refusal, None  # the step after that may be another one
            raise refused
        self._earlier, self.before = Earlier(self.device), 0
        decisions = self._next_decisions()
        recording = Recording(decisions, timed=decisions.observer is not None)
        try:
            tape = recording.__enter__()
        except BaseException:
            decisions.discard()
            raise
        self._started(decisions, tape)
        self._entered = True
        self._recording = recording
        return self

    def _next_decisions(self) -> StepDecisions:
        check_up = not self._steps % _MEASURE_EVERY
        observer = self._observer(self._expected(), check_up)
        prepared = self._expected()  # to begin to measure may bring what the last step measured
        if prepared is not None:
            self._plain_peak = prepared.plain_peak
            prepared = self._fitting(prepared)
        if prepared is None and observer is None:
            observer = self._observer(None, check_up)
        self.limit_now = self.limit_bytes()
        decisions = StepDecisions(prepared, observer, self, check_up=check_up)
        if observer is not None and observer.memory is not None:
            observer.memory.of_step(decisions.pending)
        return decisions

    def _started(self, decisions: StepDecisions, tape: Tape) -> None:
        decisions.attach(tape)
        self._steps += 1
        self._active.append(decisions)

    def next_step(self) -> None:
        """Inside of the context a backward has run, and autograd saves something again."""
        recording, over = self._recording, self._active[-1]
        if recording is None or _compat.in_backward() or not recording.at_its_root:
            return
        over.drop_replayed()
        self._finish(over)
        self._earlier.add(recording.recorder)
        self.before = self._earlier.nbytes
        decisions = self._next_decisions()
        self._started(decisions, recording.renew(decisions, timed=decisions.observer is not None))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered = False
        recording, self._recording = self._recording, None
        if recording is None:
            return
        decisions = self._active[-1]  # a step begins only when those before it are over
        try:
            recording.__exit__(kind, error, trace)
        finally:
            decisions.forward_over()
            known = self._known_refusal(decisions) if error is None else None
            if error is not None or known is not None:  # nothing is learned from half a step
                self._active.remove(decisions)
                decisions.discard()
            if known is not None:
                raise known

    # ------------------------------------------------------------------ a step's life

    @property
    def _place(self) -> int:
        """Of the step that runs, among those of its context."""
        return min(self._earlier.steps, PLACES - 1)

    def _expected(self) -> Prepared | None:
        """The plan that the step will most likely follow: the last one that was."""
        return self._plans.expected(self._place, any_leaves=self._freezes_inside)

    def _observer(self, prepared: Prepared | None, check_up: bool) -> Observer | None:
        """Watch this step if there is something to learn from it, and measure it if possible."""
        measure = check_up or self._effort.to_measure(prepared, self._plans)
        if not measure and self._alike >= _LEARNING_STEPS:
            return None
        earlier = prepared.seen.ops if prepared is not None else ()
        observer = Observer(start_marks(self.device) if measure else None, earlier)
        observer.place, observer.before = self._place, self.before
        return observer

    def target(self, live: int, dropped: int) -> int:
        """Bytes that an unplanned forward may have live, of which `dropped` are gone already.

        A fraction is one of this very step's plain peak, of which so much is known by now. A loss
        outside of the context is taken to be to this forward what it was to the last one.
        """
        outside = int(self._outside * (live + dropped)) + self.before
        if isinstance(self.limit, float):
            return int(self.limit * (live + dropped + outside)) - outside
        return int(self.limit * (1 - margins.MODELLED)) - outside

    def limit_bytes(self) -> int | None:
        """What the step that runs may take; None for a fraction of a peak that is not known."""
        if isinstance(self.limit, float) and self._plain_peak is None:
            return None
        return self._limit(self._plain_peak or 0, self.before)

    def _limit(self, plain: int, before: int) -> int:
        """Bytes that a step of this plain peak may take, of the whole limit what is left."""
        if isinstance(self.limit, int):
            return self.limit - before
        return int(self.limit * (plain + before)) - before

    def backward_begins(self, decisions: StepDecisions) -> None:
        """Called at the first request of a backward, before it is answered."""
        decisions.watch_end(decisions.backward_ended)
        if not decisions.begun:
            return
        if decisions.event >= 0:
            return
        decisions.complete()
        prepared = decisions.prepared
        if (
            prepared is None
            and not decisions.switched
            and self.matching(decisions.seen, whole=True)
        ):
            self._freezes_inside = True  # only when it began were the leaves not those of the plan
        if prepared is not None and not decisions.switched:
            appeared = prepared.seen.appeared()
            if not appeared:
                if decisions.observer is not None:
                    decisions.observer.begin_backward(decisions.anchors.numbers)
                decisions.settle_as_planned()
                return
            prepared = self._with_gradients(prepared, appeared)
            decisions.prepared = prepared
            decisions.anchors.release()
        observer = decisions.watched(decisions.operations)
        known = self._known_refusal(decisions)
        if known is not None:
            observer.mark_end()
            decisions.begun = False  # should backward be called again, this is said again
            raise known
        observer.begin_backward(decisions.anchors.numbers)
        self._settle(decisions, observer)

    def _known_refusal(self, decisions: StepDecisions) -> BudgetError | None:
        """Of a step that was measured before, and that nothing brings under the limit."""
        observer = decisions.observer
        if decisions.ended or observer is None:
            return None
        return self._refused.of(decisions.seen, observer.parameters, observer.before)

    def _with_gradients(self, prepared: Prepared, appeared: dict[int, tuple[int, int]]) -> Prepared:
        """A plan for the same step with gradients to allocate that were there when it was made."""
        graph = with_gradients(prepared.graph, appeared.values())
        limit = self.limit_bytes()
        assert limit is not None
        seen = prepared.seen
        seen = replace(seen, parameters={**seen.parameters, **appeared})
        return self._planned_again(prepared, graph, seen, limit)

    def _fitting(self, prepared: Prepared) -> Prepared | None:
        """This plan, or another for the step where those before it have left less room than they
        had when it was made; None: it would not fit."""
        limit = self._limit(prepared.plain_peak, self.before)
        if self.before <= prepared.seen.before or prepared.peak <= limit:
            return prepared
        seen = replace(prepared.seen, before=self.before)
        found = self._planned_again(prepared, prepared.graph, seen, limit)
        return found if found.peak <= limit else None

    def _planned_again(self, old: Prepared, graph: Graph, seen: Seen, limit: int) -> Prepared:
        margin = int(limit * (margins.MEASURED if old.measured else margins.MODELLED))
        solution = solve(graph, limit, margin=margin)
        found = Prepared.of(solution.plan, graph, solution.peak, seen, old.measured, old.lessons)
        self._plans.add(found)
        return found

    def _settle(self, decisions: StepDecisions, observer: Observer) -> None:
        """Not the step that was planned: plan its backward from what is still held."""
        held = observer.held_from_forward()
        prepared = decisions.prepared
        graph = observer.graph() if prepared is None else prepared.graph
        if not graph.events:
            return
        measured = prepared is not None and prepared.measured
        margin = margins.MEASURED if measured else margins.MODELLED
        plain = plain_peak(graph)
        if self._plain_peak is None:
            self._plain_peak = plain
        limit = self._limit(plain, self.before)
        # A fraction of a peak that is only modelled is not refused before it is measured.
        strict = measured or isinstance(self.limit, int)
        graph = forward_over(graph)
        found = with_margin(graph, held, limit, margin, search=strict)
        if found.result.peak > limit and strict:
            observer.mark_end()
            decisions.begun = False  # should backward be called again, this is said again
            raise self._refusing(graph, limit, found.retain, self.before, measured=measured)
        decisions.settle(found.retain)

    def _finish(self, decisions: StepDecisions) -> None:
        """Learn from a step whose backward has run; called outside of any backward.

        A step that has not been so far is left to a later call, but its memory can no longer be
        told from that of the forward that begins now.
        """
        if decisions.ended or decisions.abandoned():
            self._active.remove(decisions)
        if not decisions.ended:
            decisions.stop_measuring()
            return
        self._last = decisions
        decisions.let_go()
        self._alike = 0 if decisions.switched else self._alike + 1
        if decisions.followed is not None:
            self._effort.followed()
        observer = decisions.observer
        if observer is not None:
            observer.finish(partial(self._learn, decisions=decisions))

    def _learn(self, observer: Observer, decisions: StepDecisions) -> None:
        """Plan the next step from one that was watched."""
        timeline, followed = observer.timeline, decisions.followed
        measured = timeline is not None
        if timeline is not None:
            self._measured = timeline.peak + observer.before, signatures_of(observer.ops)
        if not observer.requests or (followed is not None and not measured):
            return
        graph = observer.graph()
        if not measured:  # the loss of another step is the best guess
            graph = replace(graph, turn=int(self._outside * graph.saved))
        lessons = measured + (0 if followed is None else followed.lessons)
        learned = Learned(graph, observer.seen(), observer.ran, measured, lessons)
        if self._ranks is not None:
            self._news = learned  # planned where all ranks enter the next step
        elif self._worth_planning(learned, decisions, timeline.peak if timeline else None):
            self._plan_next(learned)

    def _worth_planning(self, learned: Learned, decisions: StepDecisions, peak: int | None) -> bool:
        """Whether to plan steps like one whose peak, where it was measured, is this."""
        self._plain_peak, self._outside = learned.plain_peak, learned.outside
        limit = self._limit(learned.plain_peak, learned.seen.before)
        if decisions.check_up or (peak is not None and peak > limit):
            return True
        if decisions.followed is not None:
            return self._effort.again(decisions.followed)
        return self._effort.first(decisions.seen)

    def _plan_next(self, learned: Learned, ranks: Ranks | None = None) -> None:
        self._plain_peak = learned.plain_peak
        self._outside = learned.outside
        before = learned.seen.before
        limit = self._limit(learned.plain_peak, before)
        search = partial(learned.solve, limit)
        plan, peak = search() if ranks is None else ranks.of_first(search)
        if peak > limit and learned.measured:
            followed = self._last.followed_unmeasured if self._last is not None else None
            graph = learned.graph
            self._refusal = self._refusing(
                graph, limit, plan.retain, before, measured=True, predicted=followed
            )
            if self._ranks is None or ranks is not None:  # else the others would not know
                self._refused.add(learned.seen, self._refusal)
            return
        self._plans.add(learned.prepared(plan, peak))

    @staticmethod
    def _refusing(
        graph: Graph, limit: int, retain: Sequence[int], before: int, **known: Any
    ) -> BudgetError:
        return refusal(graph, limit + before, retain, before=before, **known)

    def _agree(self, ranks: Ranks) -> None:
        """Plan alike on all ranks, or refuse on all of them; a collective of their group."""
        news, self._news = self._news, None
        if not ranks.any(news is not None or self._refusal is not None):
            return
        common = ranks.common(News(None if news is None else news.graph, self.limit))
        if news is not None:
            alike = news if common is None else replace(news, graph=common)
            self._plan_next(alike, None if common is None else ranks)
        refused, self._refusal = self._refusal, None
        ranks.refuse_together(refused)

    def matching(
        self, seen: list[Signature], *, whole: bool, other_than: Prepared | None = None
    ) -> Prepared | None:
        """A plan for another step that began like this one, or that was the whole of it."""
        found = self._plans.of_step(seen, self._place, whole=whole, other_than=other_than)
        if found is None:
            return None
        self._plain_peak = found.plain_peak  # a fraction is one of this step's
        self.limit_now = self.limit_bytes()
        return self._fitting(found)

    def cannot_fit(self, observer: Observer, name: str, live: int, need: int) -> None:
        """Nothing is left to drop in an unplanned forward."""
        before = self.before
        if not isinstance(self.limit, int) or live + need <= self.limit - before:
            return
        least = max(live + need, sum(nbytes for _, nbytes in observer.parameters.values()))
        if observer.last_save:
            graph = observer.graph()
            found = from_held(forward_over(graph), set(), 0).result.peak
            least = max(least, min(found, minimum(graph).peak))
        to_come = self.gradients_to_come(observer)
        count = len(observer.ops)
        # The less is known, the more is added: else each attempt gets a few operations further.
        rest = live * _ROOM_FOR_REST // (_ROOM_FOR_REST + count)
        named = int((least + rest + to_come + before) / (1 - margins.MODELLED))
        least += to_come + before
        raise too_small(name, live, need, self.limit, count, least, named, before)

    def gradients_to_come(self, observer: Observer) -> int:
        """Bytes of gradients known to be allocated that no operation so far has asked for."""
        return 0

    def report(self) -> BudgetReport:
        """What the last finished step did; see `BudgetReport`."""
        for decisions in tuple(self._active):
            if decisions.ended and not self._entered:
                self._finish(decisions)
        last = self._last
        prepared = last.prepared if last is not None else None
        tally = last.tally if last is not None else Tally()
        kept, recomputed = (0, 0) if prepared is None else prepared.bytes()
        measured, whose = self._measured or (None, ())
        alike = last is not None and measured is not None and tuple(last.seen) == whose
        if not (alike or isinstance(self.limit, int)):
            measured = None  # a fraction gives each step its own limit
        limit = self.limit_bytes()
        return BudgetReport(
            limit=None if limit is None else limit + self.before,
            planned_peak=None if prepared is None else prepared.peak + self.before,
            measured_peak=measured,
            plain_peak=None if self._plain_peak is None else self._plain_peak + self.before,
            kept_bytes=kept,
            recomputed_bytes=recomputed,
            recorded_operations=0 if last is None else last.operations,
            replayed_operations=tally.replayed_operations,
            replay_seconds=tally.replay_seconds,
            steps=self._steps,
            planned=prepared is not None,
            measured_alike=alike,
        )


def budget(
    limit: int | float | str | Plan,
    *,
    device: torch.device | str | None = None,
    group: Any = None,
) -> Budget:
    """Keep a training step inside a memory limit, with the same bits as without it.

    Put it around forward and loss; ``backward()`` may come after it closes::

        limit = lowtide.budget("6 GiB")
        for batch in loader:
            with limit:
                loss = loss_fn(model(batch))
            loss.backward()

    One object is used for all steps: it learns from the first and plans the others. The limit
    bounds the bytes that the step allocates on the device above what is allocated when the
    context is entered, until the end of backward: activations, gradients, temporaries, kernel
    workspace. With grad disabled nothing happens.

    Args:
        limit: bytes (``int``); text, ``"6 GiB"`` or ``"800 MB"``; or a ``float`` in (0, 1], a
            fraction of the peak of the same step with nothing recomputed; or a `Plan`, which is
            followed from the first step on. A step that is not the one it was made for is noticed
            at the first operation that differs, and planned like any unknown step.
        device: where to count. Default: the current CUDA device if the process uses CUDA, else
            the CPU.
        group: a process group, or True for the default one, whose ranks are to plan and to refuse
            alike. Entering the budget is then a collective of that group: every rank enters it
            equally often. Default: each rank decides for itself.

    Raises:
        UsageError: a limit that cannot be read; a budget entered twice or inside another; a group
            that is not there.
        BudgetError: the limit cannot be met; it names the smallest that would do.
    """
    return Budget(limit, device=device, group=group)
