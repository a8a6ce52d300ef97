"""Dropping held values while a step runs that no plan covers.

Problem: the first step, and every step whose graph changed, must stay inside the limit although
there is no plan for it (rule 13). Invariant: only values that can be replayed are dropped, cheapest
first per byte to recompute, dropped ancestors included, so that what stays is spread over the step.
Imports tape values. Rejected: dropping the oldest first, which makes long chains that are
recomputed all at once.

Source: Kirisame et al., *Dynamic Tensor Rematerialization*, 2021.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable

from lowtide.tape.values import Value

_OVERHEAD = 20e-6  # seconds a replayed operation costs besides its kernel


class Evictor:
    """Keeps the bytes of a running forward under a target by dropping held values.

    Prices rise while ancestors are dropped: what is dropped next is looked at again just before,
    nothing else is.
    """

    def __init__(self, live: list[int]) -> None:
        self._live = live
        self._known: list[weakref.ref[Value]] = []
        self._heap: list[tuple[float, int, weakref.ref[Value]]] = []
        self._offered: set[int] = set()  # the values in the heap, by number
        self._offers = 0
        self._chain: dict[int, float] = {}  # seconds to make a value again, by number
        self.drops = 0  # how many values were dropped
        self.largest = 0  # bytes of the largest value so far

    def add(self, values: list[Value]) -> None:
        """Values that may be held, now or later."""
        for value in values:
            if value.nbytes > self.largest:
                self.largest = value.nbytes
            self.held(value)
        self._known.extend(map(_weak, values))

    def held(self, value: Value) -> None:
        """Such a value may be held from now on."""
        if (
            value.held is not None
            and value.op is not None
            and value.nbytes
            and value.number not in self._offered
        ):
            self._offered.add(value.number)
            self._offer(value, self._price(value))

    def shrink(self, target: int, drop: Callable[[Value], None]) -> bool:
        """Drop values until at most `target` bytes are live; False if not enough can go."""
        heap, gone = self._heap, set[int]()
        while self._live[0] > target and (heap or self._look_again(gone)):
            _, _, weak = heapq.heappop(heap)
            value = weak()
            if value is None or value.held is None or value.op is None:
                if value is not None:
                    self._offered.discard(value.number)
                continue
            price = self._price(value)
            if heap and price > heap[0][0] * 1.5:
                self._offer(value, price)  # an ancestor was dropped since: reconsider
                continue
            self._offered.discard(value.number)
            gone.add(value.number)
            drop(value)
            self._chain[value.number] = price * value.nbytes
            self.drops += 1
        return self._live[0] <= target

    def _look_again(self, gone: set[int]) -> bool:
        """Offer what is held though nobody said so, as what a replay in the forward has made."""
        self._known = [weak for weak in self._known if weak() is not None]
        for weak in self._known:
            value = weak()
            if value is not None and value.number not in gone:
                self.held(value)
        return bool(self._heap)

    def _offer(self, value: Value, price: float) -> None:
        self._offers += 1
        heapq.heappush(self._heap, (price, self._offers, _weak(value)))

    def _price(self, value: Value) -> float:
        return self._cost(value) / value.nbytes

    def _cost(self, value: Value) -> float:
        """Seconds to make a value again. What it is made from and nobody holds comes first, which
        may be a long chain."""
        assert value.op is not None
        chain, open_ones = self._chain, [value]
        while True:
            op = open_ones[-1].op
            assert op is not None
            missing = [
                read
                for read in op.values()
                if read.held is None and read.op is not None and read.number >= 0
            ]
            unknown = [read for read in missing if read.number not in chain]
            if unknown:
                open_ones.extend(unknown)
                continue
            cost = op.seconds + _OVERHEAD + sum([chain[read.number] for read in missing])
            made = open_ones.pop()
            if not open_ones:
                return cost
            chain[made.number] = cost


def _weak(value: Value) -> weakref.ref[Value]:
    return weakref.ref(value)
