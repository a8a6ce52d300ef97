"""How long the program itself has references to what a forward makes.

Problem: a value that a plan drops stays in memory as long as the program has it: a variable of a
function that has not returned, a cache, a list. While the tape holds the value too, nothing shows
when the program is done with it. Invariant: what is noted is the last operation after which the
program was seen to have the value's storage, never a later one. Too early only counts bytes twice;
too late would promise memory that is not there. Imports `_compat`, kernels. Rejected: weak
references to tensors: views and running kernels own a storage through other tensors, and torch
revives a tensor's Python object while C++ has the tensor. The owners of a storage can be counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from lowtide import _compat
from lowtide.kernels.pointwise import reduced_in_place

if TYPE_CHECKING:
    from lowtide.planner.graph import Graph
    from lowtide.tape.known import Entry
    from lowtide.tape.values import Value

_SCALAR = 8  # bytes
_AT_ONCE = 100  # storages that are checked after an operation; further ones wait their turn


class Names:
    """Checks after every operation of a watched step which storages the program has.

    Attributes:
        until: for each value that the program had after an operation: the last such operation.
        returned: the values that it had when the recording closed, such as an output that a loss
            outside reads.
        outside: those of them to which a loss outside may give a gradient: none if a loss is among
            them.
        table: the open recorder's table of live storages; it is emptied when recording ends.
    """

    def __init__(self) -> None:
        self.until: dict[int, int] = {}
        self.returned: set[int] = set()
        self.outside: frozenset[int] = frozenset()
        self.table: dict[int, Entry] = {}
        self._losses: set[int] = set()  # values that are one number each, however large they are
        self._open: dict[int, None] = {}  # keys of storages that the program has, or may have
        self._gradients: set[int] = set()  # those of them that were made in a running backward
        self._left: list[tuple[int, int, weakref.ref[Any]]] = []  # at the end of the forward
        self._backward = self._forward = False  # whether one ran; more than a number was made

    @property
    def gradients_alone(self) -> bool:
        """Whether all operations ran in a backward, but for those on numbers, such as a loss."""
        return self._backward and not self._forward

    def resume(self, base: Graph | None, count: int, table: dict[int, Entry]) -> None:
        """Go on after operations that were not watched; `count` of them were those of `base`."""
        self.table, self._open = table, dict.fromkeys(table)
        for number, node in enumerate(() if base is None else base.values):
            if base and 0 <= node.producer < count <= len(base.ops) and node.named >= 0:
                self.until[number] = min(node.named, count - 1)

    def storages(self) -> dict[int, Any]:
        """What is in memory now, by the numbers of the values in it."""
        found = {}
        for entry in list(self.table.values()):  # as in `forward_ends`
            value, storage = _value_in(entry), entry()
            if value is not None and storage is not None:
                found[value.number] = storage
        return found

    def ran(self, operation: int, made: list[Value], written: Iterable[int]) -> None:
        """An operation has made values, and has written the storages of these keys in place."""
        self._look(operation)
        self._open.update(dict.fromkeys(written))
        fresh = dict.fromkeys(islice(reversed(self.table), len(made)))  # the newest come last
        self._open.update(fresh)
        if _compat.in_backward():
            self._gradients.update(fresh)
            self._backward = True
        else:
            self._gradients.clear()
            self._forward = self._forward or any(value.nbytes > _SCALAR for value in made)

    def output(self) -> int:
        """Bytes of the largest result that the program has of a forward that ends; 0 if a loss is
        among them, as no other is then to come. Largest, as hidden states have no loss."""
        had = [value for key in self._open if (value := self._had(key)) is not None]
        if any(self._is_loss(value.number, value.nbytes) for value in had):
            return 0
        return max((value.nbytes for value in had), default=0)

    def reduces(self, name: str, args: Sequence[Any], made: list[Value]) -> None:
        """An operation has made values: note those that are one number in a larger memory."""
        if reduced_in_place(name, args):
            self._losses.update(value.number for value in made)

    def _is_loss(self, number: int, nbytes: int) -> bool:
        return 0 < nbytes <= _SCALAR or number in self._losses

    def of_losses(self, sizes: Sequence[int]) -> int:
        """Bytes of the gradients with which a backward begins, and which its caller has until it is
        over: those of the losses among the results. `sizes`: of each value, in bytes."""
        return sum(min(_SCALAR, sizes[n]) for n in self.returned if self._is_loss(n, sizes[n]))

    def forward_ends(self) -> None:
        """Keep weak references to what is in memory now, as the table will be emptied, and note
        which of it the program has."""
        had = [value for key in self._open if (value := self._had(key)) is not None]
        self.returned = {value.number for value in had}
        has_loss = any(self._is_loss(value.number, value.nbytes) for value in had)
        self.outside = frozenset() if has_loss else frozenset(self.returned)
        self._left = [
            (entry.key, entry.counted, weakref.ref(storage))
            for entry in list(self.table.values())  # storages are freed meanwhile, as by threads
            if entry.counted
            for storage in (entry(),)
            if storage is not None
        ]

    def over(self, ours: Container[int]) -> dict[int, int]:
        """Backward begins. The bytes of each storage that the forward made and that is still there
        (an output, a loss), by key, except those with the keys `ours`."""
        if self.table:
            self.forward_ends()
        left, self._left = self._left, []
        gradients, self._gradients = self._gradients, set()
        self.table, self._open = {}, {}
        return {
            key: nbytes
            for key, nbytes, storage in left
            if key not in ours and key not in gradients and storage() is not None
        }

    def _look(self, operation: int) -> None:
        """Check the open storages. One that only the tape has is not checked again."""
        still = self._open
        in_turn = len(still) > _AT_ONCE
        for key in tuple(islice(still, _AT_ONCE)):
            value = self._had(key)
            if value is not None:
                self.until[value.number] = operation
            if value is None or in_turn:
                del still[key]
            if value is not None and in_turn:
                still[key] = None

    def _had(self, key: int) -> Value | None:
        """The recorded value in the storage with this key, if the program has that storage."""
        entry = self.table.get(key)
        storage = None if entry is None else entry()
        if entry is None or storage is None:
            return None
        value = _value_in(entry)
        if value is None or value.number < 0:
            return None
        holders = _compat.storage_holders(storage)  # one is the storage's Python object
        if holders != 2:
            return value if holders > 2 else None
        held = value.held  # what the tape holds is the other one, if it is in this storage
        return None if held is not None and _compat.storage_key(held) == key else value


def _value_in(entry: Entry) -> Value | None:
    return entry.value or (entry.weak() if entry.weak is not None else None)
