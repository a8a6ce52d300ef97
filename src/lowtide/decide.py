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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.observe import Observer, Seen
from lowtide.online import Evictor
from lowtide.planner import Graph, Retention
from lowtide.tape.operators import Facts
from lowtide.tape.tape import Tape
from lowtide.tape.values import Handle, Operation, Region, Value
from lowtide.workspace import room_for, unfolds

if TYPE_CHECKING:
    from lowtide.budget import Budget

_PLENTY = 8  # largest storages seen so far that must fit before a call is looked at closely

# What an operation looks like to a plan: its name and the bytes it makes.
Signature = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Prepared:
    """A plan with what is needed to follow it operation by operation."""

    plan: Retention
    graph: Graph
    signatures: tuple[Signature, ...]
    peak: int
    """Predicted peak, in bytes."""
    seen: Seen
    """The step it was made from, for the part that a step which changes later has in common."""

    def bytes(self) -> tuple[int, int]:
        """Bytes of activations that the plan keeps, and that it recomputes."""
        kept = recomputed = 0
        for value, (node, choice) in enumerate(
            zip(self.graph.values, self.plan.retain, strict=True)
        ):
            if choice < 0:
                kept += node.nbytes
            elif self.graph.release[value] >= 0:
                recomputed += node.nbytes
        return kept, recomputed

    @staticmethod
    def of(plan: Retention, graph: Graph, peak: int, seen: Seen) -> Prepared:
        signatures = tuple(
            (op.name, tuple(graph.values[v].nbytes for v in op.outputs)) for op in graph.ops
        )
        return Prepared(plan, graph, signatures, peak, seen)


@dataclass
class Tally:
    """What a step did, for the report."""

    recorded_operations: int = 0
    replayed_operations: int = 0
    replay_seconds: float = 0.0
    evictions: int = 0
    diverged_at: int | None = None


class StepDecisions:
    """Implements `lowtide.tape.tape.Decisions` for one step."""

    asks = True

    def __init__(self, prepared: Prepared | None, observer: Observer | None, owner: Budget) -> None:
        self.prepared = prepared
        self.observer = observer
        self.owner = owner
        self.tally = Tally()
        self.event = -1
        self.live = [0]
        self.tape: Tape | None = None
        self.evictor: Evictor | None = None
        self.pending = 0  # handles that autograd holds
        self.begun = False
        self.switched = False  # from one plan to another or to none
        self.ended = False  # a backward has run to its end
        self.seen: list[Signature] = []
        self._made: list[weakref.ref[Value]] = []  # what nobody observes, should it be needed
        self._settled: list[int] | None = None  # retention chosen at the start of backward
        self._handles: list[weakref.ref[Handle]] = []

    def attach(self, tape: Tape) -> None:
        """The tape, once its recorder is open; it counts the live bytes."""
        assert tape.recorder is not None
        self.tape = tape
        self.live = tape.recorder.live
        if self.observer is not None:
            tape.recorder.drawn = self.observer.drawn
        if self.prepared is None:
            self._watch_room()

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

    def stop_measuring(self) -> None:
        if self.observer is not None:
            self.observer.stop_measuring()

    # ------------------------------------------------------------------ forward

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        self.tally.recorded_operations += 1
        prepared = self.prepared
        signature = (op.facts.name, tuple([value.nbytes for value in made]))
        self.seen.append(signature)
        if prepared is not None:
            index = op.sequence
            signatures = prepared.signatures
            if index < len(signatures) and signatures[index] == signature:
                retain = prepared.plan.retain
                for value in made:
                    choice = retain[value.number]
                    if choice < 0:
                        value.keep = True
                    else:
                        value.retain_from = choice
            else:
                self._diverged(index, made)
        if self.observer is not None:
            self.observer.operation(op, made, args, kwargs, self.live[0])
        else:
            self._made.extend([weakref.ref(value) for value in made])
        if self.evictor is not None:
            self.evictor.add(made)
            self._make_room()

    def _diverged(self, index: int, made: list[Value]) -> None:
        """Not the step that was planned: another plan that fits so far, or none.

        What was decided up to here stays; backward is planned anew when it begins (`switched`).
        """
        self.switched = True
        self._watch_room()
        assert self.evictor is not None
        if self.observer is None and self.prepared is not None:
            self.observer = Observer.resumed(
                self.prepared.seen, index, self._made, [weak() for weak in self._handles]
            )
        if self.observer is not None:
            self.evictor.add(list(self.observer.alive()))
        self.prepared = self.owner.matching(self.seen)
        if self.prepared is not None:
            retain = self.prepared.plan.retain
            for value in made:
                value.keep = retain[value.number] < 0
                value.retain_from = max(0, retain[value.number])
        else:
            self.tally.diverged_at = index

    def _before(self, facts: Facts, func: Any, args: Any, kwargs: Any) -> None:
        """An operation of an unplanned forward is about to allocate."""
        evictor = self.evictor
        assert evictor is not None
        live = self.live[0]
        plenty = live + _PLENTY * evictor.largest
        if plenty <= self.owner.target(live, evictor.dropped_bytes) and not unfolds(facts.name):
            return
        need = room_for(facts.name, func, args, kwargs)
        target = self.owner.target(live + need, evictor.dropped_bytes)
        evictor.shrink(max(0, target - need), self._evicted)

    def _make_room(self) -> None:
        evictor = self.evictor
        assert evictor is not None
        live = self.live[0]
        target = self.owner.target(live, evictor.dropped_bytes)
        if live > target and not evictor.shrink(target, self._evicted):
            self.owner.cannot_fit(self.live[0], self.seen[-1])

    def _evicted(self, value: Value) -> None:
        self.tally.evictions += 1
        if self.observer is not None:
            self.observer.evicted[value.number] = len(self.observer.ops)

    def saved(self, value: Value, region: Region) -> bool:
        return self.prepared is None

    def packed(self, handle: Handle, value: Value) -> None:
        self.pending += 1
        self._handles.append(weakref.ref(handle, self._dropped))
        if self.observer is not None:
            self.observer.saved(value, handle)

    def _dropped(self, _: Any) -> None:
        self.pending -= 1

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
        value = handle.ref.value
        assert value is not None
        if value.number >= 0:
            self.event += 1
            if self.observer is not None:
                self.observer.request(value, handle.sequence)

    def backward_ended(self) -> None:
        self.begun = False
        self.ended = True
        if self.observer is not None:
            self.observer.mark_end()
        if self.tape is not None and self.tape.recorder is not None:
            self.tape.recorder.paused = False

    def settle(self, chosen: list[int]) -> None:
        """Follow `chosen` in this backward: one retention a value number, as in a `Retention`."""
        self._settled = [max(choice, 0) for choice in chosen]
        assert self.observer is not None
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
            self.begun = False
            if self.tape is not None and self.tape.recorder is not None:
                self.tape.recorder.paused = False
