"""The state of a step under a budget, and how room is made for what comes next.

Problem: a step without a plan, or with one that has no room for its next operation, has to drop
something before that runs. Invariant: live bytes stay under the limit while anything is left that
can be dropped; if nothing is, the step is refused before the operation runs. Imports prepared,
observer, follower, room. Rejected: dropping after the operation has run, or failed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.kernels.results import made_by
from lowtide.kernels.workspace import room_for
from lowtide.observing.observer import Observer
from lowtide.replay import in_memory, peak_of
from lowtide.running.anchors import Anchors
from lowtide.running.follower import Follower
from lowtide.running.prepared import Prepared, Signature
from lowtide.running.room import Room
from lowtide.tape.operators import Facts
from lowtide.tape.tape import Decisions, Tape
from lowtide.tape.values import Handle, Operation, Value, WeakList

if TYPE_CHECKING:
    from lowtide.loop import Loop
    from lowtide.running.where import Where
    from lowtide.tape.recorder import Recorder

_SPARE = 200  # 1/200 of the limit is left for bytes that no tape counts


@dataclass
class Tally:
    """What a step did, for the report."""

    replayed_operations: int = 0
    replay_seconds: float = 0.0
    diverged_at: int | None = None
    """The operation at which the step left its plan and found no other."""


class StepInRoom(Decisions):
    """The part of `lowtide.running.decide.StepDecisions` that keeps the live bytes down."""

    def __init__(
        self,
        prepared: Prepared | None,
        observer: Observer | None,
        owner: Loop,
        *,
        check_up: bool = False,
    ) -> None:
        self.prepared = prepared
        self.observer = observer
        self.owner = owner
        self.where: Where = owner.where
        self.check_up = check_up  # measured only because no step was for a long time
        self.tally = Tally()
        self.live = [0]
        self.partial = False  # a part is kept whole, or was not recorded
        self._tape: weakref.ref[Tape] | None = None
        self.begun = False
        self.switched = False  # changed from one plan to another or to none
        self.ended = False  # a backward has run to its end
        self.covered = False  # the plan is that of a larger step
        self.parted: tuple[Prepared, int] | None = None  # the plan it left first, and where
        self.refused_for = "", 0  # the planned step's operation that has no room, and its bytes
        self.calls: list[tuple[int, str]] = []  # not recorded: before which operation, and whose
        self._crowded = False  # the plan had no room for what came next
        self._gathers: list[tuple[list[int], int, int]] = []  # what `gathered` was told
        self.seen: list[Signature] = []
        self.saves = False  # autograd has saved something in the recording's hooks
        self.others_save = False  # hooks of the program's own were open instead
        self.idle = False  # it is not recorded, see `lowtide.learning.idling`
        self.noted: Any = None  # its calls, if they are to be compared with the next step's
        self._event = [-1]  # the last of backward's requests for a recorded value
        self._made: WeakList[Value] = WeakList()  # values made without an observer
        self._settled: list[int] | None = None  # retention chosen at the start of backward
        self._handles: WeakList[Handle] = WeakList()
        self.anchors = Anchors()
        self._follower: Follower | None = None  # while the compiled recorder follows the plan
        self._room: Room | None = None  # while there is no plan

    @property
    def tape(self) -> Tape | None:
        """The tape of the step; None before the step has one, and once nothing refers to it: no
        recorder and no handle of autograd's is left."""
        return None if self._tape is None else self._tape()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder while the forward is being recorded, else None."""
        tape = self.tape
        return None if tape is None else tape.recorder

    def kept_whole(self) -> None:
        """See `lowtide.tape.tape.Decisions`."""
        self.partial = True

    @property
    def operations(self) -> int:
        """Operations recorded so far."""
        return len(self.seen)

    def made_bytes(self) -> int | None:
        """Bytes that operations have made since the step was woken; None if a call was not recorded
        that the steps before did not have."""
        known = () if self.parted is None else self.parted[0].seen.calls
        if {name for _, name in self.calls} - {name for _, name in known}:
            return None
        return sum(sum(nbytes) for _, nbytes, *_ in self.seen)

    def watched(self, count: int) -> Observer:
        """The observer; made now if the step was not watched, as it was as planned for `count`
        operations."""
        if self.observer is None:
            assert self.prepared is not None
            self._nobody_counts()
            observer = Observer.resumed(
                self.prepared.seen,
                self.prepared.graph,
                self.seen[:count],
                self._made.alive(),
                self._handles.alive(),
                self.recorder,
            )
            self._told(observer, self.prepared.seen.place)
        assert self.observer is not None
        return self.observer

    def _told(self, observer: Observer, place: int) -> None:
        """Have an observer that is made late, and tell it what it has missed."""
        self.observer = observer
        observer.place = place
        observer.calls = self.calls
        observer.only(self.where)
        for gather in self._gathers:
            observer.gathered(*gather)
        observer.cut_off(self.anchors.cut_off)
        observer.before = self.owner.allowance.before

    def _on_our_own(self) -> None:
        """From now on every operation is checked here, not by the compiled recorder."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _nobody_counts(self) -> None:
        """From now on every request of backward is reported."""
        tape = self.tape
        if tape is not None:
            tape.events = None

    def _drop(self, value: Value) -> None:
        """Drop a value that is held, while the forward runs."""
        recorder = self.recorder
        if self.observer is not None:
            self.observer.dropped(value)
        if recorder is None:
            value.held = None
        else:
            recorder.let_go(value)

    # ------------------------------------------------------------------ room

    def _ceiling(self, prepared: Prepared) -> int | None:
        """Bytes that a planned forward may have live: its plan's peak, or the limit less a small
        share for what the tape does not count, if that is more."""
        limit = self.owner.allowance.now
        return None if limit is None else min(limit, max(prepared.peak, limit - limit // _SPARE))

    def _watch_room(self) -> Room:
        """From now on there is no plan: keep the live bytes under the limit."""
        assert self.recorder is not None
        assert self.observer is not None
        room = self._room = Room(self.owner, self.observer, self.live, self._drop)
        self.recorder.before = room.before
        return room

    def _unrecorded(self, facts: Facts, args: Any, kwargs: Any, over: bool) -> None:
        """A call that is not recorded is about to run, or is `over`."""
        recorder = self.recorder
        if not (over or self.begun or self.ended) and recorder is not None:
            self.calls.append((recorder.sequence, facts.name))
        if self._room is not None:
            self._room.kept(facts, args, kwargs, over)

    def _before_planned(self, facts: Facts, func: Any, args: Any, kwargs: Any) -> None:
        """An operation of a planned forward is about to allocate: make room if there is none.

        There may be none if it is not the planned operation, which is certain only after it has
        run, or if the program still has memory that the plan takes for freed.
        """
        if self._follower is not None:
            self._follower.catch_up()
        prepared, index = self.prepared, len(self.seen)
        limit = None if prepared is None else self._ceiling(prepared)
        if prepared is None or limit is None:
            return
        free = limit - self.live[0]
        need = 0
        if index < len(prepared.signatures) and prepared.signatures[index][0] == facts.name:
            need = prepared.needs[index]
            if 2 * need <= free:
                return
        if self.where.makes_elsewhere(facts, args, kwargs):
            return
        if need and prepared.measured:  # the workspace as measured, plus what it makes more
            need += max(0, made_by(func, args, kwargs) - sum(prepared.signatures[index][1]))
        elif not need or made_by(func, args, kwargs) != sum(prepared.signatures[index][1]):
            need = room_for(facts.name, func, args, kwargs)
        if need <= free:
            return
        room = self._crowd()
        if not room.shrink(limit - need):
            self.refused_for = facts.name, made_by(func, args, kwargs)
            self.parted = self.parted or (prepared, index)
            room.lacks(facts.name, need)

    def _crowd(self) -> Room:
        """The plan has no room for what comes next: from here on, what it holds may be dropped."""
        self.switched = self._crowded = True
        self._on_our_own()
        observer = self.watched(len(self.seen))
        self.anchors.release()
        room = Room(self.owner, observer, self.live, self._drop)
        room.take_over()
        return room

    def room_for_replay(self, value: Value) -> None:
        """A differentiable backward inside the forward asks for a value: if it was dropped, make
        room to replay it. The operators inside a replay do not ask for room themselves.

        What is dropped for that may have to be replayed too, so the need is found anew each time.
        """
        if value.op is None or in_memory(value) is not None:
            return
        if self._follower is not None:
            self._follower.catch_up()
        ceiling = None if self.prepared is None else self._ceiling(self.prepared)
        room = self._room
        while room is not None or ceiling is not None:
            need = peak_of(value, self._allocates)
            most = self._room.target(need) if self._room is not None else ceiling
            if most is None or self.live[0] + need <= most:
                break
            room = room or self._crowd()
            if not room.shrink(most - need):
                room.lacks(value.op.facts.name, need)
                break
        if self.observer is not None:
            self.observer.replays_inside()

    def _allocates(self, op: Operation) -> int:
        """Bytes that an operation of this step allocates, workspace included."""
        index, observer, prepared = op.sequence, self.observer, self.prepared
        if observer is not None and index < len(observer.ops):
            return sum(observer.ops[index].sizes) + observer.ops[index].workspace
        if prepared is not None and index < len(prepared.needs):
            return prepared.needs[index]
        return sum(made.nbytes for made in op.made())

    def out_of_memory(self, facts: Facts, func: Any, args: Any, kwargs: Any, attempt: int) -> bool:
        """See `lowtide.tape.tape.Decisions`."""
        if self._follower is not None:
            self._follower.catch_up()
        if self.begun or self.where.makes_elsewhere(facts, args, kwargs):
            return False
        self.owner.allowance.ran_out(self.live[0])
        room = self._crowd() if self._room is None else self._room
        need = room_for(facts.name, func, args, kwargs)
        return room.give(max(need, room.largest, 1) << attempt)
