"""The order of kernels that may run in several ones, by what is in memory at the same time.

Problem: Inductor tries a few orders of the kernels that it has made, and takes the one with the
lowest peak by its own count; a plan has to know which. Invariant: each kernel runs after those that
it needs; of equal peaks, the first order that is tried wins, as there. Imports nothing. Rejected:
Inductor's own functions, which want its scheduler's nodes, made by lowering the graph.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Orders:
    """Kernels, numbered so that each comes after those that it needs.

    Attributes:
        makes: bytes that each makes.
        touches: the storages that each reads or makes, of those that are counted.
        users: for each storage that is freed after its last use, the kernels that touch it.
        readers: for each kernel, those that need it.
        needs: for each kernel, how many it needs.
        begin: bytes in memory before the first.
        nbytes: bytes of each storage.
    """

    makes: list[int]
    touches: list[list[int]]
    users: dict[int, set[int]]
    readers: list[list[int]]
    needs: list[int]
    begin: int
    nbytes: list[int]

    def lowest(self) -> list[int]:
        """Of the orders that Inductor tries, the one with the lowest peak."""
        as_traced = list(range(len(self.makes)))
        return min((as_traced, self._least_first(), self._breadth_first()), key=self._peak)

    def _peak(self, order: list[int]) -> int:
        left = {storage: len(kernels) for storage, kernels in self.users.items()}
        level = peak = self.begin
        for kernel in order:
            level += self.makes[kernel]
            peak = max(peak, level)
            for storage in self.touches[kernel]:
                if storage in left:
                    left[storage] -= 1
                    if not left[storage]:
                        level -= self.nbytes[storage]
        return peak

    def _least_first(self) -> list[int]:
        """Of the kernels that can run, take one that does not raise the peak and adds least."""
        nbytes, makes = self.nbytes, self.makes
        waiting = {storage: set(kernels) for storage, kernels in self.users.items()}
        frees = [  # bytes, if it runs next
            sum(nbytes[s] for s in storages if len(waiting.get(s, ())) == 1)
            for storages in self.touches
        ]
        needs = list(self.needs)
        ready = {kernel for kernel, count in enumerate(needs) if not count}
        level = highest = self.begin
        order = []
        while ready:
            gap = highest - level
            _, _, kernel = min(
                (makes[k] if makes[k] > gap else 0, makes[k] - frees[k], k) for k in ready
            )
            ready.remove(kernel)
            order.append(kernel)
            level += makes[kernel]
            highest = max(highest, level)
            level -= frees[kernel]
            for storage in self.touches[kernel]:
                users = waiting.get(storage)
                if users is None:
                    continue
                users.remove(kernel)
                if len(users) == 1:
                    [last] = users
                    frees[last] += nbytes[storage]
            ready.update(self._then_ready(kernel, needs))
        return order

    def _breadth_first(self) -> list[int]:
        """Take first what became ready first: by when those that it needs have run."""
        needs = list(self.needs)
        ran: list[list[int]] = [[] for _ in needs]  # for each kernel, when those it needs did
        heap: list[tuple[list[int], int]] = [([], k) for k, count in enumerate(needs) if not count]
        heapq.heapify(heap)
        order: list[int] = []
        while heap:
            _, kernel = heapq.heappop(heap)
            for reader in self.readers[kernel]:
                ran[reader].append(len(order))
            order.append(kernel)
            for reader in self._then_ready(kernel, needs):
                heapq.heappush(heap, (sorted(ran[reader]), reader))
        return order

    def _then_ready(self, kernel: int, needs: list[int]) -> list[int]:
        """The kernels that can run once this one has, of which `needs` counts what they lack."""
        found = []
        for reader in self.readers[kernel]:
            needs[reader] -= 1
            if not needs[reader]:
                found.append(reader)
        return found


def needed_first(needs: list[list[int]]) -> list[int]:
    """Kernels in their order, except that those that one needs come before it."""
    done = bytearray(len(needs))
    order: list[int] = []
    for first in range(len(needs)):
        stack = [first]
        while stack:
            kernel = stack[-1]
            if done[kernel]:
                stack.pop()
                continue
            missing = [other for other in needs[kernel] if not done[other]]
            if missing:
                stack.extend(reversed(missing))
            else:
                done[kernel] = 1
                order.append(kernel)
                stack.pop()
    return order
