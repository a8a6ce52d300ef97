"""The decisions of one step under a budget.

Problem: an unknown step must be watched, kept inside the limit and learned from, a known one must
cost nothing, and a backward may run after its context, inside it, in part, or twice. Invariant: a
decision is never needed for correctness, only for memory and time (rule 13). Imports forward,
prepared, expected. Rejected: one class for steps with a plan and one for those without, as a step
may change from the one to the other at any operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from lowtide import _compat
from lowtide.errors import BudgetError, LowtideError
from lowtide.memory import leftover
from lowtide.observing.observer import Observer
from lowtide.observing.reached import Numbers
from lowtide.running.expected import Expected
from lowtide.running.forward import ForwardDecisions
from lowtide.running.prepared import Prepared
from lowtide.tape.values import Handle, Operation, Value, WeakList

# What a differentiable backward saves, for each byte that it asks for: that byte, and gradients. Of
# these there may be two: of a result and of what it was computed from (a tanh of a linear layer).
_DOUBLED = 3


class StepDecisions(ForwardDecisions):
    """Implements `lowtide.tape.tape.Decisions` for one step."""

    asks = True
    first = 0  # operations recorded when what backward asked for first was saved
    unsettled = False  # backward has begun as planned, but asked for nothing of the tape's yet
    planned_peak: int | None = None  # of its backward, if that was planned when it began
    failed = False  # a backward inside the context has raised an error, which ended the step
    early = False  # an error has ended its forward
    emptied = 0, 0  # parameters taken out of memory since its forward read them, and their bytes
    _expected: Expected | None = None  # while its backward goes by a model
    _began_on = 0  # the thread of backward's first request
    _differentiable = False  # a backward of it, outside of the context, has `create_graph=True`

    def leave_room(self) -> None:
        """A forward that no plan covers has run to its end."""
        if self._room is not None:
            self._room.before_backward()

    def forward_ends(self) -> None:
        """The recording is about to close, and its recorder to forget which storages are alive."""
        if self.observer is not None:
            self.observer.names.forward_ends()
            if self.recorder is not None:
                self.emptied = self.observer.leaves.emptied(self.recorder.table)

    def forward_over(self) -> None:
        """The recording is closed."""
        self.anchors.forward_over()
        self._catch_up_alone()
        self._room = None  # nothing is dropped any more, and it refers to this step
        if self._follower is not None:
            self._follower.catch_up()
            self._on_our_own()

    def give_up(self) -> None:
        """Nothing is to be learned from the step. What it has saved stays, as the program may still
        have a graph that a backward goes through."""
        self.stop_measuring()

    def discard(self) -> None:
        """The step is over, and nothing is to be learned from it."""
        self.stop_measuring()
        self.observer = self._room = None
        self.let_go()

    def let_go(self) -> None:
        """The step is over: keep only numbers of it."""
        self._handles.clear()
        self._made.clear()
        self.anchors.settle()

    def drop_replayed(self) -> bool:
        """Drop what its backward has recomputed and can recompute; whether there was any."""
        made = self._made.alive() if self.observer is None else self.observer.alive()
        found = [value for value in made if value.op is not None and value.held is not None]
        for value in found:
            value.held = None
        return bool(found)

    def holds(self) -> int:
        """Bytes of what was recorded that are in memory for a backward that has not begun. One that
        was refused had."""
        if self._began_on or self.ended:
            return 0
        made = self._made.alive() if self.observer is None else self.observer.alive()
        return sum(value.nbytes for value in made if value.held is not None)

    def stop_measuring(self) -> None:
        if self.observer is not None:
            self.observer.stop_measuring()

    @property
    def halfway(self) -> bool:
        """Whether a backward of it runs, or has raised an error. Outside of the context torch does
        not report that error, and an earlier backward of the step may have ended."""
        return self.failed or self.begun

    def abandoned(self) -> bool:
        """Whether autograd has released every handle: no backward of this step can come."""
        return not self._handles.any()

    @property
    def hides_all(self) -> bool:
        """Whether hooks of the program's own have taken all that its forward has saved."""
        return self.others_save and not self.saves and self.abandoned()

    @property
    def backward_alone(self) -> bool:
        """Whether all that ran in the context was the backward of something made outside."""
        observer = self.observer
        return observer is not None and observer.names.gradients_alone and not self.saves

    @property
    def nothing_to_ask_for(self) -> Observer | None:
        """What was seen of a forward that ended with a result, read leaves that get gradients, and
        has saved nothing at all (the sum of a parameter); None for any other."""
        observer = self.observer
        if observer is None or self.saves or self.others_save or observer.names.gradients_alone:
            return None
        return observer if observer.names.returned and observer.leaves.gradients else None

    def pending(self) -> bool:
        """Whether its forward or its backward runs, or a backward may come.

        False if its backward has failed. torch does not report that, but the thread that it began
        on is then no longer in a backward. It may be tried again, but is not measured any more.
        Also after an error in the forward: its traceback may have the graph for as long as it is
        there, although the program does not go on.
        """
        forward = self._tape is None or self.recorder is not None
        if self.begun and not forward:
            return self._began_on != threading.get_ident() or _compat.in_backward()
        return forward or not (self.early or self.abandoned())

    # ------------------------------------------------------------------ backward

    def requested(self, handle: Handle) -> None:
        recorder = handle.tape.recorder
        if recorder is not None and torch.is_grad_enabled():
            self.room_for_replay(handle.value)
            return  # a differentiable backward inside the forward, such as a gradient penalty
        if not self.begun:
            self.begun, self.first = True, handle.sequence
            self._began_on = threading.get_ident()
            if torch.is_grad_enabled() and _compat.in_backward():  # not read by hand
                self._differentiable = True
            if recorder is not None:
                # A backward inside the context is not recorded.
                recorder.pause(self.backward_failed)
            self._or_refused(lambda: self.owner.backward_begins(self))
        value = handle.value
        if value.number >= 0 and not self._read_by_hand:
            if self.unsettled:
                self.unsettled, self.first = False, handle.sequence
                self._or_refused(lambda: self.owner.asked_first(self, value.number))
                if self.observer is None:
                    handle.tape.events = self._event
            self._event[0] += 1
            if self._expected is not None:
                self._as_expected(self._expected, value)
            if self.observer is not None:
                self.observer.request(value, handle.sequence)

    @property
    def _read_by_hand(self) -> bool:
        """Whether a program looks at what a node has saved after the backward, which is over: that
        is no part of the step, whose measurement ends there."""
        return self.ended and not self.begun

    def _or_refused(self, begin: Callable[[], None]) -> None:
        try:
            begin()
        except BaseException as error:
            self.begun = False  # refused or interrupted: a second call of backward begins anew
            # If another backward of it has run, that one alone is not the step.
            self.failed = self.failed or (self.ended and isinstance(error, BudgetError))
            self.owner.given.refused(self, error)
            if isinstance(error, BudgetError) and self.where.device.type != "cpu":
                leftover.leaves(self, self.where.device)
            raise

    def _not_in_backward(self) -> None:
        self.begun = False
        self._nobody_counts()

    def backward_failed(self) -> None:
        """A backward inside the context has raised an error, and the program goes on there: the
        step is over. One that another thread of the program's began may still run; those of
        autograd's own, one for each device, were not started by Python."""
        others = [
            t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)
        ]
        if self._began_on != threading.get_ident() and self._began_on in others:
            return
        self.failed = True
        self.backward_ended()

    def backward_ended(self) -> None:
        self._not_in_backward()
        self.ended = True
        self._expected = None
        if self.observer is not None:
            self.observer.mark_end()
        recorder = self.recorder
        if recorder is not None:
            self._on_our_own()
            self._room = None
            recorder.over(self.owner.next_step)

    @property
    def event(self) -> int:
        """The number of backward's last request for a recorded value, -1 before the first."""
        return self._event[0]

    @property
    def followed_unmeasured(self) -> int | None:
        """The predicted peak of the plan that was followed, if that was made from sizes."""
        prepared = self.prepared
        return None if prepared is None or prepared.measured or self.switched else prepared.peak

    @property
    def followed(self) -> Prepared | None:
        """The plan that this step follows, from its first operation or from a later one on."""
        return None if self._crowded else self.prepared

    def settle_as_planned(self, place: int) -> None:
        """The step is the planned one: what it holds stays held for good. `place`: of the first
        request among those of the plan; what only those before it need is dropped."""
        self._event[0] = place - 1
        if place and self.prepared is not None:
            self.anchors.release()
            self._drop_passed(self.prepared.passed_over(place))
        self.anchors.settle()
        if self.observer is None:
            self._made.settle()
            return
        if self.prepared is not None:
            planned = self.prepared
            self.observer.ran = list(planned.plan.retain[: planned.graph.recorded])
        for value in self.observer.alive():
            if value.held is not None and value.op is not None:
                value.settle()

    def _drop_passed(self, numbers: frozenset[int]) -> None:
        made = self._made.alive() if self.observer is None else self.observer.alive()
        for value in list(made):
            if value.number in numbers and value.held is not None and value.op is not None:
                value.held = None
                if self.observer is not None:
                    self.observer.dropped_before_backward(value.number)

    def settle_alone(self) -> None:
        """Nobody watches the step, and it holds everything: what it holds stays held for good."""
        self.planned_peak = self.headroom.at_most(self.live[0])
        self._made.settle()
        tape = self.tape
        if tape is not None:
            tape.events = self._event

    def starts_over(self, observer: Observer) -> None:
        """Another backward of the step begins, and is planned by itself."""
        self._event[0] = -1
        observer.begins_again()

    def left_behind(self) -> tuple[WeakList[Handle], int, int, int]:
        """The handles that its backward has left, as it kept its graph; the bytes that this was
        planned to take beside what the step holds now; those that autograd has saved and the step
        does not hold; and, if it was differentiable, about what is in memory for the backward
        through it, see `_DOUBLED`."""
        peak = self.planned_peak
        if peak is None:
            peak = 0 if self.prepared is None else self.prepared.peak
        made = self._made.alive() if self.observer is None else self.observer.alive()
        held = sum(value.nbytes for value in made if value.held is not None)
        handles, self._handles = self._handles, WeakList()
        saved = {handle.value.number: handle.value for handle in handles.alive()}
        dropped = sum(value.nbytes for value in saved.values() if value.held is None)
        doubled = 0
        if self._differentiable:
            doubled = _DOUBLED * sum(value.nbytes for number, value in saved.items() if number >= 0)
        return handles, max(0, peak - held), dropped, doubled

    def settle(self, chosen: Sequence[int], peak: int) -> None:
        """Follow `chosen` in this backward: a decision for each value, as in a `Retention`."""
        self.planned_peak = peak
        self._settled = [max(choice, 0) for choice in chosen]
        assert self.observer is not None
        self.observer.ran = list(chosen)
        self._expected = None
        for value in self.observer.alive():
            if value.held is None or value.op is None:
                continue
            if chosen[value.number] < 0 or value.number in self.observer.pinned:
                value.settle()
            else:
                value.held = None
                self.observer.dropped_before_backward(value.number)

    def expects(
        self, order: Sequence[tuple[int, Numbers]], ends: Callable[[], Sequence[int]]
    ) -> None:
        """This backward was modelled, see `Expected`."""
        observer, settled = self.observer, self._settled
        if observer is not None and observer.ran is not None and settled is not None:
            self._expected = Expected(order, ends, observer.alive, settled, observer.ran)

    def _as_expected(self, expected: Expected, value: Value) -> None:
        expected.asked(self.event, value.number, _compat.node_in_backward())
        for over in expected.outlived():
            over.held = None
            if self.observer is not None:
                self.observer.dropped_before_backward(over.number)

    def retained(self, value: Value, request: Handle) -> bool:
        if not value.pending():
            return False
        settled = self._settled
        if settled is not None and 0 <= value.number < len(settled):
            keep = self.event >= settled[value.number]
        else:
            keep = self.event >= value.retain_from
        if keep and self.observer is not None and not self._read_by_hand:
            self.observer.retained(value)
        return keep

    def replayed(self, operations: list[Operation], seconds: float) -> None:
        self.tally.replayed_operations += len(operations)
        self.tally.replay_seconds += seconds
        if self.observer is not None and not self.begun:
            self.observer.replayed_inside()

    def replay_out_of_memory(self, attempt: int) -> bool:
        """See `lowtide.tape.tape.Decisions`. What earlier replays have retained can be replayed
        once more; what the forward has kept cannot."""
        if attempt or not self.begun:
            return False
        self.owner.backward_ran_out(self)
        self.stop_measuring()  # the step does not go as planned any more
        return self.drop_replayed()

    def answered(self, value: Value, given: torch.Tensor) -> None:
        if self.observer is not None and self.begun and value.number >= 0:
            self.observer.answered(value, given)

    def watch_end(self, callback: Callable[[], None]) -> None:
        """Call back when the backward that runs now ends; if none runs, wait for the real one."""
        try:
            _compat.queue_after_backward(callback)
        except RuntimeError:  # a tensor was unpacked outside of any backward
            self._not_in_backward()
            if self.recorder is not None:
                self.recorder.paused = False


def ends_early(error: BaseException) -> bool:
    """Whether a forward may end with this error as others end with a result: a hook that raises
    once it has what it wants, or a generator that is closed. Its backward may still come."""
    if isinstance(error, LowtideError | torch.OutOfMemoryError):
        return False
    return isinstance(error, Exception | GeneratorExit)
