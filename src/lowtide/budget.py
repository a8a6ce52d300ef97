"""`lowtide.budget`: one line around forward and loss keeps a step inside a memory limit.

Problem: nobody knows which activations to recompute, and the answer changes with every shape.
Invariant: the limit is a promise (rule 13). The first step is kept inside it by dropping values
while it runs, every later one by a plan made from what the first one showed. A step that cannot fit
is refused, and the smallest limit known to suffice is named. A backward ends a step, also inside
the context; what is saved after it belongs to the next step, which has what is left of the limit.
Imports step, planning, decide, observer. Rejected: plans made from the model's code, which does not
say what autograd saves.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.learning.known_plans import PLACES
from lowtide.learning.planning import Planning
from lowtide.learning.ranks import Ranks
from lowtide.limits import format_bytes
from lowtide.measure import counted_device
from lowtide.memory import leftover, margins
from lowtide.memory.marks import start_marks
from lowtide.observing.observer import Observer
from lowtide.planner import plain_peak
from lowtide.planner.resume import forward_over, with_margin
from lowtide.plans import Plan, limit_of
from lowtide.report import BudgetReport
from lowtide.running.decide import StepDecisions
from lowtide.running.earlier import Earlier
from lowtide.running.forward import Tally
from lowtide.running.prepared import Prepared
from lowtide.running.shortage import Shortage
from lowtide.running.where import Where
from lowtide.step import Recording, current_recorder, recordable

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

_LEARNING_STEPS = 2
_MEASURE_EVERY = 50
_ANEW = 5  # after so many budgets in a row that had one step each, the user is warned

_log = logging.getLogger("lowtide")
_beginners: dict[int | float, int] = {}  # per limit: budgets since one had a second step
_MOST_LIMITS = 64  # at once; a program may compute a limit anew for each step


class Budget(Planning):
    """A memory limit for training steps; see `budget`. One object serves all steps of a loop."""

    def __init__(
        self,
        limit: int | float | str | Plan,
        *,
        device: torch.device | str | None = None,
        group: Any = None,
    ):
        self._asked = limit, device, group
        given = limit if isinstance(limit, Plan) else None
        super().__init__(limit_of(limit), None if group is None else Ranks(group))
        named = None if device is None else counted_device(device, "a budget")
        self.where = Where(named, self._moved)
        self._recording: Recording | None = None
        self._threads: dict[int, bool] = {}  # threads inside: whether it records there
        self._occupied = threading.Lock()  # held for the thread that it records on
        self._steps = 0
        self._alike = _LEARNING_STEPS  # steps in a row that went as planned
        self._earlier = Earlier(self.where)  # finished steps of this context
        self._active: list[StepDecisions] = []  # steps whose backward has not finished
        if given is not None:
            self._plans.add(given.prepared())
            self._plain_peak = given.plain_peak

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (say, of a module that has a budget) has the limit, but has learned nothing."""
        return _anew, self._asked

    def __repr__(self) -> str:
        limit = self.promised()
        of = f"{self.limit:g} of the plain peak" if limit is None else f"{limit} bytes"
        return f"<lowtide.Budget of {of}, after {self._steps} steps>"

    # ------------------------------------------------------------------ the context

    def __enter__(self) -> Budget:
        thread = threading.get_ident()
        if thread in self._threads:
            raise UsageError(
                "this budget is already entered: leave it before entering it again. One budget "
                "object serves all steps, one after the other."
            )
        records = recordable()
        if records:
            if not self._occupied.acquire(blocking=False):
                raise UsageError(
                    "this budget is already entered on another thread: one step on each thread "
                    "would be two steps inside one limit. Give each thread a budget of its own, or "
                    "let them take turns, backwards included."
                )
            try:
                self._open()
            except BaseException:
                self._occupied.release()
                raise
        self._threads[thread] = records
        return self

    def _open(self) -> None:
        if current_recorder() is not None:
            raise UsageError(
                "a budget cannot be entered inside another budget or checkpointed region of the "
                "same thread: the outer one already decides for everything that runs in it."
            )
        failed = next((step for step in self._active if not step.ended), None)
        for decisions in tuple(self._active):
            self._finish(decisions)
        for found in self._beside.found():
            self._plans.add(found)
        if self._ranks is not None:
            self._agree(self._ranks)
        if self._refusal is not None:
            again, self._refusal = self._refusal.again, None  # the step after it may differ
            raise again()
        leftover.wait()
        self.where.look()
        last, self._earlier = self._earlier, Earlier(self.where)
        self.before = self.place = 0
        if self._ranks is not None:
            self._shortage = Shortage()  # the other ranks do not know of this one's
        elif failed is not None and self._earlier.failures > last.failures:
            self.backward_ran_out(failed)
        decisions = self._next_decisions()
        recording = Recording(decisions, timed=decisions.observer is not None)
        try:
            tape = recording.__enter__()
        except BaseException:
            decisions.discard()
            raise
        self._started(decisions, tape)
        self._recording = recording

    def _next_decisions(self) -> StepDecisions:
        check_up = not self._steps % _MEASURE_EVERY
        prepared, plans = self._expected(), self._plans.version
        observer = self._observer(prepared, check_up)
        if plans != self._plans.version:  # starting to measure delivered the last step's result
            prepared = self._expected()
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
        if self._steps <= 2:
            _tell_of_many(self.limit, self._steps)
        self._active.append(decisions)

    def _moved(self) -> None:
        """The limit applies to another device than assumed: what was measured so far is void."""
        self._earlier.begin()
        for decisions in self._active:
            decisions.stop_measuring()

    @property
    def keeps_wrappers(self) -> bool:
        return bool(self._active) and self._active[-1].keeps_wrappers

    def next_step(self) -> None:
        """Called when autograd saves something after a backward that ran inside the context."""
        recording, over = self._recording, self._active[-1]
        if recording is None or _compat.in_backward() or not recording.at_its_root:
            return
        over.drop_replayed()
        self._finish(over)
        self._earlier.add(recording.recorder)
        self.before = self._earlier.nbytes
        self.place = min(self._earlier.steps, PLACES - 1)
        decisions = self._next_decisions()
        self._started(decisions, recording.renew(decisions, timed=decisions.observer is not None))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._threads.pop(threading.get_ident(), False):
            return
        try:
            self._close(kind, error, trace)
        finally:
            self._occupied.release()

    def _close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        decisions = self._active[-1]  # a step begins only when those before it are over
        try:
            try:
                if kind is None:
                    decisions.leave_room()
                decisions.forward_ends()
            finally:
                recording.__exit__(kind, error, trace)
        finally:
            decisions.forward_over()
            if decisions.operations:
                self.where.forward_over()
            known = self._known_refusal(decisions) if error is None else None
            if isinstance(error, RuntimeError) and _compat.torchscripts(error):
                known = self._halfway  # TorchScript replaces Python's errors by its own
            self._halfway = None
            if error is not None or known is not None:  # half a step teaches nothing
                self._active.remove(decisions)
                decisions.discard()
            if known is not None:
                try:
                    raise known from error
                finally:
                    del known  # otherwise its traceback and this frame would hold each other

    # ------------------------------------------------------------------ a step's life

    def _observer(self, prepared: Prepared | None, check_up: bool) -> Observer | None:
        """Watch this step if there is something to learn from it, and measure it if possible."""
        measure = check_up or self._effort.to_measure(prepared, self._plans.unmeasured)
        if not measure and self._alike >= _LEARNING_STEPS:
            return None
        earlier = prepared.seen.ops if prepared is not None else ()
        observer = Observer(start_marks(self.where.device) if measure else None, earlier)
        observer.only(self.where)
        observer.place, observer.before = self.place, self.before
        return observer

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
            self._freezes_inside = True  # the leaves differed from the plan's only when it began
        if prepared is not None and not decisions.switched:
            wanted = self._for_this_backward(prepared)
            if wanted is prepared:
                if decisions.observer is not None:
                    decisions.observer.begin_backward(decisions.anchors.numbers)
                decisions.settle_as_planned()
                return
            prepared = decisions.prepared = wanted
            decisions.anchors.release()
        observer = decisions.watched(decisions.operations)
        known = self._known_refusal(decisions)
        if known is not None:
            observer.mark_end()
            decisions.begun = False  # a second call of backward is refused again
            try:
                raise known
            finally:
                del known  # as above
        observer.begin_backward(decisions.anchors.numbers)
        self._settle(decisions, observer)

    def _settle(self, decisions: StepDecisions, observer: Observer) -> None:
        """The step differs from its plan: plan its backward from what is still held."""
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
        # A fraction of a modelled peak is not refused before that peak is measured.
        strict = measured or (isinstance(self.limit, int) and not decisions.keeps_wrappers)
        whole, graph = graph, forward_over(graph, held)
        found = with_margin(graph, held, limit, margin, search=strict)
        if found.result.peak > limit and decisions.covered:
            decisions.prepared, decisions.covered = None, False  # this smaller step may need less
            self._settle(decisions, observer)
            return
        allowed = self._allowed(plain, self.before)
        if found.result.peak > allowed and strict:
            observer.mark_end()
            decisions.begun = False  # a second call of backward is refused again
            again = prepared is None and self.planned_from_the_start(whole, observer)
            raise self._refusing(
                graph,
                allowed,
                found.retain,
                self.before,
                measured=measured,
                again=again,
                plain=plain,
            )
        self._shortage.needs(found.result.peak + self.before)
        decisions.settle(found.retain)

    def _finish(self, decisions: StepDecisions) -> None:
        """Learn from a step whose backward has run; called outside of any backward.

        A step whose backward has not run yet is left to a later call, but its memory can no longer
        be told apart from that of the forward that begins now.
        """
        if decisions.ended or decisions.abandoned():
            self._active.remove(decisions)
        if not decisions.ended:
            decisions.stop_measuring()
            return
        self._last = decisions
        decisions.let_go()
        self._alike = 0 if decisions.switched else self._alike + 1
        followed, observer = decisions.followed, decisions.observer
        if followed is not None:
            self._effort.followed(followed, covered=decisions.covered)
            if decisions.covered and observer is None:
                self._plan_smaller(followed, decisions.seen)
        if observer is not None:
            observer.finish(lambda watched: self._learn(watched, decisions))

    def report(self) -> BudgetReport:
        """Return what the last finished step did, as a `BudgetReport`."""
        for decisions in tuple(self._active):
            if decisions.ended and not self._occupied.locked():
                self._finish(decisions)
        last = self._last
        prepared = last.prepared if last is not None else None
        tally = last.tally if last is not None else Tally()
        kept, recomputed = (None, None) if prepared is None else prepared.bytes()
        measured, whose = self._measured or (None, ())
        measured_steps, highest = self._peaks
        alike = last is not None and measured is not None and tuple(last.seen) == whose
        limit = self.promised()
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
            left_plan_at=tally.diverged_at,
            measured_steps=measured_steps,
            highest_peak=highest if measured_steps else None,
            device_room=self._shortage.room,
        )


def _tell_of_many(limit: int | float, steps: int) -> None:
    """A budget made anew for each step keeps its limit but never plans: warn once."""
    count = _beginners.get(limit, 0)
    if count == _ANEW:  # already warned
        return
    count = count + 1 if steps == 1 else 0
    if len(_beginners) >= _MOST_LIMITS:
        _beginners.clear()
    _beginners[limit] = count
    if count == _ANEW:
        _log.warning(
            "%d budgets of %s had one step each: a budget learns from its first step and plans the "
            "next ones. Make one before the loop, and enter the same object for each step.",
            _ANEW,
            format_bytes(limit) if isinstance(limit, int) else f"{limit:g} of the plain peak",
        )


def _anew(limit: int | float | str | Plan, device: Any, group: Any) -> Budget:
    return Budget(limit, device=device, group=group)


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

    Use one object for all steps: it learns from the first and plans the others. The limit bounds
    the bytes that the step allocates on the device, above what is allocated when the context is
    entered, until the end of backward: activations, gradients, temporaries and kernel workspace.
    With grad disabled nothing is recorded. If backward runs inside the context, even several times
    (a GAN, an attack on the input, gradient accumulation), each backward ends a step with a plan of
    its own, and what that step leaves in memory counts towards the limit of the next.

    Args:
        limit: bytes, as an ``int``; text, such as ``"6 GiB"``, ``"800 MB"`` or ``"50%"``; a
            ``float`` in (0, 1], a fraction of the plain step's peak (of the largest one measured so
            far, if steps differ); or a `Plan`, which is followed from the first step on. A step
            other than the planned one is noticed at the first operation that differs, and planned
            like any unknown step. The limit is then the plan's; the peak of a plan without one.
        device: the device whose bytes are counted. Default: the first accelerator device (CUDA,
            ROCm, XPU, MPS, ...) on which a step makes something, else the CPU. What a step makes on
            other devices is kept and does not count.
        group: a process group, or True for the default one, whose ranks plan and refuse alike.
            Entering the budget is then a collective of that group, so every rank must enter it
            equally often. Default: each rank decides for itself.

    Returns:
        The budget, a context manager to enter once for each step.

    Raises:
        UsageError: the limit or the device cannot be used; the group does not exist; or, on
            entering, the budget is already entered, here or on another thread, or another budget
            or region is open on this thread.
        UnsupportedError: on entering, inside a transform of ``torch.func`` or while a CUDA graph is
            captured; or by a higher-order operator whose body reads tensors that require grad and
            are not among its operands.
        BudgetError: the limit cannot be met. It is raised where that shows: by an operation of the
            forward, at the end of the ``with``, when backward begins, or on entering the next step,
            if it was found while this one was measured. The error names the smallest limit known to
            suffice; for a forward that is refused halfway, the rest of which is not known yet, an
            estimate.
    """
    return Budget(limit, device=device, group=group)
