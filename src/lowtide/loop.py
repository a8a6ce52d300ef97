"""The steps of a training loop under one limit, from opening a recording to learning from it.

Problem: a backward may come after its forward's recording has closed, inside it, late, in part or
never, and several steps may be under way at once. Invariant: a step is learned from once, after its
backward has ended, and a refused step teaches nothing; a backward ends a step, also while the
recording is open, and what is saved after it belongs to the next step. Imports step, engine,
learning, decide, observer. Rejected: doing this in `lowtide.budget`, which is what people see.
"""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from lowtide import _compat, engine
from lowtide._compat.sharding import gathered_for
from lowtide.learning import idling
from lowtide.learning.choosing import Choosing
from lowtide.learning.emptied import Emptied
from lowtide.learning.given import Given
from lowtide.learning.hidden import Hidden
from lowtide.learning.knowledge import Knowledge
from lowtide.learning.known_plans import PLACES
from lowtide.learning.planning import Planning
from lowtide.learning.ranks import Ranks
from lowtide.learning.reported import Reported
from lowtide.learning.rerun import Rerun
from lowtide.learning.resizing import Resizing
from lowtide.learning.settling import Settling
from lowtide.learning.unrecorded import Unrecorded
from lowtide.learning.unwatched import Unwatched
from lowtide.learning.waiting import Waiting
from lowtide.memory import leftover
from lowtide.memory.marks import start_marks
from lowtide.observing.observer import Observer
from lowtide.report import BudgetReport
from lowtide.running.decide import StepDecisions, ends_early
from lowtide.running.earlier import Earlier
from lowtide.running.prepared import Prepared
from lowtide.running.shortage import Shortage
from lowtide.running.where import Where
from lowtide.step import Recording

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

_LEARNING_STEPS = 2


class Loop:
    """The steps under one limit, one after the other.

    Attributes:
        where: the device whose bytes count.
        knows: what is known of its steps.
        allowance: what a step may take.
        behind: earlier steps through whose graphs a backward may go on.
        choosing: says which plan a step follows.
        settling: plans or refuses what does not go as planned.
        unwatched: says which steps are left alone.
        unrecorded: says which are not recorded.
        steps: how many have begun.
        given: the plan that it was given, if any.
        on_trial: whether it takes the place of a budget on the model, which then says nothing.
        model: the model whose forward is recorded, if that is known: gradients of its parameters
            are still to come.
    """

    def __init__(
        self, limit: int | float, device: torch.device | None, ranks: Ranks | None
    ) -> None:
        self.where = Where(device, self._moved)
        self.knows = knows = Knowledge(limit, ranks)
        self._ranks, self._plans, self._effort = ranks, knows.plans, knows.effort
        self._beside = knows.beside
        self.allowance, self.behind = knows.allowance, knows.behind
        self._resizing = Resizing(knows)
        self._reported = Reported(knows)
        self._planning = Planning(knows, self._resizing, self._reported)
        self.choosing, self.settling = Choosing(knows), Settling(knows)
        self.unwatched, self.unrecorded = Unwatched(knows), Unrecorded(knows, self.where)
        self.steps = 0
        self.model: weakref.ref[torch.nn.Module] | None = None
        self._active: list[StepDecisions] = []  # steps whose backward has not finished
        self._recording: Recording | None = None
        self._recorded: StepDecisions | None = None  # the step that it records, or the last one
        self._alike = _LEARNING_STEPS  # steps in a row that went as planned
        self._earlier = Earlier(self.where)  # finished steps of this context
        self._waiting = Waiting()
        self._hidden = Hidden(knows.allowance)
        self._emptied = Emptied()
        self._rerun = Rerun()
        self.given = Given()
        self.on_trial = False
        self._finishing = threading.RLock()  # a report may be asked for on another thread
        self._gathered = 0  # bytes that the model had gathered for this forward when it began

    def follow(self, plan: Prepared) -> None:
        """Let steps like the plan's follow it, from the first one on."""
        self._plans.add(plan)
        self.given.plan = plan
        self.allowance.plain_peak = plan.plain_peak

    # ------------------------------------------------------------------ the context

    def open(self) -> None:
        """Begin a step, and record it."""
        open_ones = [step for step in self._active if not step.ended]
        idled = True in [step.idle for step in open_ones]  # an interrupt may meet a generator
        failed = None if idled or not open_ones else open_ones[0]
        with self._finishing:
            for decisions in tuple(self._active):
                self._finish(decisions)
        for found in self._beside.found():
            if not self._planning.partings.lacks_room(found):
                self._plans.add(found)
        if self._ranks is not None:
            self._planning.agree(self._ranks)
        refusal, self._planning.refusal = self._planning.refusal, None  # the step after may differ
        if refusal is not None:
            raise refusal.again()
        self._waiting.say(self.allowance.limit, self.allowance.plain_peak or 0)
        self._rerun.begins()
        leftover.wait()
        self.where.look()
        last, self._earlier = self._earlier, Earlier(self.where)
        self.behind.context_begins()
        self.knows.place, model = 0, None if self.model is None else self.model()
        self.allowance.before = self._gathered = gathered_for(model)
        self.knows.compared = idling.NOTHING
        if self._ranks is not None:
            self.allowance.shortage = Shortage()  # the other ranks do not know of this one's
        elif self._earlier.failures > last.failures:
            if idled:
                self.unrecorded.idling.ran_out()
            elif failed is not None:
                self.backward_ran_out(failed)
        decisions = self._next_decisions()
        recording = self._recording = Recording(decisions, timed=decisions.observer is not None)
        try:
            # Hooks around it may let the program write to what autograd has saved.
            alone = not self._active and not _compat.other_hooks_than(None)
            self._started(decisions, recording.__enter__())
            self.unrecorded.begins(decisions, recording.recorder, alone)
        except BaseException:
            self._active = [step for step in self._active if step is not decisions]
            decisions.discard()
            self.make_sure()
            raise

    def _next_decisions(self) -> StepDecisions:
        check_up = self._planning.check_ups.due(self.steps)
        self._effort.begins(self.steps)
        prepared, plans = self.choosing.expected(), self._plans.version
        observer = self._observer(prepared, check_up)
        if plans != self._plans.version:  # starting to measure delivered the last step's result
            prepared = self.choosing.expected()
        if prepared is not None:
            self.allowance.plain_peak = prepared.plain_peak
            prepared = self.choosing.fitting(prepared)
        if prepared is None and observer is None:
            observer = self._observer(None, check_up)
        self.allowance.renew()
        decisions = StepDecisions(prepared, observer, self, check_up=check_up)
        if observer is not None and observer.memory is not None:
            observer.memory.of_step(decisions.pending)
        return decisions

    def _started(self, decisions: StepDecisions, tape: Tape) -> None:
        self._recorded = decisions
        self._active.append(decisions)
        decisions.attach(tape)
        self.steps += 1

    def _moved(self) -> None:
        """The limit applies to another device than assumed: what was measured so far is void."""
        self._earlier.begin()
        for decisions in self._active:
            decisions.stop_measuring()

    def next_step(self) -> None:
        """Called when autograd saves something after a backward that ran inside the context."""
        recording, over = self._recording, self._recorded
        if recording is None or over is None or _compat.in_backward() or not recording.at_its_root:
            return
        over.drop_replayed()
        if self.model is None:
            self._rerun.look(over.observer)
        recording.recorder.met_unusual()
        self.unrecorded.idling.turned(None)
        if over in self._active:  # else an interrupt has come in here, and the program goes on
            self._finish(over)
        self._earlier.add(recording.recorder)
        self.allowance.before = self._gathered + self._earlier.nbytes
        self.knows.compared = idling.NOTHING
        self.knows.place = min(self._earlier.steps, PLACES - 1)
        decisions = self._next_decisions()
        self._started(decisions, recording.renew(decisions, timed=decisions.observer is not None))

    def close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop recording, for this reason if `error` is not None."""
        recording, decisions = self._recording, self._recorded
        assert recording is not None
        assert decisions is not None
        self.given.refused(decisions, error)
        early = error is not None and not decisions.idle and ends_early(error)
        try:
            try:
                self._recording = self._recorded = None
                if kind is None or early:
                    decisions.leave_room()
                decisions.forward_ends()
            finally:
                recording.__exit__(kind, error, trace)
        finally:
            recording.make_sure()
            self._earlier.end()
            decisions.forward_over()
            if decisions.operations:
                self.where.forward_over()
            idled = decisions.idle
            self.unrecorded.idling.turned(decisions.made_bytes if error is None else None)
            if idled and error is None:
                self.unrecorded.idling.ended()
            elif idled and isinstance(error, torch.OutOfMemoryError):
                self.unrecorded.idling.ran_out()
            known = self.settling.refusal(decisions, error)
            if early and known is None:
                decisions.early = True
            elif error is not None or known is not None:  # half a step teaches nothing
                # An interrupt between two steps of the context meets one that is over already.
                self._active = [step for step in self._active if step is not decisions]
                decisions.give_up()
            if known is not None:
                try:
                    raise known from error
                finally:
                    del known  # otherwise its traceback and this frame would hold each other
            if error is None:
                self._hidden.look(decisions, self.steps)
                self._emptied.look(decisions)
                if self.model is None:  # a fitted one says it by what its hooks run, or itself
                    self._hidden.look_at_size(decisions)
                    self._rerun.look(decisions.observer)
                    self._rerun.ends()

    @property
    def nothing_saved(self) -> bool:
        """Whether autograd has nothing left of the forward that ran last."""
        if not self._active:
            return True
        return self._active[-1].abandoned() and not self._active[-1].idle

    def make_sure(self) -> None:
        """Close a recording that an interrupt has left open; see `Recording.make_sure`."""
        if self._recording is not None:
            self._recording.make_sure()
            self._recording = self._recorded = None
        self._earlier.end()

    # ------------------------------------------------------------------ a step's life

    def _observer(self, prepared: Prepared | None, check_up: bool) -> Observer | None:
        """Watch this step if there is something to learn from it, and measure it if possible."""
        measure = check_up or self._effort.to_measure(prepared, self._plans.unmeasured)
        unwatched = self.unwatched.may_go_alone if prepared is None else self.unwatched.may_leave
        if not measure and (unwatched or self._alike >= _LEARNING_STEPS):
            return None
        earlier = prepared.seen.ops if prepared is not None else ()
        tell = self._reported.not_measured
        observer = Observer(start_marks(self.where.device, tell) if measure else None, earlier)
        observer.only(self.where)
        observer.place, observer.before = self.knows.place, self.allowance.before
        return observer

    def backward_begins(self, decisions: StepDecisions) -> None:
        """Called at the first request of a backward, before it is answered."""
        decisions.watch_end(decisions.backward_ended)
        if not decisions.begun:
            return
        self._waiting.backward_begins(self._active, self.behind.doubled)
        if decisions.event >= 0:
            if decisions.observer is not None and decisions.observer.passed:
                decisions.starts_over(decisions.observer)
                self.settling.settle(decisions, decisions.observer, again=True)
            return
        decisions.complete()
        if decisions.headroom is not None and self.unwatched.to_the_end(decisions):
            return
        self._look_behind(decisions.observer)
        prepared, as_planned = decisions.prepared, False
        if (
            prepared is None
            and not decisions.switched
            and self.choosing.matching(decisions.seen, whole=True)
        ):
            # The leaves differed from the plan's only when it began.
            self.choosing.freezes_inside = True
        if prepared is not None and not decisions.switched:
            wanted = self.choosing.for_this_backward(prepared)
            as_planned = wanted is prepared
            if as_planned and not self.settling.further_behind(prepared):
                if decisions.observer is not None:
                    decisions.observer.begin_backward(decisions.anchors.numbers)
                decisions.unsettled = True
                return
            prepared = decisions.prepared = wanted
            decisions.anchors.release()
        observer = decisions.watched(decisions.operations)
        self._look_behind(observer)
        known = self.settling.known_refusal(decisions)
        if known is not None:
            observer.mark_end()
            try:
                raise known
            finally:
                del known  # as above
        observer.begin_backward(decisions.anchors.numbers)
        if as_planned and prepared is not None:
            self.settling.settle_with_room(decisions, observer, prepared)
        else:
            self.settling.settle(decisions, observer)
        observer.has_begun()

    def _look_behind(self, observer: Observer | None) -> None:
        if observer is not None:
            observer.behind, observer.withheld = self.behind.nbytes, self.behind.dropped

    def asked_first(self, decisions: StepDecisions, number: int) -> None:
        """Called at the first request for a recorded value in a backward that began as planned.

        The same forward may get another loss, whose backward goes elsewhere. If it asks for less
        than planned, the plan has room for it.
        """
        prepared = decisions.prepared
        assert prepared is not None
        place = prepared.asked_at(number)
        if place is not None:
            decisions.settle_as_planned(place)
            return
        watched = decisions.observer is not None
        observer = decisions.watched(decisions.operations)
        decisions.prepared, decisions.covered, decisions.switched = None, False, True
        decisions.anchors.release()
        if not watched:
            observer.begin_backward(decisions.anchors.numbers)
        self.settling.settle(decisions, observer)

    def _finish(self, decisions: StepDecisions) -> None:
        """Learn from a step whose backward has run, not failed; called outside of any backward.

        A step whose backward has not run yet is left to a later call, but its memory can no longer
        be told apart from that of the forward that begins now.
        """
        if decisions.ended or decisions.abandoned():
            self._active.remove(decisions)
        if not decisions.ended:
            decisions.stop_measuring()
            return
        if not decisions.abandoned():
            self.behind.add(*decisions.left_behind())
        if decisions.halfway:
            if self._earlier.ran_out() and self._ranks is None:
                self.backward_ran_out(decisions)
            decisions.discard()
            return
        self._reported.last = decisions
        decisions.let_go()
        followed, observer = decisions.followed, decisions.observer
        self.unwatched.learn(decisions)
        self._alike = 0 if followed is None else self._alike + 1
        if followed is not None:
            whole = self._planning.followed(followed, decisions, self.unwatched.far_below)
            if whole:
                self.unrecorded.idling.recorded(followed, decisions.noted)
        if observer is not None:
            observer.finish(lambda watched: self._planning.learn(watched, decisions))
        self.given.ended(decisions, self._planning.refusal)  # last, as a warning may be an error

    def backward_ran_out(self, decisions: StepDecisions) -> None:
        """The device had no room for this step's backward."""
        followed = decisions.followed
        self.allowance.backward_ran_out(None if followed is None else followed.peak)

    def finish_ended(self) -> None:
        """Learn from the steps whose backward has ended, if none is recorded; on any thread."""
        with self._finishing:
            for decisions in tuple(self._active) if self._recording is None else ():
                if decisions.ended and not decisions.halfway:
                    self._finish(decisions)

    def cannot_fit(self, observer: Observer, name: str, live: int, need: int) -> None:
        """See `Settling.cannot_fit`."""
        in_part = bool(self._active) and self._active[-1].partial
        model = None if self.model is None else self.model()
        self.settling.cannot_fit(observer, name, live, need, in_part=in_part, model=model)

    def report(self) -> BudgetReport:
        """What the last step that was learned from did."""
        idle = self.unrecorded.idling.steps
        recorder = engine.name() if self.steps else None
        return self._reported.report(steps=self.steps, idle_steps=idle, recorder=recorder)
