"""A step that nobody watches: no plan covers it, and it is below its limit.

Problem: watching a step takes ten times as long as its small kernels do; where no step is like
another (recurrent layers on packed sequences, graphs), that was the price of a limit which none of
them comes near. Invariant: such a step holds everything, and before each call, and after it, the
most that it may take is known to be below the limit: what is live, with all that its backward may
have at once, added up by the compiled recorder (`compiled/headroom.h`). Otherwise it is watched
from there on, with estimates from sizes for what ran before. Imports making_room, prepared,
workspace and the engine. Rejected: not recording it, as one call may make any amount out of little.
"""

from __future__ import annotations

from typing import Any

from lowtide import engine
from lowtide.kernels.scratchpad import scratchpad
from lowtide.kernels.workspace import (
    kernel_workspace,
    most_in_backward,
    read_by,
    room_for,
    workspace_of,
)
from lowtide.observing.logs import Alone, made_by, overwritten_by
from lowtide.observing.observer import Observer
from lowtide.replay import in_memory
from lowtide.running.making_room import StepInRoom
from lowtide.running.prepared import Prepared, Signature
from lowtide.tape.operators import Facts
from lowtide.tape.values import Handle, Operation, Value, WeakList, tensors_in


class StepAlone(StepInRoom):
    """The part of `lowtide.running.decide.StepDecisions` for a step that goes alone.

    Attributes:
        headroom: `core.Headroom`, while it does; else None.
        estimated: it was alone, and is watched now: its first part is known by sizes only.
    """

    headroom: Any = None
    estimated = False
    _left: Prepared | None = None  # the plan that it left to go alone
    _watched_until = 0  # and at which operation

    def _goes_alone(self, left: Prepared | None, index: int) -> bool:
        """From now on nobody watches the step, if that is possible: it begins, or has `left` its
        plan at an operation, or is recorded from here on only."""
        recorder = self.recorder
        if recorder is None or self.begun or self.observer is not None:
            return False
        headroom = self.owner.unwatched.headroom(recorder, left, index, teaches=not self.partial)
        if headroom is None:
            return False
        compiled: Any = recorder
        core = engine.core()
        if compiled.made is None:
            made: WeakList[Value] = core.WeakList()
            handles: WeakList[Handle] = core.WeakList()
            self._made, self._handles, self._event = made, handles, core.Box(-1)
            compiled.made, compiled.handles = made, handles
        self.headroom = compiled.headroom = headroom
        self._left, self._watched_until = left, index
        recorder.before = self._before_alone
        return True

    # ------------------------------------------------------------------ operators

    def before_alone(
        self, facts: Facts, func: Any, args: Any, kwargs: dict[str, Any], need: int | None
    ) -> None:
        """A call is about to run that was not met before, or `need` bytes for which there is no
        room. Watch the step if that may be too much."""
        if self.headroom is None or self.where.makes_elsewhere(facts, args, kwargs):
            return
        if need is None:
            need = room_for(facts.name, func, args, kwargs)
        if self.live[0] + need > self.headroom.limit:
            self.watch_from_here()
            if self._room is not None:
                self._room.before(facts, func, args, kwargs)

    def _before_alone(self, facts: Facts, func: Any, args: Any, kwargs: Any) -> None:
        self.before_alone(facts, func, args, kwargs, None)

    def cost_of(
        self, facts: Facts, func: Any, args: Any, kwargs: dict[str, Any], made: int
    ) -> tuple[int, int]:
        """The most bytes that a call takes while it runs, and while its backward does."""
        tensors, name = read_by(func, args, kwargs), facts.name
        workspace = scratchpad(name, args) + max(
            kernel_workspace(name, tensors, args, made), workspace_of(name, tensors, args, made)
        )
        gradients = sum(t.numel() * t.element_size() for t in tensors if t.requires_grad)
        return made + workspace, most_in_backward(name, gradients, made, workspace)

    def _produced_alone(
        self, op: Operation, made: list[Value], signature: Signature, args: Any, kwargs: Any
    ) -> None:
        """An operation that the compiled recorder has left to Python."""
        headroom = self.headroom
        for value in made:
            self._made.append(value)
        need, later = self.cost_of(op.facts, op.facts.func, args, kwargs, sum(signature[1]))
        ran = signature, made_by(made), overwritten_by(op), self.live[0], need, later
        headroom.note(ran, tensors_in(args, kwargs), op.grad_mode)
        if headroom.at_most(self.live[0]) > headroom.limit:
            self.watch_from_here()

    # ------------------------------------------------------------------ watched after all

    def watch_from_here(self) -> None:
        """The step does not go alone any more."""
        headroom, left = self.headroom, self._left
        if headroom is None:
            return
        self.end_alone()
        self.estimated = True
        recorder, ran = self.recorder, headroom.seen(0)
        before = self.seen[: self._watched_until]
        if left is None:
            observer = Observer(None)
        else:
            observer = Observer.resumed(left.seen, left.graph, before, (), (), recorder)
        observer.went_alone(
            ran,
            headroom.leaves,
            headroom.leaves_read(),
            self._made.alive(),
            self._handles.alive(),
            recorder,
        )
        self._told(observer, self.owner.knows.place if left is None else left.seen.place)
        self._nobody_counts()
        if recorder is not None:
            self._watch_room().take_over()

    def end_alone(self) -> None:
        """The operations that ran alone are `seen` from now on."""
        self._catch_up_alone()
        self.headroom = None
        recorder: Any = self.recorder
        if recorder is not None:
            recorder.headroom = None

    def _catch_up_alone(self) -> None:
        if self.headroom is not None:
            ran: list[Alone] = self.headroom.seen(len(self.seen) - self._watched_until)
            self.seen.extend([signature for signature, *_ in ran])

    def _unrecorded(self, facts: Facts, args: Any, kwargs: Any, over: bool) -> None:
        self.watch_from_here()  # what it makes, and its backward takes, nothing tells
        super()._unrecorded(facts, args, kwargs, over)

    def gathered(self, keys: list[int], nbytes: int, parts: int) -> None:
        """See `lowtide.tape.tape.Decisions`."""
        self.watch_from_here()

    def room_for_replay(self, value: Value) -> None:
        """See `StepInRoom`. A step that goes alone replays nothing."""
        if value.op is not None and in_memory(value) is None:
            self.watch_from_here()
        super().room_for_replay(value)

    def out_of_memory(self, facts: Facts, func: Any, args: Any, kwargs: Any, attempt: int) -> bool:
        """See `lowtide.tape.tape.Decisions`."""
        self.watch_from_here()
        return super().out_of_memory(facts, func, args, kwargs, attempt)
