"""Values that a plan holds although autograd does not save them.

Problem: the tape forgets what makes a value that is held for good, but whether a step is the
planned one is not known before its backward begins; until then such a value must be able to go.
Invariant: for each anchored value that is alive its operation is known here, until it is released
or settled; once the forward is over nothing here keeps a value alive. Imports tape values.
Rejected: leaving its operation to every held value, which keeps the inputs alive that the plan has
let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Container

from lowtide.tape.values import Operation, Value


class _Anchor(weakref.ref):  # type: ignore[type-arg]
    """A held value that autograd does not save, and what makes it."""

    __slots__ = ("op",)

    op: Operation


class Anchors:
    """The anchored values of one step."""

    __slots__ = ("_anchors", "_to_come")

    def __init__(self) -> None:
        self._anchors: dict[int, _Anchor] = {}
        self._to_come: list[Value] = []  # until the forward is over

    @property
    def numbers(self) -> Container[int]:
        """Of the values that are held only because the plan says so."""
        return self._anchors.keys()

    def hold(self, value: Value, op: Operation) -> None:
        """Hold `value`. The tape forgets its operation then; here it is not, while the value lives,
        so that it can be let go after all if the step turns out to be another one.

        It lives as long as the forward: the first to read it may be an operation that makes
        nothing and is forgotten, and the value with it.
        """
        self._to_come.append(value)
        anchors, number = self._anchors, value.number
        value.keep = True
        anchor = _Anchor(value, lambda _: anchors.pop(number, None))
        anchor.op = op
        anchors[number] = anchor

    def forward_over(self) -> None:
        """The recording is closed: from now on a value lives as long as something needs it."""
        self._to_come.clear()

    def release(self) -> None:
        """What is held only because the plan said so may go after all."""
        for anchor in tuple(self._anchors.values()):
            value = anchor()
            if value is not None:
                value.keep = False
                if value.held is not None:
                    value.op = anchor.op
        self.settle()

    def settle(self) -> None:
        """What is held stays as it is: the step is the planned one, or is over."""
        self._anchors.clear()
        self._to_come.clear()
