"""Watching a step so that the next one can be planned.

Problem: a planner needs sizes, times, who reads what, in which order backward asks, and the memory
that is not the tape's: gradients, temporaries, kernel workspace. Invariant: an observer stores
numbers only, never a tensor or a value; the graph it makes holds for the plan that ran and, by
subtraction of what that plan held, for every other. What was measured (`MemoryEvents`) wins over
what was modelled from sizes. Imports tape, plan and memory events. Rejected: asking users to run a
profiling step of their own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lowtide import _compat
from lowtide._memory_events import Timeline
from lowtide.marks import Marks
from lowtide.plan.graph import Event, Graph, OpNode, ValueNode
from lowtide.tape.values import Handle, Operation, Value, flatten
from lowtide.workspace import backward_temporaries, workspace_of

_FOREVER = 1 << 60
_JOINING = frozenset({"aten::cat", "aten::stack"})


class _OpLog:
    """One operation, as numbers."""

    __slots__ = ("forward", "grads", "inputs", "live", "mark", "name", "outputs", "seconds",
                 "sizes", "temporaries", "workspace")  # fmt: skip


class Observer:
    """Collects one step. Fed by the decisions of a budget."""

    def __init__(self, memory: Marks | None) -> None:
        self.memory = memory
        self.ops: list[_OpLog] = []
        self.last_save: list[tuple[int, int]] = []  # (value, operations recorded when saved)
        self.requests: list[tuple[int, int, int, int]] = []  # (value, operation, mark in, mark out)
        self.released: dict[int, int] = {}
        self.evicted: dict[int, int] = {}
        self.held: dict[int, tuple[int, int]] = {}  # value -> events of its life in backward
        self.pinned: set[int] = set()
        self.carries_grad: set[int] = set()
        self.parameters: dict[int, tuple[int, int]] = {}  # leaf -> (last reader, gradient bytes)
        self.timeline: Timeline | None = None
        self.draw_bytes = 0  # of random states that the tape holds: the plain step has none
        self._end = 0
        self._handles: dict[int, int] = {}
        self._refs: list[Any] = []
        self._values: list[weakref.ref[Value]] = []

    # ------------------------------------------------------------------ forward

    def operation(self, op: Operation, made: list[Value], args: Any, kwargs: Any, live: int) -> None:
        log = _OpLog()
        log.name = op.facts.name
        log.seconds = op.seconds
        log.inputs = tuple(dict.fromkeys(v.number for v in op.values() if v.number >= 0))
        log.outputs = tuple(value.number for value in made)
        log.sizes = tuple(value.nbytes for value in made)
        log.live = live
        self.draw_bytes += sum(state.numel() for _, state in op.draws)
        log.mark = self.memory.mark() if self.memory is not None else 0
        tensors = [t for a in (*args, *kwargs.values()) for t in flatten(a)
                   if isinstance(t, torch.Tensor)]  # fmt: skip
        log.grads = 0
        for tensor in tensors:
            if not tensor.requires_grad:
                continue
            nbytes = tensor.numel() * tensor.element_size()
            log.grads += nbytes
            leaf = _compat.leaf_of(tensor)
            if leaf is not None and leaf.grad is None:
                # from its last reader in the forward on, a gradient stays to the end of backward
                self.parameters[id(leaf)] = (len(self.ops), leaf.numel() * leaf.element_size())
        for value in op.values():
            if value.number >= 0 and log.grads:
                self.carries_grad.add(value.number)
        made_bytes = sum(log.sizes)
        log.workspace = workspace_of(op.facts.name, tensors, args, made_bytes)
        log.temporaries = backward_temporaries(op.facts.name, log.grads, made_bytes, log.workspace)
        self.ops.append(log)
        self._values.extend(map(_weak, made))

    def saved(self, value: Value, handle: Handle) -> None:
        if value.number < 0:
            return
        self.last_save.append((value.number, handle.sequence))
        self._handles[value.number] = self._handles.get(value.number, 0) + 1
        number = value.number

        def dropped(_: Any) -> None:
            self._handles[number] -= 1
            if not self._handles[number]:
                self.released[number] = len(self.requests) - 1

        self._refs.append(weakref.ref(handle, dropped))

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> None:
        """Take stock of what is held, and of what somebody else holds as well."""
        for value in self.alive():
            if value.held is None:
                continue
            self._lives(value, -1)
            if _compat.storage_holders(value.held.untyped_storage()) > 2:
                self.pinned.add(value.number)

    def _lives(self, value: Value, start: int) -> None:
        number = value.number
        self.held[number] = (start, _FOREVER)

        def died(_: Any) -> None:
            if number in self.held:
                self.held[number] = (self.held[number][0], len(self.requests) - 1)

        self._refs.append(weakref.ref(value, died))

    def request(self, value: Value, operation: int) -> None:
        if value.number >= 0:
            mark = self.memory.mark() if self.memory is not None else 0
            self.requests.append((value.number, operation, mark, mark))

    def answered(self) -> None:
        """The tensor of the last request is there."""
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
        """Something else begins before this step is over: its memory is not told apart."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.stop(lambda timeline: None)

    def mark_end(self) -> None:
        """A backward is over; whatever comes after the last such mark is not the step's."""
        if self.memory is not None:
            self._end = self.memory.mark()

    def finish(self, then: Callable[[Observer], None]) -> None:
        """The step is over; `then` is called as soon as its measurement is there."""
        self._values.clear()
        memory, self.memory = self.memory, None
        if memory is None:
            then(self)
            return

        def arrived(timeline: Timeline | None) -> None:
            self.timeline = None if timeline is None else timeline.until(self._end)
            then(self)

        memory.stop(arrived)

    # ------------------------------------------------------------------ the graph

    def graph(self) -> Graph:
        """The step as a value. Before backward, its events are predicted from the saves."""
        count = 1 + max(itertools.chain([-1], *(log.outputs for log in self.ops)))
        sizes, producers = [0] * count, [-1] * count
        for index, log in enumerate(self.ops):
            for number, nbytes in zip(log.outputs, log.sizes, strict=True):
                sizes[number], producers[number] = nbytes, index
        last_use = producers.copy()
        for index, log in enumerate(self.ops):
            for number in log.inputs:
                last_use[number] = max(last_use[number], index)
        values = tuple(
            ValueNode(nbytes, producer, number in self.pinned)
            for number, (nbytes, producer) in enumerate(zip(sizes, producers, strict=True))
        )
        ops = self._op_nodes(sizes, last_use)
        if self.requests:
            events = self._measured_events(sizes) if self.timeline else self._modelled_events(
                sizes, last_use, [(v, op) for v, op, *_ in self.requests], self.released
            )
        else:
            order = sorted(self.last_save, key=lambda save: save[1], reverse=True)
            final = {value: index for index, (value, _) in enumerate(order)}
            events = self._modelled_events(sizes, last_use, order, final)
        return Graph(values, ops, events)

    def _op_nodes(self, sizes: list[int], last_use: list[int]) -> tuple[OpNode, ...]:
        held = [0] * (len(self.ops) + 1)
        for number in self.held:
            if self.held[number][0] == -1 and number not in self.pinned:
                start = min(last_use[number] + 1, len(self.ops))
                end = min(self.evicted.get(number, len(self.ops)), len(self.ops))
                if end > start:
                    held[start] += sizes[number]
                    held[end] -= sizes[number]
        for number, end in self.evicted.items():
            from_forward = self.held.get(number, (0, 0))[0] == -1
            if not from_forward and end > last_use[number] + 1:
                held[last_use[number] + 1] += sizes[number]
                held[min(end, len(self.ops))] -= sizes[number]
        nodes = []
        before = 0
        for log, bytes_held in zip(self.ops, itertools.accumulate(held), strict=False):
            if self.timeline is not None:
                level = self.timeline.levels[log.mark]
                peak = max(self.timeline.peaks[before : log.mark])
                before = log.mark
                workspace = max(0, peak - level)
            else:
                level, workspace = log.live, log.workspace
                peak = level + workspace
            nodes.append(
                OpNode(log.name, log.seconds, log.inputs, log.outputs, workspace, True,
                       max(0, level - bytes_held), max(0, peak - bytes_held))  # fmt: skip
            )
        return tuple(nodes)

    def _measured_events(self, sizes: list[int]) -> tuple[Event, ...]:
        assert self.timeline is not None
        count = len(self.requests)
        held = [0] * (count + 1)
        fresh = [0] * (count + 1)  # retained by the replay of this event: not there at its start
        for number, (start, end) in self.held.items():
            if number in self.pinned:
                continue
            first, last = max(start, 0), min(end, count - 1)
            if start >= 0:
                fresh[start] += sizes[number]
            if last >= first:
                held[first] += sizes[number]
                held[last + 1] -= sizes[number]
        releases = self._releases(count)
        events = []
        levels, peaks = self.timeline.levels, self.timeline.peaks
        for index, ((number, _, entry, answer), bytes_held) in enumerate(
            zip(self.requests, itertools.accumulate(held), strict=False)
        ):
            start, end = self.held.get(number, (0, -1))
            given = 0 if start <= index <= end or number in self.pinned else sizes[number]
            following = self.requests[index + 1][2] if index + 1 < count else len(peaks)
            peak = max(peaks[answer:following], default=levels[answer])
            events.append(
                Event(number, max(0, levels[entry] - bytes_held + fresh[index]),
                      max(0, peak - bytes_held - given), releases[index])  # fmt: skip
            )
        return tuple(events)

    def _releases(self, count: int) -> list[tuple[int, ...]]:
        releases: list[list[int]] = [[] for _ in range(count)]
        last = {request[0]: index for index, request in enumerate(self.requests)}
        for number, index in self.released.items():
            if 0 <= index < count:
                releases[max(index, last.get(number, 0))].append(number)
        return [tuple(sorted(numbers)) for numbers in releases]

    def _modelled_events(
        self,
        sizes: list[int],
        last_use: list[int],
        order: Iterable[tuple[int, int]],
        released: dict[int, int],
    ) -> tuple[Event, ...]:
        """Gradients from sizes: that of a value lives from its last reader to its producer."""
        count = len(self.ops)
        gradient = [0] * (count + 2)
        producers = {n: index for index, log in enumerate(self.ops) for n in log.outputs}
        for index, log in enumerate(self.ops):
            # The gradients of what was joined are views of one buffer: it lives as long as any.
            joined = [producers[n] for n in log.inputs] if log.name in _JOINING else []
            for number in log.outputs:
                if number in self.carries_grad and last_use[number] > index:
                    gradient[min([index, *joined])] += sizes[number]
                    gradient[last_use[number]] -= sizes[number]
        parameter = [0] * (count + 2)
        for reader, nbytes in self.parameters.values():
            parameter[reader] += nbytes
        crossing = list(itertools.accumulate(gradient))
        done = list(itertools.accumulate(reversed(parameter)))[::-1]
        fixed = self._pinned_bytes(sizes)
        order = list(order)
        last = {value: index for index, (value, _) in enumerate(order)}
        freed: dict[int, list[int]] = {}
        for number, index in released.items():
            if index >= 0 and number in last:
                freed.setdefault(max(index, last[number]), []).append(number)
        events = []
        for index, (number, operation) in enumerate(order):
            # Saved between two operations: by the one before as its result or by the one after
            # as its input. Take what is more, and all operations down to the next event's.
            after, before = min(operation, count - 1), max(min(operation, count) - 1, 0)
            following = order[index + 1][1] if index + 1 < len(order) else 0
            base = fixed + max(crossing[k] + done[k + 1] for k in (before, after))
            peak = fixed + max(
                crossing[k] + done[k + 1] + self.ops[k].temporaries
                for k in range(min(before, following), after + 1)
            )
            events.append(Event(number, base, peak, tuple(sorted(freed.get(index, ())))))
        return tuple(events)

    def _pinned_bytes(self, sizes: list[int]) -> int:
        return sum(sizes[number] for number in self.pinned)


def _weak(value: Value) -> weakref.ref[Value]:
    return weakref.ref(value)
