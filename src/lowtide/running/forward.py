"""The decisions of a forward under a budget: follow a plan, change to another, or do without.

Problem: a planned step follows its plan without thinking, and may turn out to be another one
halfway: another shape, another branch, other parameters that are frozen. Invariant: nothing that is
held is final before backward begins, so a step may change from planned to unplanned at any
operation and drop what the plan would have held. Imports alone, prepared and follower.
Rejected: comparing the whole recorded graph with the plan's when the forward is over, which is too
late to keep the limit.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

from lowtide import _compat
from lowtide.kernels.unfolding import runs_itself
from lowtide.observing.observer import Observer
from lowtide.planner import HOLD
from lowtide.running.alone import StepAlone
from lowtide.running.follower import Follower
from lowtide.running.prepared import ANCHOR, Prepared, covers, signature_of
from lowtide.tape.regions import Region
from lowtide.tape.tape import Tape
from lowtide.tape.values import Handle, Operation, Value


class ForwardDecisions(StepAlone):
    """The part of `lowtide.running.decide.StepDecisions` that is asked in the forward."""

    def attach(self, tape: Tape) -> None:
        """Take the tape once its recorder is open, which counts the live bytes."""
        assert tape.recorder is not None
        self._tape = weakref.ref(tape)
        self.live = tape.recorder.live
        tape.recorder.kept = self._unrecorded
        if self.prepared is None and self.observer is None:
            if self._goes_alone(None, 0):
                return
            self._told(Observer(None), self.owner.knows.place)
        if self.observer is not None:
            self.observer.attach(tape.recorder, self.calls)
        if self.prepared is None:
            self._watch_room()
            return
        tape.recorder.before = self._before_planned
        follower = Follower.of(tape.recorder, self.seen) if self.observer is None else None
        if follower is not None:
            self._made, self._handles, self._event = follower.made, follower.handles, follower.event
            follower.follow(self.prepared, self._ceiling(self.prepared), covered=False)
            self._follower = follower

    @property
    def strange(self) -> tuple[Prepared, int] | None:
        """The plan that the step follows, and the first operation before which it made a call that
        is not recorded and that this plan does not know of."""
        if self.prepared is None:
            return None
        known = Counter(self.prepared.seen.calls)
        for call in self.calls:
            known[call] -= 1
            if known[call] < 0:
                return self.prepared, call[0]
        return None

    # ------------------------------------------------------------------ operators

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        if self._follower is not None:
            self._follower.catch_up(op.sequence)
        prepared = self.prepared
        signature = signature_of(op, made, args, kwargs)
        if self.headroom is not None:
            self._produced_alone(op, made, signature, args, kwargs)
            return
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
                self._as_chosen(prepared, made)
            else:
                self._changed(prepared, op, made, args)
        if self.headroom is not None:  # it has just left its plan, and goes alone from here on
            self._produced_alone(op, made, self.seen.pop(), args, kwargs)
        elif self.observer is not None:
            self.observer.operation(op, made, args, kwargs, self.live[0], signature)
            if signature[3] and not (self.saves or self.others_save):
                self._look_at_hooks()
        else:
            for value in made:
                self._made.append(value)
        if self._room is not None:
            self._room.produced(op.facts.name, made)

    def _look_at_hooks(self) -> None:
        """An operation that has a backward was the first, or followed others that saved nothing."""
        recorder = self.recorder
        if recorder is not None and torch.is_grad_enabled():
            self.others_save = _compat.other_hooks_than(recorder.pack)

    def _as_chosen(self, prepared: Prepared, made: list[Value]) -> None:
        for value in made:
            choice = prepared.choices[value.number]
            if choice >= 0:
                value.retain_from = choice
            elif choice == ANCHOR:
                self.anchors.hold(value)

    def _changed(self, left: Prepared, op: Operation, made: list[Value], args: Any) -> None:
        """The operation is not the planned one: the step is another, with another shape perhaps."""
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
        # The other plan would have held and dropped the same values so far: it takes over.
        self.prepared, self.covered = found, covered
        self._as_chosen(found, made)
        if self._follower is not None:
            self._follower.follow(found, self._ceiling(found), covered=covered)

    def _other_plan(self, left: Prepared, *, whole: bool) -> tuple[Prepared | None, bool]:
        """Another plan for a step like this one so far, and whether it is that of a larger one."""
        found = self.owner.choosing.matching(self.seen, whole=whole, other_than=left)
        if found is not None:
            return found, False
        # `left` itself may serve as that of a larger step, unless its operations all matched.
        other_than = left if whole else None
        found = self.owner.choosing.covering(self.seen, whole=whole, other_than=other_than)
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
        """Not the step that was planned: go on with another plan that fits so far, or with none.

        What is held may be dropped, as nothing is final before backward begins. Steps that take
        turns change plans all the time, so a step that does is watched no more than others.
        """
        left = self.prepared
        if left is not None and self.parted is None:
            self.parted = left, index
        if found is None and (op or self.partial) and self._goes_alone(left, index):
            self._on_our_own()
            self.anchors.release()
            self.prepared, self.covered, self.switched = None, False, True
            self.tally.diverged_at = index
            return
        if found is None or left is None or self.observer is not None:
            self._on_our_own()
            self.watched(index)
        self.anchors.release()
        self.prepared, self.covered = found, covered
        if found is not None:
            self._crowded = False  # that was about the plan just left
            count = made[0].number if made else len(found.choices)
            self.switched = self.switched or left is None or not _holds(left, found, count)
            self._follow(found, made)
            if self._follower is not None:
                self._follower.follow(found, self._ceiling(found), covered=covered)
        else:
            self.switched = True
            self.tally.diverged_at = index
            if self.recorder is not None:
                self._watch_room().take_over()

    def _follow(self, prepared: Prepared, made: list[Value]) -> None:
        """Change to a plan: drop what it would not have held."""
        choices, dropped = prepared.choices, []
        alive = self._made.alive() if self.observer is None else self.observer.alive()
        for value in (*alive, *made):
            choice = choices[value.number]
            value.retain_from = max(0, choice)
            if choice >= 0 and value.held is not None and value.op is not None:
                self._drop(value)
                dropped.append((value.number, value.nbytes))
        for value in made:
            if choices[value.number] == ANCHOR:
                self.anchors.hold(value)
        if self.observer is not None:
            self.observer.changes_plan(dropped)

    def woken(self, at: int) -> None:
        """See `lowtide.tape.tape.Decisions`. What was made and saved before is not on the tape, and
        stays: the rest of the step has what the plan leaves of the limit."""
        self.idle = False
        self.owner.unrecorded.woken(self.prepared, at)
        if at:
            self.partial = True
            self._diverged(0, None, None, [], covered=False)

    # ------------------------------------------------------------------ autograd

    def saved(self, value: Value, region: Region) -> bool:
        prepared = self.prepared
        return prepared is None or prepared.choices[value.number] < 0

    def packed(self, handle: Handle, value: Value) -> None:
        self.saves = True
        self._handles.append(handle)
        if self.observer is not None:
            self.observer.saved(value, handle)
        if self._room is not None:
            self._room.held(value)

    def gathered(self, keys: list[int], nbytes: int, parts: int) -> None:
        super().gathered(keys, nbytes, parts)
        self._gathers.append((keys, nbytes, parts))
        if self.observer is not None:
            self.observer.gathered(keys, nbytes, parts)

    def cut_off(self, numbers: int) -> None:
        self.anchors.cut_off = numbers
        if self.observer is not None:
            self.observer.cut_off(numbers)

    def forgotten(self, value: Value) -> None:
        if self.observer is not None:
            self.observer.let_go(value)

    def complete(self) -> None:
        """Backward begins: leave the plan if the forward that ran is not the whole planned one."""
        if self._follower is not None:
            self._follower.catch_up()
        prepared = self.prepared
        if prepared is None:
            return
        if (
            len(self.seen) != prepared.seen.forward
            or self._saves_more(prepared)
            or self._saves_less(prepared)
        ):
            found, covered = self._other_plan(prepared, whole=True)
            self._diverged(len(self.seen), found, None, [], covered=covered)

    def _saves_more(self, prepared: Prepared) -> bool:
        """Whether backward will request values that the plan does not have, although the operations
        are the planned ones: parts that were frozen or under `no_grad` then are not now."""
        seen = prepared.seen
        if seen.saved is None:
            return False
        if not seen.current():
            return True
        return self._handles.beyond(seen.saved)

    def _saves_less(self, prepared: Prepared) -> bool:
        """Whether backward will not make some of the plan's requests, between others that it makes:
        what is then asked for is later in the plan than it seems. Parts were frozen or read under
        `no_grad` that were not then, which a plan for a larger step, or from a file, does not
        show."""
        planned = prepared.seen.handles
        if planned is None or self._handles.numbered() >= len(planned):
            return False
        there = Counter([handle.value.number for handle in self._handles.alive()])
        gone, known = (Counter(planned) - there).keys(), set(planned)
        asked = [event.value for event in prepared.graph.events if event.value in known]
        made = [place for place, value in enumerate(asked) if value not in gone]
        return bool(made) and made[-1] - made[0] >= len(made)


def _holds(left: Prepared, found: Prepared, count: int) -> bool:
    """Whether a step that followed `left` so far holds all that `found` holds of the first `count`
    values."""
    wanted = found.choices[:count]
    held = left.choices[:count] + (0,) * (len(wanted) - len(left.choices))
    return all(
        mine >= 0 or mine == theirs == HOLD for mine, theirs in zip(wanted, held, strict=True)
    )


def _same_kernels(larger: Prepared, left: Prepared, index: int, args: Any) -> bool:
    """`_same_kernel` for this convolution and for those before it, which ran as `left` says."""
    before = (at for at in larger.itself if at < index)
    if any(larger.itself[at] != left.itself.get(at) for at in before):
        return False
    return _same_kernel(larger, index, args)


def _same_kernel(larger: Prepared, index: int, args: Any) -> bool:
    """Whether torch runs a convolution that is smaller than planned with the same kernel."""
    if index not in larger.itself:
        return True
    device = args[0].device.type
    return device != "cpu" or larger.itself[index] == runs_itself(args, device)
