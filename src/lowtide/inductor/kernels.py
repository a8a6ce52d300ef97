"""The kernels that Inductor makes of a half of a graph (forward or backward), and their order.

Problem: memory is allocated and freed kernel by kernel. Which operations are fused decides what is
never written to memory, and the order of the kernels what is in memory at the same time. Invariant:
this is a summary of Inductor's rules: elementwise operations are inlined into their readers; an
operation that writes is fused with its readers, then with kernels that read the same; of several
orders, the one with the lowest peak is used. Kernels never depend on each other in a cycle. Imports
nothing. Rejected: the order of the trace, which holds the input of a norm until the last operation
on its statistics.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

_READS = 4  # what is read more than once, and itself reads more than this, is written to memory


@dataclass(frozen=True, slots=True)
class Facts:
    """What is the same for every half; lists by operation, `nbytes` by storage.

    Attributes:
        reads, makes: the storages that it reads and makes.
        fused: whether Inductor generates its code.
        inlined: whether it does so elementwise, and may inline it into its readers.
        slow: whether it has a function that Inductor does not compute twice.
        size: elements that it iterates over.
        nbytes: bytes of each storage.
        taken_in: products that become part of the sum that reads them (addmm).
    """

    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    fused: list[bool]
    inlined: list[bool]
    slow: list[bool]
    size: list[int]
    nbytes: list[int]
    taken_in: frozenset[int]


class Half:
    """The kernels of a forward or a backward.

    Args:
        facts: of the graph.
        order: operations, in the order of the trace.
        stays: storages that are still needed at the end.
        start: storages that are in memory at the beginning and are freed after their last use.

    Attributes:
        kernels: operations that write to memory, kernel by kernel, in the order they run.
        reads: for each such operation, the storages in memory that it is computed from.
        written: storages that are written to memory and live longer than their kernel.
    """

    def __init__(
        self, facts: Facts, order: list[int], stays: Collection[int], start: Collection[int]
    ) -> None:
        self.facts = facts
        self.stays = stays
        self.start = start
        self.reads: dict[int, tuple[int, ...]] = {}
        self.maker: dict[int, int] = {}
        self._nodes(order)
        self._rank: dict[int, int] = {}
        self.of: dict[int, int] = {}
        self._members: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}  # each kernel's last operation; its first is its name
        self._join()
        self.written = self._written()
        self.kernels = self._ordered()

    def _nodes(self, order: list[int]) -> None:
        """Find the operations that write, and the storages in memory each is computed from."""
        facts = self.facts
        users: dict[int, int] = {}
        for index in order:
            weight = 1 if facts.fused[index] else 1000
            for storage in facts.reads[index]:
                users[storage] = users.get(storage, 0) + weight
        below: dict[int, tuple[int, ...]] = {}
        hot: set[int] = set()
        for index in order:
            found: dict[int, None] = {}
            for storage in facts.reads[index]:
                known = below.get(storage)
                if known is None:
                    found[storage] = None
                else:
                    found.update(dict.fromkeys(known))
            reads = tuple(found)
            makes = facts.makes[index]
            if index in facts.taken_in and users.get(makes[0]) and makes[0] not in self.stays:
                below[makes[0]] = reads
                continue
            if facts.inlined[index] and len(makes) == 1 and makes[0] not in self.stays:
                made = makes[0]
                slow = facts.slow[index] or not hot.isdisjoint(facts.reads[index])
                count = users.get(made, 0)
                if count <= 1 or (count < 1000 and not slow and len(reads) <= _READS):
                    below[made] = reads
                    if slow:
                        hot.add(made)
                    continue
            self.reads[index] = reads
            for made in makes:
                if made not in self.start:  # else it was saved, and only another result is needed
                    self.maker[made] = index

    # ------------------------------------------------------------------ fusion

    def _join(self) -> None:
        facts = self.facts
        for index, reads in self.reads.items():
            mine = facts.fused[index]
            rank = 0
            joined: list[int] = []
            for storage in reads:
                made = self.maker.get(storage)
                if made is None:
                    continue
                together = mine and facts.fused[made]
                below = self._rank[made] + (0 if together else 1)
                if together:
                    joined.append(made)
                rank = max(rank, below)
            self._rank[index] = rank
            self.of[index] = index
            self._members[index] = [index]
            self._last[index] = index
            for made in joined:
                if self._rank[made] == rank:
                    self._merge(made, index)
        self._users()
        self._join_more()

    def _merge(self, one: int, two: int) -> int:
        a, b = self.of[one], self.of[two]
        if a == b:
            return a
        a, b = min(a, b), max(a, b)
        for index in self._members[b]:
            self.of[index] = a
        self._members[a] += self._members.pop(b)
        self._last[a] = max(self._last[a], self._last.pop(b))
        return a

    def _users(self) -> None:
        self.readers: dict[int, list[int]] = {}
        for index, reads in self.reads.items():
            for storage in reads:
                self.readers.setdefault(storage, []).append(index)

    def _join_more(self) -> None:
        """Fuse kernels over equally many elements if one reads the other, or both read one tensor.

        Not if a third one must run between them.
        """
        facts = self.facts
        for storage, readers in self.readers.items():
            able = [i for i in readers if facts.fused[i]]
            made = self.maker.get(storage)
            for one in [made] if made is not None and facts.fused[made] else []:
                for two in able:
                    self._try(one, two)
            for place, one in enumerate(able):
                if facts.nbytes[storage] >= facts.size[one]:
                    for two in able[place + 1 :]:
                        self._try(one, two)

    def _try(self, one: int, two: int) -> None:
        if self.of[one] == self.of[two] or self.facts.size[one] != self.facts.size[two]:
            return
        if not self._between(one, two) and not self._between(two, one):
            self._merge(one, two)

    def _between(self, first: int, then: int) -> bool:
        """Whether a third kernel needs the first and is needed by the second.

        Operations are numbered as traced: a kernel that begins after the end of the second cannot
        lead to it.
        """
        start, goal = self.of[first], self.of[then]
        end = self._last[goal]
        seen = {start, goal}
        stack = [start]
        while stack:
            kernel = stack.pop()
            following = self._following(kernel)
            if goal in following and kernel != start:
                return True
            new = [other for other in following if other < end and other not in seen]
            stack.extend(new)
            seen.update(new)
        return False

    def _following(self, kernel: int) -> set[int]:
        makes, readers, of = self.facts.makes, self.readers, self.of
        return {
            of[reader]
            for index in self._members[kernel]
            for made in makes[index]
            for reader in readers.get(made, ())
        }

    def _written(self) -> set[int]:
        found = set()
        for storage, index in self.maker.items():
            kernel = self.of[index]
            readers = self.readers.get(storage, ())
            if (
                storage in self.stays
                or not self.facts.fused[index]
                or any(self.of[i] != kernel for i in readers)
            ):
                found.add(storage)
        return found

    # ------------------------------------------------------------------ the order

    def _ordered(self) -> list[list[int]]:
        """Kernels in the order of their first operations, each after those that it needs."""
        place = {index: position for position, index in enumerate(self.reads)}
        kernels = sorted(
            (sorted(m, key=place.__getitem__) for m in self._members.values()),
            key=lambda m: place[m[0]],
        )
        number = {index: k for k, members in enumerate(kernels) for index in members}
        needs: list[list[int]] = []
        for k, members in enumerate(kernels):
            needs.append(
                sorted(
                    {
                        number[self.maker[s]]
                        for i in members
                        for s in self.reads[i]
                        if s in self.maker
                    }
                    - {k}
                )
            )
        done = bytearray(len(kernels))
        order: list[int] = []
        for first in range(len(kernels)):
            stack = [first]
            while stack:
                k = stack[-1]
                if done[k]:
                    stack.pop()
                    continue
                missing = [n for n in needs[k] if not done[n]]
                if missing:
                    stack.extend(reversed(missing))
                else:
                    done[k] = 1
                    order.append(k)
                    stack.pop()
        return self._lowest(kernels, needs, order)

    def _lowest(
        self, kernels: list[list[int]], needs: list[list[int]], order: list[int]
    ) -> list[list[int]]:
        makes, nbytes = self.facts.makes, self.facts.nbytes
        # As Inductor counts: including what a kernel makes for itself only.
        new = [
            sum(nbytes[s] for i in kernels[k] for s in makes[i] if s in self.maker) for k in order
        ]
        position = {k: p for p, k in enumerate(order)}
        reads: list[list[int]] = []
        users: dict[int, set[int]] = {}
        for p, k in enumerate(order):
            mine = dict.fromkeys(s for i in kernels[k] for s in self.reads[i])
            mine |= dict.fromkeys(s for i in kernels[k] for s in makes[i])
            counted = [s for s in mine if s in self.maker or s in self.start]
            reads.append(counted)
            for s in counted:
                users.setdefault(s, set()).add(p)
        for s in self.stays:
            users.pop(s, None)
        follow: list[list[int]] = [[] for _ in order]
        before = [0] * len(order)
        for p, k in enumerate(order):
            for n in needs[k]:
                follow[position[n]].append(p)
                before[p] += 1
        begin = sum(nbytes[s] for s in self.start)
        plan = _Orders(new, reads, users, follow, before, begin, nbytes)
        best = min(plan.candidates(), key=plan.peak)
        return [kernels[order[p]] for p in best]


@dataclass(slots=True)
class _Orders:
    new: list[int]
    reads: list[list[int]]
    users: dict[int, set[int]]
    follow: list[list[int]]
    before: list[int]
    begin: int
    nbytes: list[int]

    def candidates(self) -> list[list[int]]:
        return [list(range(len(self.new))), self.least_first(), self.breadth_first()]

    def peak(self, order: list[int]) -> int:
        left = {s: len(u) for s, u in self.users.items()}
        level = peak = self.begin
        for p in order:
            level += self.new[p]
            peak = max(peak, level)
            for s in self.reads[p]:
                if s in left:
                    left[s] -= 1
                    if not left[s]:
                        level -= self.nbytes[s]
        return peak

    def least_first(self) -> list[int]:
        """Of the kernels that can run, take one that does not raise the peak and adds least."""
        left = {s: len(u) for s, u in self.users.items()}
        waiting = {s: set(u) for s, u in self.users.items()}
        frees = [sum(self.nbytes[s] for s in r if left.get(s) == 1) for r in self.reads]
        before = list(self.before)
        ready = {p for p, count in enumerate(before) if not count}
        level = self.begin
        highest = level
        order = []
        while ready:
            gap = highest - level
            p = min(
                ready,
                key=lambda p: (
                    self.new[p] if self.new[p] > gap else 0,
                    self.new[p] - frees[p],
                    p,
                ),
            )
            ready.remove(p)
            order.append(p)
            level += self.new[p]
            highest = max(highest, level)
            level -= frees[p]
            for s in self.reads[p]:
                if s in left:
                    left[s] -= 1
                    waiting[s].discard(p)
                    if left[s] == 1:
                        for q in waiting[s]:
                            frees[q] += self.nbytes[s]
            for q in self.follow[p]:
                before[q] -= 1
                if not before[q]:
                    ready.add(q)
        return order

    def breadth_first(self) -> list[int]:
        before = list(self.before)
        preds: list[list[int]] = [[] for _ in before]
        when = [0] * len(before)
        heap: list[tuple[list[int], int]] = [([], p) for p, c in enumerate(before) if not c]
        heapq.heapify(heap)
        order: list[int] = []
        while heap:
            _, p = heapq.heappop(heap)
            when[p] = len(order)
            order.append(p)
            for q in self.follow[p]:
                preds[q].append(when[p])
                before[q] -= 1
                if not before[q]:
                    heapq.heappush(heap, (sorted(preds[q]), q))
        return order
