"""What a backward is expected to ask for, which was modelled and has not run before.

Problem: a plan counts requests. One that is never made, as the backward does not reach the node of
which it was expected, puts all later ones a place off; and what autograd has saved for that node
keeps alive all that it can be made of, with what replays have retained of that. Invariant: a
request counts as not made only once an older node asks for what is expected after it, as autograd
runs a backward from the newest node to the oldest; in doubt nothing is changed. Only what can be
made again is dropped. Imports reached, values and the planner's retention. Rejected: counting by
the number of the node, which other threads count anew.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lowtide.observing.reached import Numbers
from lowtide.planner.retention import NEVER
from lowtide.tape.values import Value


class Expected:
    """What a backward was modelled to ask for, while it runs.

    Args:
        order: for each request the value, and the nodes of which one is to make it.
        ends: returns for each value the last request of its life, as planned.
        values: returns those that are alive.
        choices: lists of a decision for each value, as in a `Retention`; they are kept up to date.
    """

    def __init__(
        self,
        order: Sequence[tuple[int, Numbers]],
        ends: Callable[[], Sequence[int]],
        values: Callable[[], Iterator[Value]],
        *choices: list[int],
    ) -> None:
        self._order, self._ends, self._values = list(order), ends, values
        self._next = 0
        self._choices = choices
        self._skipped: Counter[int] = Counter()
        self._lives: list[tuple[int, weakref.ref[Value]]] | None = None  # the longest first

    def asked(self, index: int, value: int, node: int | None) -> None:
        """Request number `index` of this backward is for this value, and comes from this node."""
        at, order = self._next, self._order
        self._next = at + 1
        found = self._place_of(value, node)
        if found == at:
            return
        if found is None:
            if self._skipped[value]:  # it is made after all
                self._skipped[value] -= 1
                self._next = at
                self._move(index, 1)
        elif order[at][0] == value:  # the requests of two nodes for one value, in another order
            order[at], order[found] = order[found], order[at]
        elif node is not None and all(first > node for _, (first, _) in order[at:found]):
            self._skipped.update(value for value, _ in order[at:found])
            self._next = found + 1
            self._move(index, at - found)

    def _place_of(self, value: int, node: int | None) -> int | None:
        """Where this request is expected, from the next one on."""
        for place in range(self._next - 1, len(self._order)):
            wanted, (first, last) = self._order[place]
            if wanted == value and (node is None or first > last or first <= node <= last):
                return place
        return None

    def _move(self, index: int, by: int) -> None:
        """What was decided for later requests than this one is for those that many later."""
        for choices in self._choices:
            for number, choice in enumerate(choices):
                if index < choice < NEVER:
                    choices[number] = max(index, choice + by)

    def outlived(self) -> Iterator[Value]:
        """The values that are held for longer than planned, as a request was not made."""
        if not self._skipped:
            return
        if self._lives is None:
            ends = self._ends()
            lives = [(ends[v.number], weakref.ref(v)) for v in self._values() if v.op is not None]
            self._lives = sorted(lives, key=lambda life: -life[0])
        while self._lives and self._lives[-1][0] < self._next - 1:
            value = self._lives.pop()[1]()
            if value is not None and value.op is not None and value.held is not None:
                yield value
