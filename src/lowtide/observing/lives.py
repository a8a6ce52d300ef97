"""How long the values of a watched step live, and who keeps them.

Problem: what a value costs depends on when it is last needed: by a handle of autograd, by the
program, or by a graph that dies before backward. Invariant: only weak references are kept, so that
watching a step prolongs no life; all times are numbers of operations in the forward, and of
requests in backward. Imports logs, names, reached, requests and the tape. Rejected: looking after
each operation for what has died, a walk over all values each time.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from lowtide.observing.logs import FOREVER, OpLog
from lowtide.observing.names import Names
from lowtide.observing.reached import UNKNOWN, Nodes, Numbers
from lowtide.observing.requests import Request
from lowtide.tape.values import Handle, Value

if TYPE_CHECKING:
    import torch

    from lowtide.memory.marks import Marks


class _Saved(weakref.ref[Handle]):
    """A weak reference to a handle, with what is done when it dies. One object, as Python's
    collector looks at all there are again and again: a closure for each is six."""

    __slots__ = ("lives", "meant", "sequence", "value")

    lives: Lives | None  # None once it has died, as that has a list of these
    meant: list[int]  # the number of the value that the handle is for
    sequence: int
    value: weakref.ref[Value]

    @staticmethod
    def of(handle: Handle, lives: Lives, meant: list[int], value: Value) -> _Saved:
        saved = _Saved(handle, _has_died)
        saved.lives, saved.meant = lives, meant
        saved.sequence, saved.value = handle.sequence, weak_to(value)
        return saved


def _has_died(saved: Any) -> None:
    lives, saved.lives = saved.lives, None
    lives.released_one(saved)


class Lives:
    """The lives of one step's values. What `Observer` adds is what its operations do.

    Attributes:
        memory: the running measurement, if the step is measured.
        missing: bytes that autograd has saved and that are in memory no more. The plain step would
            have them besides what is live.
    """

    def __init__(self, memory: Marks | None) -> None:
        self.memory = memory
        self.names = Names()
        self.ops: list[OpLog] = []
        self.last_save: list[tuple[int, int]] = []  # (value, operations recorded when saved)
        self.nodes: list[Numbers] = []  # those that each of these saves may be for
        self.making = Nodes()
        self.first: dict[tuple[int, int], int] = {}  # such a save -> its value then, if it moved
        self.requests: list[Request] = []
        self.backwards: set[int] = set()  # how many requests there were when each ended
        self.released: dict[int, int] = {}
        self.freed: dict[int, int] = {}  # those of them released in backward -> mark just before
        self.evicted: dict[int, int] = {}
        self.dead: Counter[tuple[int, int]] = Counter()  # of `last_save`: released in the forward
        self.forgotten: dict[int, int] = {}  # values of graphs that died -> operations by then
        self.outlived: dict[int, int] = {}  # those no longer held -> operations by then
        self._named: dict[int, weakref.ref[Any]] = {}  # storages of dropped values, still alive
        self.held: dict[int, tuple[int, int]] = {}  # value -> events of its life in backward
        self.ended: dict[int, int] = {}  # those of them that died -> the newest of `freed` then
        self.given: dict[int, int] = {}  # requests whose answer only a node had -> mark at its end
        # Earlier lives, over before another backward began: (value, first and last event, mark).
        self.earlier_lives: list[tuple[int, int, int, int]] = []
        self._freed = 0  # that mark
        self._asked_on = 0  # the thread of the last request: another one's marks may be lost
        self.missing = 0
        self._missing: dict[int, int] = {}  # the same, value by value
        # When backward began: values, each as often as it was saved.
        self._saved: tuple[int, ...] | None = None
        self.handles: dict[int, int] = {}
        self._meant: weakref.WeakKeyDictionary[Handle, list[int]] = weakref.WeakKeyDictionary()
        self._outside: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self._refs: list[Any] = []
        self._values: list[weakref.ref[Value]] = []

    # ------------------------------------------------------------------ forward

    def saved(self, value: Value, handle: Handle) -> None:
        """Autograd has a handle on `value`; called again if the handle moves to another value."""
        number = value.number
        meant = self._meant.get(handle)
        if meant is not None:
            self._moved(handle, meant, number)
            return
        if number < 0:
            self._outside[handle] = len(self.last_save)
            return
        if value.held is not None:  # held again, if it was dropped before
            self.evicted.pop(number, None)
            self._named.pop(number, None)
            self._found(number)
        self.forgotten.pop(number, None)
        # What the program made is a value only once an operation that saves it has written it: a
        # node asks for it in the order in which it was saved.
        place = self._outside.pop(handle, len(self.last_save))
        self.last_save.insert(place, (number, handle.sequence))
        self.nodes.insert(place, self.making.saving())
        self.handles[number] = self.handles.get(number, 0) + 1
        meant = self._meant[handle] = [number]
        self._refs.append(_Saved.of(handle, self, meant, value))

    def released_one(self, saved: _Saved) -> None:
        """Autograd has released a handle."""
        number = saved.meant[0]
        if number < 0:
            return
        self.handles[number] -= 1
        if self._saved is None:
            self.dead[number, saved.sequence] += 1
        if not self.handles[number]:
            self._found(number)
            self.released[number] = len(self.requests) - 1
            if self._saved is None:
                self._forgets(number, saved.value())
            elif self.memory is not None and threading.get_ident() == self._asked_on:
                # No mark: the measurement is over, as one around the step may be before it.
                self.freed[number] = self._freed = self.memory.mark() or FOREVER

    def had(self, value: Value, handle: Handle) -> None:
        """Autograd has had a handle on `value` since before the step was watched: for which of its
        nodes is not known."""
        count = len(self.nodes)
        self.saved(value, handle)
        self.nodes[count:] = [UNKNOWN] * (len(self.nodes) - count)

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
            self.handles[old] -= 1
            if not self.handles[old]:
                self._found(old)
            place = self._place_of((old, handle.sequence))
            self.last_save[place] = save = number, handle.sequence
            self.first[save] = self.first.get((old, handle.sequence), old)
            if number < 0:
                del self.last_save[place], self.nodes[place]
        if number >= 0:
            self.handles[number] = self.handles.get(number, 0) + 1

    def _place_of(self, save: tuple[int, int]) -> int:
        """The last place of such a save in `last_save`, which is in the order of operations, but
        for what was inserted. Not looked for one by one: a write may move all handles on a value.
        """
        saves, operation = self.last_save, save[1]
        place = bisect_right(saves, operation, key=itemgetter(1)) - 1
        while place >= 0 and saves[place][1] == operation:
            if saves[place] == save:
                return place
            place -= 1
        return len(saves) - 1 - saves[::-1].index(save)

    def dropped(self, value: Value) -> None:
        """`value` is dropped. While the program still has its memory, that counts as if the tape
        held it."""
        number, nbytes = value.number, value.nbytes
        assert value.held is not None

        def gone(_: Any) -> None:
            self.overwritten(number, nbytes)

        self.evicted[number] = len(self.ops)
        self._named[number] = weakref.ref(value.held.untyped_storage(), gone)

    def overwritten(self, number: int, nbytes: int) -> None:
        """The memory of a value has other content now: nothing can use what the program has of a
        dropped one."""
        if self._named.pop(number, None) is not None:
            self.evicted[number] = len(self.ops)
            self._lost(number, nbytes)

    def look_for_missing(self) -> None:
        """No plan is followed any more: find what is missing by now."""
        storages = self.names.storages()
        for value in self.alive():
            number = value.number
            if value.held is not None or not self.handles.get(number):
                continue
            storage = storages.get(number)
            if storage is None:
                self._lost(number, value.nbytes)
                continue

            def gone(_: Any, number: int = number, nbytes: int = value.nbytes) -> None:
                self._lost(number, nbytes)

            self._refs.append(weakref.ref(storage, gone))

    def _lost(self, number: int, nbytes: int) -> None:
        if self.handles.get(number) and number not in self._missing:
            self._missing[number] = nbytes
            self.missing += nbytes

    def _found(self, number: int) -> None:
        self.missing -= self._missing.pop(number, 0)

    # ------------------------------------------------------------------ backward

    def _lives(self, value: Value, start: int) -> None:
        number = value.number
        self.held[number] = (start, FOREVER)

        def died(_: Any) -> None:
            if number in self.held:
                self.held[number] = (self.held[number][0], len(self.requests) - 1)
                self.ended[number] = self._freed

        self._refs.append(weakref.ref(value, died))

    def gives(self, storage: torch.UntypedStorage) -> None:
        """The last request is answered with what nothing else has: note when that dies."""
        index = len(self.requests) - 1

        def gone(_: Any) -> None:
            if len(self.requests) in self.backwards:
                return  # a Function has kept it: a mark may be too late, and spoil the measurement
            if self.memory is not None and threading.get_ident() == self._asked_on:
                self.given[index] = self.memory.mark() or FOREVER

        self._refs.append(weakref.ref(storage, gone))

    def retained(self, value: Value) -> None:
        if value.number not in self.held:
            self._lives(value, len(self.requests) - 1)

    def lasting(self) -> list[int]:
        """The values that autograd still has a handle on. If backward is over and did not ask for
        one, it is for a graph that this backward did not reach, such as that of a state which the
        program carries on: as long as that graph lives, the record can make the value again."""
        return [number for number, count in self.handles.items() if count]

    def alive(self) -> Iterator[Value]:
        """The recorded values that something still needs."""
        for weak in self._values:
            value = weak()
            if value is not None:
                yield value

    def held_from_forward(self) -> set[int]:
        return {number for number, (start, _) in self.held.items() if start == -1}

    def settled(self) -> set[int]:
        """Values in memory that can be dropped no more: nothing would make them again."""
        return {v.number for v in self.alive() if v.held is not None and v.op is None}

    def dropped_before_backward(self, number: int) -> None:
        """A value that is in memory is dropped by the plan of the backward that begins. If an
        earlier backward of the step has run, the value was there in it: since the forward, or since
        a replay retained it."""
        start, _ = self.held.pop(number, (-1, FOREVER))
        if self.requests:
            mark = 0 if self.memory is None else self.memory.mark()
            life = number, start, len(self.requests) - 1, mark or FOREVER
            self.earlier_lives.append(life)
        if start == -1:
            self.evicted[number] = len(self.ops)


def weak_to(value: Value) -> weakref.ref[Value]:
    return weakref.ref(value)
