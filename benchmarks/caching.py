"""CUDA's caching allocator, simulated: what it reserves for a sequence of allocations.

Problem: a limit counts what is allocated, while a GPU is full of what is reserved: segments that
the allocator has taken from the driver and keeps, whole or in part, for later. How much more that
is depends on the order of sizes, which can be recorded without a GPU. Invariant: the rules are
those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.13) for one stream: blocks of multiples of 512
bytes; a pool of 2 MiB segments for up to 1 MiB, and one of 20 MiB or more beyond; the smallest free
block that is large enough, the lowest first; a rest that is worth it is split off; free neighbors
are merged; when the driver has no more, what is wholly free is given back. Imports nothing.
Rejected: counting blocks by size, which hides that a free block may be too small.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

MIB = 1 << 20
_SMALL = MIB
_ROUND = 512


class OutOfMemoryError(Exception):
    """The driver has no more, even after free segments were given back."""


class Block:
    """A piece of a segment; its neighbors in the segment are linked."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address, self.size, self.small, self.free = address, size, small, True
        self.before: Block | None = None
        self.after: Block | None = None


class Caching:
    """The allocator as it is by default.

    Attributes:
        reserved, allocated: bytes.
        most_reserved, most_allocated: their largest values.
        retries: how often free segments had to be given back first.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.most_reserved = self.most_allocated = 0
        self.retries = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._top = 0

    def allocate(self, nbytes: int) -> Block:
        """Raises OutOfMemoryError."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        block = self._found(size, small) or self._segment(size, small)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        self.allocated -= block.size
        block.free = True
        after, before = block.after, block.before
        if after is not None and after.free:
            self._unlist(after)
            self._merge(block, after)
        if before is not None and before.free:
            self._unlist(before)
            self._merge(before, block)
            block = before
        self._list(block)

    def _found(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, (size, -1))
        return free.pop(at)[2] if at < len(free) else None

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            size = 2 * MIB
        else:
            size = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.retries += 1
            self._give_back()
            if self.reserved + size > self.capacity:
                raise OutOfMemoryError(size)
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._top += size
        return Block(self._top - size, size, small)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < self._worth(block.small):
            return
        piece = Block(block.address + size, rest, block.small)
        piece.before, piece.after = block, block.after
        if piece.after is not None:
            piece.after.before = piece
        block.after, block.size = piece, size
        self._list(piece)

    def _worth(self, small: bool) -> int:
        """The smallest rest that is split off."""
        return _ROUND if small else _SMALL + 1

    def _merge(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _give_back(self) -> None:
        for free in self._free.values():
            for entry in free:
                if entry[2].before is None and entry[2].after is None:
                    self.reserved -= entry[0]
            free[:] = [entry for entry in free if entry[2].before or entry[2].after]

    def _list(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _unlist(self, block: Block) -> None:
        free = self._free[block.small]
        at = bisect.bisect_left(free, (block.size, block.address))
        assert free.pop(at)[2] is block


class Expandable(Caching):
    """The allocator under `expandable_segments:True`: a segment per pool, which grows by pages."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[bool, Block | None] = {True: None, False: None}
        self._mapped = {True: 0, False: 0}

    def _found(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            return None
        # The block at the end counts as large as it could become, so it comes last.
        if free[at][2].after is None and at + 1 < len(free):
            at += 1
        return free.pop(at)[2]

    def _segment(self, size: int, small: bool) -> Block:
        page = 2 * MIB if small else 20 * MIB
        last = self._last[small]
        here = last.size if last is not None and last.free else 0
        more = -(-(size - here) // page) * page
        self.reserved += more
        self.most_reserved = max(self.most_reserved, self.reserved)
        if last is not None and here:
            self._unlist(last)
            last.size += more
        else:
            before, last = last, Block(self._mapped[small], more, small)
            last.before = before
            if before is not None:
                before.after = last
            self._last[small] = last
        self._mapped[small] += more
        return last

    def _split(self, block: Block, size: int) -> None:
        super()._split(block, size)
        if block is self._last[block.small] and block.after is not None:
            self._last[block.small] = block.after

    def _merge(self, block: Block, after: Block) -> None:
        super()._merge(block, after)
        if after is self._last[after.small]:
            self._last[after.small] = block

    def _worth(self, small: bool) -> int:
        return _ROUND


def replay(events: Iterable[tuple[int, int]], allocator: Caching) -> None:
    """Apply `(address, bytes)`, where bytes below zero are released. Raises OutOfMemoryError."""
    blocks: dict[int, Block] = {}
    for address, nbytes in events:
        if nbytes > 0:
            blocks[address] = allocator.allocate(nbytes)
        elif address in blocks:
            allocator.release(blocks.pop(address))


def least(events: list[tuple[int, int]], below: int) -> Caching:
    """The allocator with the smallest capacity that suffices, to 0.25 %."""
    low, high, best = 0, below, None
    while best is None or high - low > below // 400:
        middle = high if best is None else (low + high) // 2
        allocator = Caching(middle)
        try:
            replay(events, allocator)
        except OutOfMemoryError:
            if best is None:
                raise
            low = middle
        else:
            high, best = middle, allocator
    return best
