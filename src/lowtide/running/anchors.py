"""Values that a plan holds although autograd does not save them.

Problem: a value that is held for good no longer refers to its operation, but whether a step is the
planned one is not known before its backward begins; until then it must be possible to drop it.
Invariant: the operation of each anchored value that is alive is kept here, until it is released or
settled; once the forward is over nothing here keeps a value alive. Imports tape values.
Rejected: letting every held value keep its operation, which keeps inputs alive that the plan
drops.
"""

from __future__ import annotations

import weakref
from collections.abc import Container

from lowtide.tape.values import Operation, Value


class _Anchor(weakref.ref):  # type: ignore[type-arg]
    """A held value that autograd does not save, and the operation that makes it."""

    __slots__ = ("op",)

    op: Operation | None


class Anchors:
    """The anchored values of one step.

    Attributes:
        cut_off: no replay makes those with lower numbers, see `lowtide.tape.tape.Decisions`.
    """

    __slots__ = ("_anchors", "_to_come", "cut_off")

    def __init__(self) -> None:
        self.cut_off = 0
        self._anchors: dict[int, _Anchor] = {}
        self._to_come: list[Value] = []  # until the forward is over

    @property
    def numbers(self) -> Container[int]:
        """The numbers of the values that are held only because the plan says so."""
        return self._anchors.keys()

    def hold(self, value: Value) -> None:
        """Hold `value`. The tape then forgets its operation, which is kept here while the value
        lives, so that the value can be dropped if the step turns out to be another one.

        The value lives as long as the forward: its first reader may be an operation that makes
        nothing and is freed at once, with all that only it refers to.
        """
        self._to_come.append(value)
        anchors, number = self._anchors, value.number
        value.keep = True
        anchor = _Anchor(value, lambda _: anchors.pop(number, None))
        anchor.op = value.op
        anchors[number] = anchor

    def forward_over(self) -> None:
        """The recording is closed: from now on a value lives as long as something needs it."""
        self._to_come.clear()

    def release(self) -> None:
        """What is held only because the plan said so may be dropped after all, if it can be made
        again."""
        for number in list(self._anchors):
            # What this loop lets go, and a garbage collection, may take others out meanwhile.
            anchor = self._anchors.get(number)
            value = None if anchor is None else anchor()
            if anchor is not None and value is not None and number >= self.cut_off:
                value.keep = False
                if value.held is not None:
                    value.op = anchor.op
        self.settle()

    def settle(self) -> None:
        """What is held stays held: the step is the planned one, or is over."""
        self._anchors.clear()
        self._to_come.clear()
