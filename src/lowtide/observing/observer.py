"""Watching a step so that the next one can be planned.

Problem: a planner needs sizes, times, which operation reads what, in which order backward requests
values, and the memory that is not the tape's: gradients, temporaries, kernel workspace. Invariant:
an observer stores numbers and weak references, never a tensor; the graph it makes holds for the
plan that ran and, as what that plan held is subtracted, for every other. What was measured
(`MemoryEvents`) wins over what was modelled from sizes. Imports tape, planner, rebuild and memory
events. Rejected: asking users to run a profiling step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.backward.operation import Call, describe
from lowtide.backward.reads import look_at_reads
from lowtide.kernels.workspace import (
    backward_temporaries,
    kernel_workspace,
    read_by,
    scratchpad,
)
from lowtide.memory.events import Timeline
from lowtide.memory.marks import Marks
from lowtide.observing.leaves import Leaves
from lowtide.observing.names import Names
from lowtide.observing.rebuild import FOREVER, OpLog, rebuild
from lowtide.observing.seen import Seen
from lowtide.planner.graph import Graph
from lowtide.tape.values import Handle, Operation, Ref, Value, tensors_in

if TYPE_CHECKING:
    from lowtide.running.prepared import Signature
    from lowtide.running.where import Where
    from lowtide.tape.recorder import Recorder


class Observer:
    """Collects one step. Fed by the decisions of a budget."""

    def __init__(self, memory: Marks | None, earlier: tuple[OpLog, ...] = ()) -> None:
        self.memory = memory
        self._where: Where | None = None
        self.earlier = earlier  # operations of the step before, whose times are used as well
        self.place = self.before = 0  # as in `Seen`
        self.ops: list[OpLog] = []
        self.last_save: list[tuple[int, int]] = []  # (value, operations recorded when saved)
        self.requests: list[tuple[int, int, int, int]] = []  # (value, operation, mark in, mark out)
        self.released: dict[int, int] = {}
        self.evicted: dict[int, int] = {}
        self.dead: Counter[tuple[int, int]] = Counter()  # of `last_save`: released in the forward
        self.forgotten: dict[int, int] = {}  # values of graphs that died -> operations by then
        self.outlived: dict[int, int] = {}  # those no longer held -> operations by then
        self._named: dict[int, weakref.ref[Any]] = {}  # storages of dropped values, still alive
        self.names = Names()
        self.held: dict[int, tuple[int, int]] = {}  # value -> events of its life in backward
        self.reached: set[int] = set()  # held when backward began; some may be dropped there
        self.pinned: set[int] = set()
        self.elsewhere = 0  # bytes of the forward that the program has in backward, not the tape
        self.carries_grad: set[int] = set()
        self.leaves = Leaves()
        self._hidden: dict[int, int] = {}  # value made without grad -> operation
        self._saved: frozenset[int] | None = None  # when backward began
        self.base: Graph | None = None  # of another step, with the same first operations
        self.common = 0  # how many those are
        self.ran: list[int] | None = None  # the plan that was followed in backward
        self.timeline: Timeline | None = None
        self.retains = False  # backward releases nothing that was saved: it may run again
        self._begin: int | None = None
        self._replay_from: int | None = None  # mark where a replay inside the forward began
        self._replays: list[tuple[int, int]] = []  # those since the last operation
        self._end = 0
        self._forward = 0  # operations before backward began
        self._handles: dict[int, int] = {}
        self._meant: weakref.WeakKeyDictionary[Handle, list[int]] = weakref.WeakKeyDictionary()
        self._calls: dict[Call, Call] = {}  # equal ones as one object, as layers repeat
        self._refs: list[Any] = []
        self._values: list[weakref.ref[Value]] = []

    def only(self, where: Where) -> None:
        """Count only the bytes of one device, not those of all."""
        self._where = where
        self.leaves.counts = self._counts

    @staticmethod
    def resumed(
        seen: Seen,
        base: Graph,
        ran: Sequence[Signature],
        values: Iterable[Value],
        handles: Iterable[Handle],
        recorder: Recorder | None,
    ) -> Observer:
        """An observer for a step that was not watched so far: it `ran` the first operations of
        `seen`, on no more bytes."""
        observer, count = Observer(None, seen.ops), len(ran)
        observer.ops = [
            log
            if (log.sizes, log.wanted) == (sizes, wanted)
            else replace(log, sizes=sizes, wanted=wanted)
            for log, (_, sizes, _, wanted) in zip(seen.ops, ran, strict=False)
        ]
        observer.carries_grad = set(seen.carries_grad)
        observer.base, observer.common = base, count
        observer.names.resume(base, count, {} if recorder is None else recorder.table)
        observer.leaves.resume(seen, count)
        observer._values = list(map(_weak, values))
        for handle in handles:
            observer.saved(handle.value, handle)
        return observer

    def attach(self, recorder: Recorder) -> None:
        """Take the recorder of the forward to watch, once it is open."""
        recorder.drawn = self.anew
        self.names.table = recorder.table

    def seen(self) -> Seen:
        return Seen(
            tuple(self.ops),
            frozenset(self.carries_grad),
            dict(self.leaves.gradients),
            dict(self.leaves.known),
            self._forward,
            self._saved,
            tuple(self.leaves.frozen.values()),
            self.place,
            self.before,
            self.retains,
        )

    # ------------------------------------------------------------------ forward

    def operation(
        self,
        op: Operation,
        made: list[Value],
        args: Any,
        kwargs: Any,
        live: int,
        signature: Signature,
    ) -> None:
        begin, self._begin = self._begin, None
        mark = self.memory.mark() if self.memory is not None else 0
        tensors = tensors_in(args, kwargs)
        wanted = [t for t in tensors if t.requires_grad]
        self.leaves.ran(tensors)
        inputs = tuple(dict.fromkeys(v.number for v in op.values() if v.number >= 0))
        name, sizes, reads, whole = signature
        elsewhere = bool(tensors) and not self._counts(tensors[0])
        workspace = temporaries = 0
        if elsewhere and self._where is not None:
            self._where.computes_on(tensors[0].device)
        if not elsewhere:
            grads = sum(t.numel() * t.element_size() for t in wanted if self._counts(t))
            read = read_by(op.facts.func, args, kwargs)
            workspace = kernel_workspace(name, read, args, sum(sizes)) + scratchpad(name)
            temporaries = backward_temporaries(name, grads, sum(sizes), workspace)
        log = OpLog(
            name=name,
            seconds=op.seconds,
            reads=reads,
            inputs=inputs,
            outputs=tuple(value.number for value in made),
            sizes=sizes,
            live=live,
            begin=begin,
            inside=tuple(self._replays),
            mark=mark,
            workspace=workspace,
            temporaries=temporaries,
            left=temporaries,
            wanted=whole,
            receivers=inputs,
            overwrites=tuple(
                ref.value.number for ref, _ in op.writes if ref.value and ref.value.number >= 0
            ),
        )
        if not torch.is_grad_enabled():
            leaves = [id(leaf) for leaf in map(_compat.leaf_of, wanted) if leaf is not None]
            log.hidden = (_compat.newest_node(), *leaves)
        elif wanted:
            self._look_for_functions(op.refs, tensors)
        call = None
        if not elsewhere:
            call = describe(op.facts, args, kwargs, tensors[0].device.type if tensors else "cpu")
        log.kind = None if call is None else self._calls.setdefault(call, call)
        if not wanted and torch.is_grad_enabled():
            log.temporaries = log.left = 0  # it has no backward
        if wanted:
            log.node = torch.is_grad_enabled()
            self.carries_grad.update(inputs)
            if len(op.refs) == len(tensors):  # running statistics are not among the refs
                look_at_reads(log, op.refs, tensors, op.facts.chunks)
            log.call, log.lent = log.kind, log.kind is None
        # Values written in place without grad count as hidden only if they were made without grad.
        over = [-1 if ref.value is None else ref.value.number for ref, _ in op.writes]
        if log.hidden is not None and all(number in self._hidden for number in over):
            self._hidden.update(dict.fromkeys(log.outputs, len(self.ops)))
        written = [t for t in tensors if _compat.storage_of(t) is not None] if op.writes else []
        self.names.ran(len(self.ops), made, map(_compat.storage_key, written))
        self.ops.append(log)
        self._replays.clear()
        self._values.extend(map(_weak, made))

    def _counts(self, tensor: torch.Tensor) -> bool:
        return self._where is None or self._where.counts in (None, tensor.device)

    def _look_for_functions(self, refs: list[Ref], tensors: list[torch.Tensor]) -> None:
        """What was made without grad but has a graph is the result of a custom Function."""
        if len(refs) != len(tensors):
            return
        for ref, tensor in zip(refs, tensors, strict=True):
            value = ref.value
            if value is None or value.number < 0 or not tensor.requires_grad:
                continue
            maker = self._hidden.get(value.number)
            if maker is not None and _compat.leaf_of(tensor) is None:
                self.ops[maker].function = True

    def anew(self) -> None:
        """The memory of the next operation begins here.

        A random state was read for it, which is not the step's memory; or values were dropped,
        which the peak between two operations would count as the second one's workspace.
        """
        if self.memory is not None:
            self._begin = self.memory.mark()

    def replays_inside(self) -> None:
        """A value is replayed for a backward inside the forward: not the next operation's work."""
        if self.memory is not None:
            self._replay_from = self.memory.mark()

    def replayed_inside(self) -> None:
        begin, self._replay_from = self._replay_from, None
        if self.memory is not None and begin is not None:
            self._begin = self.memory.mark()
            self._replays.append((begin, self._begin))

    def saved(self, value: Value, handle: Handle) -> None:
        """Autograd has a handle on `value`; called again if the handle moves to another value."""
        number = value.number
        meant = self._meant.get(handle)
        if meant is not None:
            self._moved(handle, meant, number)
            return
        if number < 0:
            return
        if value.held is not None:  # held again, if it was dropped before
            self.evicted.pop(number, None)
            self._named.pop(number, None)
        self.forgotten.pop(number, None)
        self.last_save.append((number, handle.sequence))
        self._handles[number] = self._handles.get(number, 0) + 1
        meant = self._meant[handle] = [number]
        weak, sequence = _weak(value), handle.sequence

        def dropped(_: Any, meant: list[int] = meant) -> None:
            number = meant[0]
            if number < 0:
                return
            self._handles[number] -= 1
            if self._saved is None:
                self.dead[number, sequence] += 1
            if not self._handles[number]:
                self.released[number] = len(self.requests) - 1
                if self._saved is None:
                    self._forgets(number, weak())

        self._refs.append(weakref.ref(handle, dropped))

    def _forgets(self, number: int, value: Value | None) -> None:
        """Autograd released all its handles on a value while the forward runs: a graph died. In a
        plain step that frees the memory; here other values may have to be replayed from it."""
        self.forgotten[number] = len(self.ops)
        if value is None or value.number != number or value.held is None:
            return

        def died(_: Any) -> None:
            if self._saved is None:
                self.outlived[number] = len(self.ops)

        self._refs.append(weakref.ref(value, died))

    def let_go(self, value: Value) -> None:
        """The tape no longer holds such a value."""
        self.outlived[value.number] = len(self.ops)

    def _moved(self, handle: Handle, meant: list[int], number: int) -> None:
        old, meant[0] = meant[0], number
        if old == number:
            return
        if old >= 0:
            self._handles[old] -= 1
            place = len(self.last_save) - 1  # a handle that moves was mostly made just before
            while self.last_save[place] != (old, handle.sequence):
                place -= 1
            self.last_save[place] = (number, handle.sequence)
            if number < 0:
                del self.last_save[place]
        if number >= 0:
            self._handles[number] = self._handles.get(number, 0) + 1

    def dropped(self, value: Value) -> None:
        """`value` is dropped. While the program still has its memory, that counts as if the tape
        held it."""
        number = value.number
        assert value.held is not None

        def gone(_: Any) -> None:
            if self._named.pop(number, None) is not None:
                self.evicted[number] = len(self.ops)

        self.evicted[number] = len(self.ops)
        self._named[number] = weakref.ref(value.held.untyped_storage(), gone)

    # ------------------------------------------------------------------ backward

    def begin_backward(self, anchored: Container[int] = ()) -> None:
        """Note what is held, and what is in memory whatever a plan says: because the program has it
        too, or because the tape cannot drop it.

        Args:
            anchored: numbers of values that are held because the plan says so.
        """
        self._forward = len(self.ops)
        self.leaves.look_again()
        self.retains = _compat.in_backward() and _compat.backward_retains_graph()
        self._saved = frozenset([number for number, count in self._handles.items() if count])
        ours = set()
        named, self._named = self._named, {}
        for number, weak in named.items():
            storage = weak()
            if storage is not None:
                self.evicted[number] = len(self.ops)
                self.pinned.add(number)
                ours.add(_compat.storage_id(storage))
        for value in self.alive():
            if value.held is None:
                continue
            number = value.number
            self._lives(value, -1)
            storage = value.held.untyped_storage()
            ours.add(_compat.storage_id(storage))
            for_good = value.op is None and number not in anchored
            if for_good or _compat.storage_holders(storage) > 2:
                self.pinned.add(number)
        self.elsewhere = self.names.over(ours)
        self.reached = set(self.held) - self.pinned

    def _lives(self, value: Value, start: int) -> None:
        number = value.number
        self.held[number] = (start, FOREVER)

        def died(_: Any) -> None:
            if number in self.held:
                self.held[number] = (self.held[number][0], len(self.requests) - 1)

        self._refs.append(weakref.ref(value, died))

    def request(self, value: Value, operation: int) -> None:
        if value.number >= 0:
            mark = self.memory.mark() if self.memory is not None else 0
            self.requests.append((value.number, operation, mark, mark))

    def answered(self) -> None:
        """The last request was answered with a tensor."""
        if self.requests and self.memory is not None:
            number, operation, before, _ = self.requests[-1]
            self.requests[-1] = (number, operation, before, self.memory.mark())

    def retained(self, value: Value) -> None:
        if value.number not in self.held:
            self._lives(value, len(self.requests) - 1)

    def alive(self) -> Iterator[Value]:
        """The recorded values that something still needs."""
        for weak in self._values:
            value = weak()
            if value is not None:
                yield value

    def held_from_forward(self) -> set[int]:
        return {number for number, (start, _) in self.held.items() if start == -1}

    def dropped_before_backward(self, number: int) -> None:
        self.held.pop(number, None)
        self.evicted[number] = len(self.ops)

    def stop_measuring(self) -> None:
        """Something else begins before this step is over: the two could not be told apart."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.stop(lambda timeline: None)

    def mark_end(self) -> None:
        """A backward is over; what follows the last such mark does not belong to the step."""
        if self.memory is not None:
            self._end = self.memory.mark()
            self.memory.over()

    def finish(self, then: Callable[[Observer], None]) -> None:
        """The step is over; `then` is called once its measurement is available."""
        self._values.clear()
        self._refs.clear()  # what dies from now on does not belong to this step's backward
        memory, self.memory = self.memory, None
        if memory is None:
            then(self)
            return

        def arrived(timeline: Timeline | None) -> None:
            # operations may follow a backward that ran inside the context
            end = max([self._end, *(log.mark + 1 for log in self.ops[-1:])])
            self.timeline = None if timeline is None else timeline.until(end)
            then(self)

        memory.stop(arrived)

    def graph(self) -> Graph:
        """The step as a graph. Before backward, its events are predicted from the saves."""
        return rebuild(self)


def _weak(value: Value) -> weakref.ref[Value]:
    return weakref.ref(value)
