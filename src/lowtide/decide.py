"""The decisions of one step under a budget.

Problem: a planned step follows its plan without thinking; an unknown one must be watched, kept
inside the limit and learned from; and a planned one may turn out to be unknown halfway (another
shape, another branch). Invariant: a decision is never needed for correctness, only for memory and
time (rule 13), so a step may change from planned to unplanned at any operation. Imports plan,
observe, online. Rejected: checking a whole recorded graph against the plan's when the step is over,
when it is too late to keep the limit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat, engine
from lowtide.observe import Observer
from lowtide.online import Evictor
from lowtide.prepared import ANCHOR, Prepared, Signature
from lowtide.tape.operators import Facts
from lowtide.tape.tape import Tape
from lowtide.tape.values import Handle, Operation, R, Region, Value, WeakList
from lowtide.workspace import made_by, room_for, unfolds

if TYPE_CHECKING:
    from lowtide.budget import Budget

_SPARE = 200  # one part in so many of the limit, for the bytes that no tape counts
_PLENTY = 8  # largest storages seen so far that must fit before a call is looked at closely


@dataclass
class Tally:
    """What a step did, for the report."""

    replayed_operations: int = 0
    replay_seconds: float = 0.0
    evictions: int = 0
    diverged_at: int | None = None


class _Anchor(weakref.ref):  # type: ignore[type-arg]
    """A held value that autograd does not save, and what makes it."""

    __slots__ = ("op",)

    op: Operation


def _moved(links: WeakList[R], to: WeakList[R]) -> WeakList[R]:
    for record in links.alive():
        to.append(record)
    return to


class StepDecisions:
    """Implements `lowtide.tape.tape.Decisions` for one step."""

    asks = True

    def __init__(self, prepared: Prepared | None, observer: Observer | None, owner: Budget) -> None:
        self.prepared = prepared
        self.observer = observer
        self.owner = owner
        self.tally = Tally()
        self.live = [0]
        self.tape: Tape | None = None
        self.evictor: Evictor | None = None
        self.begun = False
        self.switched = False  # from one plan to another or to none
        self.ended = False  # a backward has run to its end
        self.seen: list[Signature] = []
        self._event = [-1]  # the last of backward's requests for a recorded value
        self._made: WeakList[Value] = WeakList()  # what nobody observes, should it be needed
        self._settled: list[int] | None = None  # retention chosen at the start of backward
        self._handles: WeakList[Handle] = WeakList()
        self._anchors: dict[int, _Anchor] = {}
        self._to_come: list[Value] = []  # anchored ones, until the forward is over
        self._compiled: Any = None  # the recorder, while it follows the plan by itself

    def attach(self, tape: Tape) -> None:
        """The tape, once its recorder is open; it counts the live bytes."""
        assert tape.recorder is not None
        self.tape = tape
        self.live = tape.recorder.live
        if self.observer is not None:
            self.observer.attach(tape.recorder)
        if self.prepared is None:
            self._watch_room()
        else:
            tape.recorder.before = self._before_planned
            if self.observer is None:
                self._let_follow(tape.recorder, self.prepared)

    def _let_follow(self, recorder: Any, prepared: Prepared) -> None:
        """A compiled recorder compares the step with the plan itself, and calls `produced` only
        where something has to be done that is not in the plan's list."""
        core = engine.core()
        if core is None or not isinstance(recorder, core.State):
            return
        if self._compiled is None:
            self._made = _moved(self._made, core.WeakList())
            self._handles = _moved(self._handles, core.WeakList())
            self._event = core.Box(self._event[0])
        self._compiled = recorder
        recorder.script = prepared.script
        recorder.made, recorder.handles = self._made, self._handles
        ceiling = self._ceiling(prepared)
        recorder.limit = -1 if ceiling is None else ceiling

    def _ceiling(self, prepared: Prepared) -> int | None:
        """Bytes that a planned forward may have live: as many as its plan has at most. More is
        not as planned, and leaves room for what the tape does not count."""
        limit = self.owner.limit_now
        return None if limit is None else min(limit, max(prepared.peak, limit - limit // _SPARE))

    def _caught_up(self, count: int) -> None:
        """Operations that the compiled recorder found to be as planned, up to the `count`-th."""
        if self._compiled is not None and len(self.seen) < count:
            assert self.prepared is not None
            self.seen.extend(self.prepared.signatures[len(self.seen) : count])

    def _on_our_own(self) -> None:
        """From now on every operation is looked at here."""
        if self._compiled is not None:
            self._compiled.script = None
            self._compiled = None

    def forward_over(self) -> None:
        """The recording is closed."""
        self._to_come.clear()
        if self._compiled is not None:
            self._caught_up(self._compiled.sequence)
            self._on_our_own()

    def _watch_room(self) -> None:
        self.evictor = Evictor(self.live)
        assert self.tape is not None
        assert self.tape.recorder is not None
        self.tape.recorder.before = self._before

    def discard(self) -> None:
        """The step came to nothing."""
        self.stop_measuring()
        self.observer = None
        self._handles.clear()
        self._made.clear()
        self._forget_anchors()

    def let_go(self) -> None:
        """The step is over; only numbers of it are kept."""
        self._handles.clear()
        self._made.clear()
        self._forget_anchors()

    def stop_measuring(self) -> None:
        if self.observer is not None:
            self.observer.stop_measuring()

    # ------------------------------------------------------------------ forward

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        self._caught_up(op.sequence)
        prepared = self.prepared
        signature = (
            op.facts.name,
            tuple([value.nbytes for value in made]),
            tuple([-1 if ref.value is None else ref.value.number for ref in op.refs]),
        )
        self.seen.append(signature)
        if prepared is not None:
            index = op.sequence
            signatures = prepared.signatures
            if index < len(signatures) and signatures[index] == signature:
                self._as_chosen(prepared, op, made)
            elif index or not self._began_as_another(op, made):
                self._diverged(index, op, made)
        if self.observer is not None:
            self.observer.operation(op, made, args, kwargs, self.live[0], signature[2])
        else:
            for value in made:
                self._made.append(value)
        if self.evictor is not None:
            self.evictor.add(made)
            self._make_room()

    def _as_chosen(self, prepared: Prepared, op: Operation, made: list[Value]) -> None:
        for value in made:
            choice = prepared.choices[value.number]
            if choice >= 0:
                value.retain_from = choice
            elif choice == ANCHOR:
                self._anchor(value, op)

    def _began_as_another(self, op: Operation, made: list[Value]) -> bool:
        """The first operation is that of another step that was planned, of another shape say.

        Nothing has been held or dropped yet: it is as if that plan had been the expected one.
        """
        found = self.owner.matching(self.seen, whole=False)
        if found is None:
            return False
        self.prepared = found
        self._as_chosen(found, op, made)
        if self._compiled is not None:
            self._let_follow(self._compiled, found)
        return True

    def _anchor(self, value: Value, op: Operation) -> None:
        """Hold `value`. The tape forgets its operation then; here it is not, while the value lives,
        so that it can be let go after all if the step turns out to be another one.

        It lives as long as the forward: the first to read it may be an operation that makes
        nothing and is forgotten, and the value with it.
        """
        self._to_come.append(value)
        anchors, number = self._anchors, value.number
        value.keep = True
        anchor = _Anchor(value, lambda _: anchors.pop(number, None))
        anchor.op = op
        anchors[number] = anchor

    def _diverged(self, index: int, op: Operation | None, made: list[Value]) -> None:
        """Not the step that was planned: another plan that fits so far, or none.

        What was held up to here may go, as nothing is final before backward begins.
        """
        self.switched = True
        self._on_our_own()
        observer = self.watched(index)
        self.release()
        self.prepared = self.owner.matching(self.seen, whole=op is None)
        if self.prepared is not None:
            self._follow(self.prepared, op, made)
        else:
            self.tally.diverged_at = index
            self._watch_room()
            assert self.evictor is not None
            alive = list(observer.alive())
            self.evictor.add(alive)
            self.evictor.dropped_bytes = sum(v.nbytes for v in alive if v.held is None)

    def _forget_anchors(self) -> None:
        self._anchors.clear()
        self._to_come.clear()

    def release(self) -> None:
        """What is held only because the plan said so may go after all."""
        for anchor in tuple(self._anchors.values()):
            value = anchor()
            if value is not None:
                value.keep = False
                if value.held is not None:
                    value.op = anchor.op
        self._forget_anchors()

    def _follow(self, prepared: Prepared, op: Operation | None, made: list[Value]) -> None:
        """Change over to a plan: what it would not have held by now goes."""
        assert self.observer is not None
        choices = prepared.choices
        for value in (*self.observer.alive(), *made):
            choice = choices[value.number]
            value.retain_from = max(0, choice)
            if choice >= 0 and value.held is not None and value.op is not None:
                self._drop(value)
        for value in made:
            if choices[value.number] == ANCHOR and op is not None:
                self._anchor(value, op)

    def _before_planned(self, facts: Facts, func: Any, args: Any, kwargs: Any) -> None:
        """An operation of a planned forward is about to allocate: is there room for it?

        Not if it is another one than planned, which is known for sure only when it has run, or if
        somebody holds on to what the plan took for gone.
        """
        if self._compiled is not None:
            self._caught_up(self._compiled.sequence)
        prepared, index = self.prepared, len(self.seen)
        limit = None if prepared is None else self._ceiling(prepared)
        if prepared is None or limit is None:
            return
        room = limit - self.live[0]
        need = 0
        if index < len(prepared.signatures) and prepared.signatures[index][0] == facts.name:
            need = prepared.needs[index]
            if 2 * need <= room:
                return
        if need and prepared.measured:  # what is known of its workspace, and what it makes more
            need += max(0, made_by(func, args, kwargs) - sum(prepared.signatures[index][1]))
        elif not need or made_by(func, args, kwargs) != sum(prepared.signatures[index][1]):
            need = room_for(facts.name, func, args, kwargs)
        if need <= room:
            return
        self.switched = True
        self._on_our_own()
        observer = self.watched(index)
        self.release()
        evictor = Evictor(self.live)
        evictor.add(list(observer.alive()))
        if not self._shrink(evictor, limit - need):
            self.owner.cannot_fit(self, facts.name, self.live[0], need)

    def _before(self, facts: Facts, func: Any, args: Any, kwargs: Any) -> None:
        """An operation of an unplanned forward is about to allocate."""
        evictor = self.evictor
        assert evictor is not None
        if self.observer is not None:  # what was dropped before may have gone just now
            self.observer.anew()
        live = self.live[0]
        plenty = live + _PLENTY * evictor.largest
        if plenty <= self.owner.target(live, evictor.dropped_bytes) and not unfolds(facts.name):
            return
        need = room_for(facts.name, func, args, kwargs)
        target = self.owner.target(live + need, evictor.dropped_bytes)
        if not self._shrink(evictor, target - need):
            nearest = room_for(facts.name, func, args, kwargs, nearest=True)
            self.owner.cannot_fit(self, facts.name, self.live[0], min(need, nearest))

    def _make_room(self) -> None:
        evictor = self.evictor
        assert evictor is not None
        live = self.live[0]
        target = self.owner.target(live, evictor.dropped_bytes)
        if live > target and not self._shrink(evictor, target):
            self.owner.cannot_fit(self, self.seen[-1][0], self.live[0], 0)

    def _shrink(self, evictor: Evictor, target: int) -> bool:
        """Drop values until at most `target` bytes are live; whether that many can go."""
        before = self.tally.evictions
        enough = evictor.shrink(max(0, target), self._drop)
        if self.observer is not None and self.tally.evictions > before:
            self.observer.anew()
        return enough

    def _drop(self, value: Value) -> None:
        """Let go of a value that is held, while the forward runs."""
        recorder = None if self.tape is None else self.tape.recorder
        if self.observer is not None:
            self.observer.dropped(value)
        if recorder is None:
            value.held = None
        else:
            recorder.let_go(value)
        self.tally.evictions += 1

    def saved(self, value: Value, region: Region) -> bool:
        prepared = self.prepared
        return prepared is None or prepared.choices[value.number] < 0

    def packed(self, handle: Handle, value: Value) -> None:
        self._handles.append(handle)
        if self.observer is not None:
            self.observer.saved(value, handle)

    def abandoned(self) -> bool:
        """Whether autograd has let go of everything: no backward of this step can come."""
        return not self._handles.any()

    # ------------------------------------------------------------------ backward

    def requested(self, handle: Handle) -> None:
        recorder = handle.tape.recorder
        if recorder is not None and torch.is_grad_enabled():
            return  # a differentiable backward inside the forward, such as a gradient penalty
        if not self.begun:
            self.begun = True
            if recorder is not None:
                recorder.pause()  # backward inside the context: nothing of it is replayed
            self.owner.backward_begins(self)
            if self.begun and self.observer is None and recorder is None:
                handle.tape.events = self._event
        value = handle.value
        if value.number >= 0:
            self._event[0] += 1
            if self.observer is not None:
                self.observer.request(value, handle.sequence)

    def _not_in_backward(self) -> None:
        self.begun = False
        self._nobody_counts()

    def _nobody_counts(self) -> None:
        """Every request is to be told from now on."""
        if self.tape is not None:
            self.tape.events = None

    def backward_ended(self) -> None:
        self._not_in_backward()
        self.ended = True
        if self.observer is not None:
            self.observer.mark_end()
        if self.tape is not None and self.tape.recorder is not None:
            self.tape.recorder.paused = False

    def complete(self) -> None:
        """Backward begins: is the forward that ran the whole of the planned one?"""
        if self._compiled is not None:
            self._caught_up(self._compiled.sequence)
        prepared = self.prepared
        if prepared is not None and len(self.seen) != prepared.seen.forward:
            self._diverged(len(self.seen), None, [])

    @property
    def anchored(self) -> Container[int]:
        """Numbers of the values that are held only because the plan says so."""
        return self._anchors.keys()

    @property
    def event(self) -> int:
        """The last of backward's requests for a recorded value, -1 before the first."""
        return self._event[0]

    @property
    def operations(self) -> int:
        """Operations recorded so far."""
        return len(self.seen)

    def watched(self, count: int) -> Observer:
        """The observer; one is made now if the step seemed to be the planned one so far."""
        if self.observer is None:
            assert self.prepared is not None
            self._nobody_counts()
            self.observer = Observer.resumed(
                self.prepared.seen,
                self.prepared.graph,
                count,
                self._made.alive(),
                self._handles.alive(),
                None if self.tape is None else self.tape.recorder,
            )
        return self.observer

    def alive(self) -> Iterator[Value]:
        """The recorded values that something still needs."""
        if self.observer is not None:
            yield from self.observer.alive()
        else:
            yield from self._made.alive()

    @property
    def followed_unmeasured(self) -> int | None:
        """The predicted peak of the plan that was followed, where that was made from sizes."""
        prepared = self.prepared
        return None if prepared is None or prepared.measured or self.switched else prepared.peak

    def settle_as_planned(self) -> None:
        """The step is the planned one: what it holds is held for good."""
        self._forget_anchors()
        if self.observer is None:
            self._made.settle()
            return
        if self.prepared is not None:
            self.observer.ran = list(self.prepared.plan.retain)
        for value in self.observer.alive():
            if value.held is not None and value.op is not None:
                value.settle()

    def settle(self, chosen: list[int]) -> None:
        """Follow `chosen` in this backward: one retention a value number, as in a `Retention`."""
        self._settled = [max(choice, 0) for choice in chosen]
        assert self.observer is not None
        self.observer.ran = chosen
        for value in self.observer.alive():
            if value.held is None or value.op is None:
                continue
            if chosen[value.number] < 0 or value.number in self.observer.pinned:
                value.settle()
            else:
                value.held = None
                self.tally.evictions += 1
                self.observer.dropped_before_backward(value.number)

    def retained(self, value: Value, request: Handle) -> bool:
        if not value.pending():
            return False
        settled = self._settled
        if settled is not None and 0 <= value.number < len(settled):
            keep = self.event >= settled[value.number]
        else:
            keep = self.event >= value.retain_from
        if keep and self.observer is not None:
            self.observer.retained(value)
        return keep

    def replayed(self, operations: list[Operation], seconds: float) -> None:
        self.tally.replayed_operations += len(operations)
        self.tally.replay_seconds += seconds

    def answered(self, value: Value) -> None:
        if self.observer is not None and self.begun and value.number >= 0:
            self.observer.answered()

    def watch_end(self, callback: Callable[[], None]) -> None:
        """Call back when the backward that runs now ends; not if there is none."""
        try:
            _compat.queue_after_backward(callback)
        except RuntimeError:  # unpacked outside a backward: wait for the real one
            self._not_in_backward()
            if self.tape is not None and self.tape.recorder is not None:
                self.tape.recorder.paused = False
