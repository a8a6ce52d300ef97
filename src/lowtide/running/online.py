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
    """Keeps the bytes of a running forward under a target by dropping held values."""

    def __init__(self, live: list[int]) -> None:
        self._live = live
        self._known: list[weakref.ref[Value]] = []
        self._chain: dict[int, float] = {}  # seconds to make a dropped value again, by number
        self.drops = 0  # how many values were dropped
        self.largest = 0  # bytes of the largest value so far

    def add(self, values: list[Value]) -> None:
        for value in values:
            if value.nbytes > self.largest:
                self.largest = value.nbytes
        self._known.extend(map(_weak, values))

    def shrink(self, target: int, drop: Callable[[Value], None]) -> bool:
        """Drop values until at most `target` bytes are live; False if not enough can go."""
        if self._live[0] <= target:
            return True
        self._known = [weak for weak in self._known if weak() is not None]
        held: list[Value] = []
        for weak in self._known:
            value = weak()
            if value is None:
                continue
            if value.op is not None and value.held is not None:
                held.append(value)
            elif value.op is not None and value.number not in self._chain:
                self._chain[value.number] = self._cost(value)
        heap = [(self._price(v), i) for i, v in enumerate(held) if v.nbytes]
        heapq.heapify(heap)
        while heap and self._live[0] > target:
            _, index = heapq.heappop(heap)
            value = held[index]
            price = self._price(value)
            if heap and price > heap[0][0] * 1.5:
                heapq.heappush(heap, (price, index))  # an ancestor was dropped since: reconsider
                continue
            drop(value)
            self._chain[value.number] = self._cost(value)
            self.drops += 1
        return self._live[0] <= target

    def _cost(self, value: Value) -> float:
        op = value.op
        assert op is not None
        chain = sum(
            self._chain.get(v.number, 0.0) for v in op.values() if v.held is None and v.number >= 0
        )
        return op.seconds + _OVERHEAD + chain

    def _price(self, value: Value) -> float:
        return self._cost(value) / value.nbytes


def _weak(value: Value) -> weakref.ref[Value]:
    return weakref.ref(value)
