"""What a watched step reads that it has not made, and that only the record keeps in memory.

Problem: a replay reads what its operations have read. If that is the result of a custom operator,
or a batch that the program has dropped meanwhile, it is in backward only because an operation may
be replayed: under another plan it is not, or for longer. Invariant: only weak references are kept,
and what the program itself has when backward begins is left out, since no plan decides about that.
Until then the record has it under any plan: links to what was held are cut when backward begins.
Imports `_compat`, planner and the tape. Rejected: numbers for externals in the tape, which would
have to give one to each parameter that an operation reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowtide import _compat
from lowtide.memory.marks import Marks
from lowtide.planner.graph import EXTERNAL, Graph, ValueNode
from lowtide.tape.values import Handle, Value


@dataclass(frozen=True, slots=True)
class External:
    """An external that only the record keeps in memory, as numbers."""

    nbytes: int
    readers: tuple[int, ...]
    """The operations that read it."""
    named: int
    """The last operation of the forward during which it is in memory whatever a plan says; the
    number of operations: until backward asks for something."""
    last: int
    """The last event during which the record had it; -1 if it had none."""
    release: int
    """The event after which autograd had no handle on it, or -1 if it had none in backward."""
    place: int = -1
    """Where it was noted, see `Timeline.known`; -1 if it was not."""
    pending: bool = False
    """Whether autograd has handles on it: the release is not known."""
    measured: bool = True
    """Whether it was watched, so that what was measured contains it."""
    cut: bool = False
    """Whether it went when backward had just begun, as nothing was to be replayed from it."""


@dataclass(slots=True)
class _Watched:
    value: Callable[[], Value | None]
    storage: weakref.ref[Any]
    key: int  # of that storage
    nbytes: int
    place: int  # in `Timeline.known`
    copied: bool = False  # what the record has is a copy from before a write
    ours: bool = False  # the forward has made it, in a call that is not recorded
    cut: bool = False  # see `External`
    readers: list[int] = field(default_factory=list)
    ended: int | None = None  # operations of the forward by then
    last: int | None = None
    release: int | None = -1
    handles: int = 0


class Externals:
    """Follows such externals through one step."""

    def __init__(self) -> None:
        self._known: dict[int, _Watched] = {}  # by id of the value; also of those that died since
        self._left: list[_Watched] = []  # those whose id another value has by now
        self._handles: list[weakref.ref[Handle]] = []
        self._operations = 0
        self._events = 0
        self._backward = False
        self._earlier: list[External] = []  # see `resume`

    def resume(self, base: Graph, count: int) -> None:
        """Go on after `count` operations that were those of `base`, and were not watched."""
        self._operations = count
        for value in base.owned:
            node = base.values[value]
            readers = tuple([op for op in base.consumers[value] if op < count])
            if readers:
                # until when autograd has it is not known: to the end
                release = len(base.events) if base.release[value] >= 0 else -1
                named = min(node.named, count - 1)
                self._earlier.append(
                    External(node.nbytes, readers, named, -1, release, measured=False)
                )

    def pass_over(self, operations: int) -> None:
        """So many operations have run by now, whatever they have read."""
        self._operations = operations

    # ------------------------------------------------------------------ forward

    def ran(
        self,
        values: Iterable[Value | None],
        counts: Callable[[torch.Tensor], bool],
        memory: Marks | None,
    ) -> None:
        """The next operation has read these values. `counts`: whether a tensor is on the device
        whose bytes count."""
        operation = self._operations
        for value in values:
            if value is None or value.number >= 0 or value.op is not None or not value.nbytes:
                continue
            watched = self._known.get(id(value))
            if watched is None or watched.value() is not value:
                watched = self._begin(value, counts, memory)
            if watched is not None and watched.readers[-1:] != [operation]:
                watched.readers.append(operation)
        self._operations += 1

    def _begin(
        self, value: Value, counts: Callable[[torch.Tensor], bool], memory: Marks | None
    ) -> _Watched | None:
        held = value.held
        if held is None or memory is None or not counts(held):
            return None
        storage = held.untyped_storage()
        watched = _Watched(
            _gone,
            weakref.ref(storage),
            _compat.storage_id(storage),
            value.nbytes,
            memory.note(storage),
        )

        def died(_: Any) -> None:
            self._died(watched)

        watched.value = weakref.ref(value, died)
        before = self._known.pop(id(value), None)
        if before is not None:
            self._left.append(before)
        self._known[id(value)] = watched
        return watched

    def _died(self, watched: _Watched) -> None:
        if self._backward:
            watched.last = self._events - 1
        else:
            watched.ended, watched.last = self._operations, -1

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> None:
        """Leave out what the program has now."""
        self._backward = True
        self._handles.clear()
        for watched in (*self._left, *self._known.values()):
            value = watched.value()
            if value is None:
                if watched.storage() is not None:
                    watched.nbytes = 0
                continue
            storage = None if value.held is None else value.held.untyped_storage()
            if storage is None or _compat.storage_holders(storage) > 2:
                watched.nbytes = 0
                continue
            watched.copied = _compat.storage_id(storage) != watched.key
            self._await_release(watched, value.handles())

    def are_ours(self, made: Container[int]) -> set[int]:
        """Note which of them lie in storages that the forward has `made` itself, in calls that are
        not recorded; returns the keys of these storages. They are freed once nothing can be
        replayed from them."""
        found = set()
        for watched in self._known.values():
            there = watched.nbytes and not watched.copied and watched.value() is not None
            if there and watched.key in made:
                watched.ours = True
                found.add(watched.key)
        return found

    def has_begun(self) -> None:
        """What no plan needs was dropped when backward began."""
        for watched in (*self._left, *self._known.values()):
            watched.cut = watched.ended is None and watched.last is not None

    def _await_release(self, watched: _Watched, handles: list[Handle]) -> None:
        if not handles:
            return
        watched.handles, watched.release = len(handles), None

        def dropped(_: Any) -> None:
            watched.handles -= 1
            if not watched.handles:
                watched.release = self._events - 1

        self._handles.extend(weakref.ref(handle, dropped) for handle in handles)

    def asked(self, events: int) -> None:
        """Backward has made its request with this number, counted from one."""
        self._events = events

    def close(self) -> None:
        """The step is over: what dies from now on was there until its end."""
        self._handles.clear()
        for watched in (*self._left, *self._known.values()):
            watched.value = _gone

    def found(self, known: tuple[bool, ...]) -> list[External]:
        """The externals that were in memory only for the record, in the order in which they were
        read. `known`: see `Timeline`."""
        return self._earlier + [
            External(
                watched.nbytes,
                tuple(watched.readers),
                self._operations if watched.ended is None else watched.ended - 1,
                self._events if watched.last is None else watched.last,
                max(self._events - 1, 0) if watched.release is None else watched.release,
                watched.place,
                watched.release is None,
                cut=watched.cut,
            )
            for watched in (*self._left, *self._known.values())
            if watched.nbytes
            and (watched.copied or watched.ours or any(known[watched.place : watched.place + 1]))
        ]


def _gone() -> None:
    """In place of a weak reference."""


def externals_of(graph: Graph) -> tuple[Graph, list[External]]:
    """The step of a graph without the externals that only the record has, and these."""
    found = [
        External(
            graph.values[value].nbytes,
            graph.consumers[value],
            graph.values[value].named,
            -1,
            graph.release[value],
            measured=False,
        )
        for value in graph.owned
    ]
    if not found:
        return graph, found
    count = graph.recorded
    ops = tuple([replace(op, inputs=_below(count, op.inputs)) for op in graph.ops])
    events = tuple([replace(e, releases=_below(count, e.releases)) for e in graph.events])
    return replace(graph, values=graph.values[:count], ops=ops, events=events), found


def _below(count: int, values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([value for value in values if value < count])


def with_externals(graph: Graph, externals: Sequence[External]) -> Graph:
    """The step of a graph with these externals among its values, after all others."""
    if not externals:
        return graph
    more: dict[int, list[int]] = {}
    released: dict[int, list[int]] = {}
    for number, external in enumerate(externals, len(graph.values)):
        for reader in external.readers:
            more.setdefault(reader, []).append(number)
        if external.release >= 0:
            released.setdefault(min(external.release, len(graph.events) - 1), []).append(number)
    values = tuple(
        [ValueNode(each.nbytes, EXTERNAL, named=each.named, owned=True) for each in externals]
    )
    ops = tuple(
        replace(op, inputs=(*op.inputs, *more[index])) if index in more else op
        for index, op in enumerate(graph.ops)
    )
    events = tuple(
        replace(event, releases=(*event.releases, *released[index])) if index in released else event
        for index, event in enumerate(graph.events)
    )
    return replace(graph, values=graph.values + values, ops=ops, events=events)
