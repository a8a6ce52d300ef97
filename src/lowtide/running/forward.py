"""The decisions of a forward under a budget: follow a plan, change to another, or do without.

Problem: a planned step follows its plan without thinking, and may turn out to be another one
halfway: another shape, another branch, other parameters that are frozen. Invariant: nothing that is
held is final before backward begins, so a step may change from planned to unplanned at any
operation and let go of what the plan would have held. Imports prepared, observer and the parts that
stand for themselves: anchors, follower, room. Rejected: checking a whole recorded graph against the
plan's when the forward is over, when it is too late to keep the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.kernels.unfolding import runs_itself
from lowtide.kernels.workspace import made_by, room_for
from lowtide.observing.observer import Observer
from lowtide.running.anchors import Anchors
from lowtide.running.follower import Follower
from lowtide.running.prepared import ANCHOR, Prepared, Signature, covers, signature_of
from lowtide.running.room import Room, elsewhere
from lowtide.tape.operators import Facts
from lowtide.tape.tape import Tape
from lowtide.tape.values import Handle, Operation, Region, Value, WeakList

if TYPE_CHECKING:
    from lowtide.budget import Budget

_SPARE = 200  # one part in so many of the limit, for the bytes that no tape counts


@dataclass
class Tally:
    """What a step did, for the report."""

    replayed_operations: int = 0
    replay_seconds: float = 0.0
    diverged_at: int | None = None
    """The operation at which the step left its plan, for none."""


class ForwardDecisions:
    """The part of `lowtide.running.decide.StepDecisions` that is asked in the forward."""

    def __init__(
        self,
        prepared: Prepared | None,
        observer: Observer | None,
        owner: Budget,
        *,
        check_up: bool = False,
    ) -> None:
        self.prepared = prepared
        self.observer = observer
        self.owner = owner
        self.where = owner.where
        self.check_up = check_up  # measured only because none was for long
        self.tally = Tally()
        self.live = [0]
        self.tape: Tape | None = None
        self.begun = False
        self.switched = False  # from one plan to another or to none
        self.ended = False  # a backward has run to its end
        self.covered = False  # the plan is that of a step that is larger
        self._crowded = False  # the plan had no room for what came next
        self.seen: list[Signature] = []
        self._event = [-1]  # the last of backward's requests for a recorded value
        self._made: WeakList[Value] = WeakList()  # what nobody observes, should it be needed
        self._settled: list[int] | None = None  # retention chosen at the start of backward
        self._handles: WeakList[Handle] = WeakList()
        self.anchors = Anchors()
        self._follower: Follower | None = None  # while the compiled recorder follows the plan
        self._room: Room | None = None  # while there is no plan

    @property
    def keeps_wrappers(self) -> bool:
        """See `Tape.kept_whole`."""
        return self.tape is not None and self.tape.kept_whole

    def attach(self, tape: Tape) -> None:
        """The tape, once its recorder is open; it counts the live bytes."""
        assert tape.recorder is not None
        self.tape = tape
        self.live = tape.recorder.live
        if self.observer is not None:
            self.observer.attach(tape.recorder)
        if self.prepared is None:
            self._watch_room()
            return
        tape.recorder.before = self._before_planned
        follower = Follower.of(tape.recorder, self.seen) if self.observer is None else None
        if follower is not None:
            self._made, self._handles, self._event = follower.made, follower.handles, follower.event
            follower.follow(self.prepared, self._ceiling(self.prepared), covered=False)
            self._follower = follower

    def _watch_room(self) -> Room:
        """From now on there is no plan."""
        assert self.tape is not None
        assert self.tape.recorder is not None
        assert self.observer is not None
        room = self._room = Room(self.owner, self.observer, self.live, self._drop)
        self.tape.recorder.before = room.before
        return room

    def _ceiling(self, prepared: Prepared) -> int | None:
        """Bytes that a planned forward may have live: as many as its plan has at most. More is
        not as planned, and leaves room for what the tape does not count."""
        limit = self.owner.limit_now
        return None if limit is None else min(limit, max(prepared.peak, limit - limit // _SPARE))

    def _on_our_own(self) -> None:
        """From now on every operation is looked at here."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _nobody_counts(self) -> None:
        """Every request is to be told from now on."""
        if self.tape is not None:
            self.tape.events = None

    def watched(self, count: int) -> Observer:
        """The observer; one is made now if the step seemed to be the planned one so far."""
        if self.observer is None:
            assert self.prepared is not None
            self._nobody_counts()
            self.observer = Observer.resumed(
                self.prepared.seen,
                self.prepared.graph,
                self.seen[:count],
                self._made.alive(),
                self._handles.alive(),
                None if self.tape is None else self.tape.recorder,
            )
            self.observer.only(self.where)
            self.observer.place = self.prepared.seen.place
            self.observer.before = self.owner.before
        return self.observer

    @property
    def operations(self) -> int:
        """Operations recorded so far."""
        return len(self.seen)

    # ------------------------------------------------------------------ operators

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        if self._follower is not None:
            self._follower.catch_up(op.sequence)
        prepared = self.prepared
        signature = signature_of(op, made, args, kwargs)
        self.seen.append(signature)
        if prepared is not None:
            index = op.sequence
            signatures = prepared.signatures
            planned = signatures[index] if index < len(signatures) else None
            if planned == signature or (
                self.covered
                and planned is not None
                and covers(planned, signature)
                and _same_kernel(prepared, index, args)
            ):
                self._as_chosen(prepared, op, made)
            else:
                self._changed(prepared, op, made, args)
        if self.observer is not None:
            self.observer.operation(op, made, args, kwargs, self.live[0], signature)
        else:
            for value in made:
                self._made.append(value)
        if self._room is not None:
            self._room.produced(op.facts.name, made)

    def _as_chosen(self, prepared: Prepared, op: Operation, made: list[Value]) -> None:
        for value in made:
            choice = prepared.choices[value.number]
            if choice >= 0:
                value.retain_from = choice
            elif choice == ANCHOR:
                self.anchors.hold(value, op)

    def _changed(self, left: Prepared, op: Operation, made: list[Value], args: Any) -> None:
        """Not the operation that was planned: it is one of another step, of another shape say."""
        found, covered = self._other_plan(left, whole=False)
        if found is not None and covered and not _same_kernels(found, left, op.sequence, args):
            found, covered = None, False
        so_far = made[0].number if made else 0
        if (
            found is None
            or self.switched
            or (op.sequence and not made)
            or found.choices[:so_far] != left.choices[:so_far]
        ):
            self._diverged(op.sequence, found, op, made, covered=covered)
            return
        # All that was held and dropped yet would have been by that plan: it might as well have
        # been the expected one.
        self.prepared, self.covered = found, covered
        self._as_chosen(found, op, made)
        if self._follower is not None:
            self._follower.follow(found, self._ceiling(found), covered=covered)

    def _other_plan(self, left: Prepared, *, whole: bool) -> tuple[Prepared | None, bool]:
        """The plan for a step like this one so far, and whether it is that of a larger one."""
        found = self.owner.matching(self.seen, whole=whole, other_than=left)
        if found is not None:
            return found, False
        # That of a larger step it may be itself, unless it is not the operations that differ.
        other_than = left if whole else None
        found = self.owner.covering(self.seen, whole=whole, other_than=other_than)
        return found, found is not None

    def _diverged(
        self,
        index: int,
        found: Prepared | None,
        op: Operation | None,
        made: list[Value],
        *,
        covered: bool,
    ) -> None:
        """Not the step that was planned: another one that fits so far, or none.

        What was held up to here may go, as nothing is final before backward begins.
        """
        self.switched = True
        self._on_our_own()
        self.watched(index)
        self.anchors.release()
        self.prepared, self.covered = found, covered
        if self.prepared is not None:
            self._crowded = False  # it was the other plan that had no room
            self._follow(self.prepared, op, made)
        else:
            self.tally.diverged_at = index
            if self.tape is not None and self.tape.recorder is not None:
                self._watch_room().take_over()

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
                self.anchors.hold(value, op)

    def _before_planned(self, facts: Facts, func: Any, args: Any, kwargs: Any) -> None:
        """An operation of a planned forward is about to allocate: is there room for it?

        Not if it is another one than planned, which is known for sure only when it has run, or if
        somebody holds on to what the plan took for gone.
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
        if need and prepared.measured:  # what is known of its workspace, and what it makes more
            need += max(0, made_by(func, args, kwargs) - sum(prepared.signatures[index][1]))
        elif not need or made_by(func, args, kwargs) != sum(prepared.signatures[index][1]):
            need = room_for(facts.name, func, args, kwargs)
        if need <= free:
            return
        room = self._crowd()
        if not room.shrink(limit - need):
            room.lacks(facts.name, need)

    def _crowd(self) -> Room:
        """The plan has no room for what comes next: from here on all that it holds may go."""
        self.switched = self._crowded = True
        self._on_our_own()
        observer = self.watched(len(self.seen))
        self.anchors.release()
        room = Room(self.owner, observer, self.live, self._drop)
        room.take_over()
        return room

    def out_of_memory(self, facts: Facts, func: Any, args: Any, kwargs: Any, attempt: int) -> bool:
        """See `lowtide.tape.tape.Decisions`."""
        if self._follower is not None:
            self._follower.catch_up()
        if self.begun or elsewhere(self.owner, args):
            return False
        self.owner.ran_out(self.live[0])
        room = self._crowd() if self._room is None else self._room
        need = room_for(facts.name, func, args, kwargs)
        return room.give(max(need, room.largest, 1) << attempt)

    def _drop(self, value: Value) -> None:
        """Let go of a value that is held, while the forward runs."""
        recorder = None if self.tape is None else self.tape.recorder
        if self.observer is not None:
            self.observer.dropped(value)
        if recorder is None:
            value.held = None
        else:
            recorder.let_go(value)

    # ------------------------------------------------------------------ autograd

    def saved(self, value: Value, region: Region) -> bool:
        prepared = self.prepared
        return prepared is None or prepared.choices[value.number] < 0

    def packed(self, handle: Handle, value: Value) -> None:
        self._handles.append(handle)
        if self.observer is not None:
            self.observer.saved(value, handle)

    def forgotten(self, value: Value) -> None:
        if self.observer is not None:
            self.observer.let_go(value)

    def complete(self) -> None:
        """Backward begins: is the forward that ran the whole of the planned one?"""
        if self._follower is not None:
            self._follower.catch_up()
        prepared = self.prepared
        if prepared is None:
            return
        if len(self.seen) != prepared.seen.forward or self._saves_more(prepared):
            found, covered = self._other_plan(prepared, whole=True)
            self._diverged(len(self.seen), found, None, [], covered=covered)

    def _saves_more(self, prepared: Prepared) -> bool:
        """The operations are those of the plan, and backward will ask for values that it has not:
        what was frozen or under `no_grad` then is not now."""
        seen = prepared.seen
        if seen.saved is None:
            return False
        if not seen.current():
            return True
        return self._handles.beyond(seen.saved)


def _same_kernels(larger: Prepared, left: Prepared, index: int, args: Any) -> bool:
    """The same of this convolution, and of those before it, which were run as `left` has them."""
    before = (at for at in larger.itself if at < index)
    if any(larger.itself[at] != left.itself.get(at) for at in before):
        return False
    return _same_kernel(larger, index, args)


def _same_kernel(larger: Prepared, index: int, args: Any) -> bool:
    """Whether a smaller convolution than the planned one is run alike."""
    if index not in larger.itself:
        return True
    device = args[0].device.type
    return device != "cpu" or larger.itself[index] == runs_itself(args, device)
