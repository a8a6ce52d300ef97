"""How long the program itself has the memory of what a forward makes.

Problem: a value that a plan lets go of stays in memory as long as somebody else has it: a name in a
function that has not returned, a cache, a list. While the tape holds the value as well, nothing
shows when the others are done with it. Invariant: what is told is the last operation at whose end
somebody else was seen to have the value's storage, never a later one. Too early only counts bytes
twice; too late would promise memory that is not there. Imports `_compat`. Rejected: weak
references to tensors. Views and kernels under way have a storage through tensors of their own, and
torch brings a tensor's object back to life while C++ has the tensor; owners of a storage can be
counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from lowtide import _compat

if TYPE_CHECKING:
    from lowtide.planner.graph import Graph
    from lowtide.tape.known import Entry
    from lowtide.tape.values import Value

_AT_ONCE = 100  # storages that are looked at after an operation; further ones wait their turn


class Names:
    """Looks, after every operation of a step that is watched, at who has which storage.

    Attributes:
        until: of each value that somebody else had after an operation: the last such operation.
        table: the open recorder's, of every live storage; it is emptied when recording ends.
    """

    def __init__(self) -> None:
        self.until: dict[int, int] = {}
        self.table: dict[int, Entry] = {}
        self._open: dict[int, None] = {}  # keys of storages that somebody else has
        self._gradients: set[int] = set()  # of those, made in a backward that has begun
        self._left: list[tuple[int, int, weakref.ref[Any]]] = []  # at the end of the forward

    def resume(self, base: Graph, count: int, table: dict[int, Entry]) -> None:
        """Go on after `count` operations that were those of `base`, and were not watched."""
        self.table, self._open = table, dict.fromkeys(table)
        for number, node in enumerate(base.values):
            if 0 <= node.producer < count <= len(base.ops) and node.named >= 0:
                self.until[number] = min(node.named, count - 1)

    def ran(self, operation: int, made: list[Value], written: Iterable[int]) -> None:
        """An operation has made values, and has written the storages of these keys in place."""
        self._look(operation)
        self._open.update(dict.fromkeys(written))
        fresh = dict.fromkeys(islice(reversed(self.table), len(made)))  # they stand last
        self._open.update(fresh)
        if _compat.in_backward():
            self._gradients.update(fresh)
        else:
            self._gradients.clear()

    def forward_ends(self) -> None:
        """What is in memory now is known by weak references once the table is emptied."""
        self._left = [
            (entry.key, entry.counted, weakref.ref(storage))
            for entry in list(self.table.values())  # storages go meanwhile, on other threads too
            if entry.counted
            for storage in (entry(),)
            if storage is not None
        ]

    def over(self, ours: Container[int]) -> int:
        """Backward begins, and who still has a storage has it there: bytes of what the forward has
        made and the program has names on (an output, a loss), without those of these keys."""
        if self.table:
            self.forward_ends()
        left, self._left = self._left, []
        gradients, self._gradients = self._gradients, set()
        self.table, self._open = {}, {}
        return sum(
            nbytes
            for key, nbytes, storage in left
            if key not in ours and key not in gradients and storage() is not None
        )

    def _look(self, operation: int) -> None:
        """Storages that nobody but the tape has any more need not be looked at again."""
        table, still = self.table, self._open
        for key in tuple(islice(still, _AT_ONCE)):
            del still[key]
            entry = table.get(key)
            storage = None if entry is None else entry()
            if entry is None or storage is None:
                continue
            value = entry.value or (entry.weak() if entry.weak is not None else None)
            if value is None or value.number < 0:
                continue
            held = value.held
            ours = held is not None and _compat.storage_key(held) == key
            if _compat.storage_holders(storage) > 1 + ours:  # one is its Python object
                self.until[value.number] = operation
                still[key] = None
