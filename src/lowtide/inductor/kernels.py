"""The kernels that Inductor makes of a half of a graph (forward or backward), and their order.

Problem: memory is allocated and freed kernel by kernel. Which operations are fused decides what is
never written to memory, and the order of the kernels what is in memory at the same time. Invariant:
this is a summary of Inductor's rules: elementwise operations are inlined into their readers; an
operation that writes is fused with its readers, then with kernels that read the same; of several
orders, the one with the lowest peak is used. Kernels never depend on each other in a cycle. Imports
orders. Rejected: the order of the trace, which holds the input of a norm until the last operation
on its statistics.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.inductor.orders import Orders, needed_first

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
        self._members: dict[int, list[int]] = {}  # by kernel, whose name is its first operation
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
            for made in joined:
                if self._rank[made] == rank:
                    self._merge(made, index)
        self._users()
        # Kernels, each after those that it needs; None where one was that was fused. So far, each
        # has operations of one rank, and needs only kernels of lower ones.
        kernels = sorted(self._members, key=lambda kernel: (self._rank[kernel], kernel))
        self._order: list[int | None] = [*kernels]
        self._place = {kernel: place for place, kernel in enumerate(kernels)}
        self._join_more()

    def _merge(self, one: int, two: int) -> int:
        a, b = self.of[one], self.of[two]
        if a == b:
            return a
        a, b = min(a, b), max(a, b)
        for index in self._members[b]:
            self.of[index] = a
        self._members[a] += self._members.pop(b)
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
        """Fuse the kernels of two operations, unless a third one must run between them."""
        if self.of[one] == self.of[two] or self.facts.size[one] != self.facts.size[two]:
            return
        first, then = sorted((self.of[one], self.of[two]), key=self._place.__getitem__)
        later = self._needing(first, then)
        if later is not None:
            self._reorder(first, then, later)

    def _needing(self, first: int, then: int) -> set[int] | None:
        """Of the kernels between these two in the order, those that need the first; None if the
        second needs one of them."""
        end = self._place[then]
        found: set[int] = set()
        stack = [first]
        while stack:
            kernel = stack.pop()
            following = self._following(kernel)
            if then in following and kernel != first:
                return None
            # None of those after the second in the order leads to it.
            new = [k for k in following if self._place[k] < end and k != first and k not in found]
            stack.extend(new)
            found.update(new)
        return found

    def _reorder(self, first: int, then: int, later: set[int]) -> None:
        """Fuse two kernels; `later`: those between them in the order that need the first."""
        begin, end = self._place.pop(first), self._place.pop(then)
        between = [kernel for kernel in self._order[begin + 1 : end] if kernel is not None]
        placed: list[int | None] = [kernel for kernel in between if kernel not in later]
        placed.append(self._merge(first, then))
        placed += [kernel for kernel in between if kernel in later]
        self._place.update((k, begin + place) for place, k in enumerate(placed) if k is not None)
        self._order[begin : end + 1] = placed + [None] * (end + 1 - begin - len(placed))

    def _following(self, kernel: int) -> set[int]:
        """The kernels that read what this one writes, with itself if it reads that too."""
        makes, readers, of = self.facts.makes, self.readers, self.of
        return {
            of[reader]
            for index in self._members[kernel]
            for made in makes[index]
            if made in self.maker
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
        """The kernels, each with its operations as traced, in the order that takes least memory."""
        place = {index: position for position, index in enumerate(self.reads)}
        kernels = [sorted(members, key=place.__getitem__) for members in self._members.values()]
        kernels.sort(key=lambda members: place[members[0]])
        number = {index: kernel for kernel, members in enumerate(kernels) for index in members}
        needs = []
        for kernel, members in enumerate(kernels):
            read = {storage for index in members for storage in self.reads[index]}
            made = {number[self.maker[storage]] for storage in read if storage in self.maker}
            needs.append(sorted(made - {kernel}))
        order = needed_first(needs)
        kernels = [kernels[kernel] for kernel in order]
        position = {kernel: place for place, kernel in enumerate(order)}
        needs = [[position[needed] for needed in needs[kernel]] for kernel in order]
        return [kernels[kernel] for kernel in self._orders(kernels, needs).lowest()]

    def _orders(self, kernels: list[list[int]], needs: list[list[int]]) -> Orders:
        """What these kernels make and use, and which other ones each of them needs."""
        makes, nbytes = self.facts.makes, self.facts.nbytes
        new: list[int] = []
        touches: list[list[int]] = []
        users: dict[int, set[int]] = {}
        readers: list[list[int]] = [[] for _ in kernels]
        for kernel, members in enumerate(kernels):
            made = [storage for index in members for storage in makes[index]]
            # As Inductor counts: including what a kernel makes for itself only.
            new.append(sum(nbytes[storage] for storage in made if storage in self.maker))
            mine = dict.fromkeys(storage for index in members for storage in self.reads[index])
            mine |= dict.fromkeys(made)
            touches.append([s for s in mine if s in self.maker or s in self.start])
            for storage in touches[-1]:
                users.setdefault(storage, set()).add(kernel)
            for needed in needs[kernel]:
                readers[needed].append(kernel)
        for storage in self.stays:
            users.pop(storage, None)
        begin = sum(nbytes[storage] for storage in self.start)
        return Orders(new, touches, users, readers, list(map(len, needs)), begin, nbytes)
