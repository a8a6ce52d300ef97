"""Bytes along the step: a list with fast addition over a range and maximum over a range.

Problem: whether there is room for a value depends on the maximum over most of the step, and is
asked for thousands of values: with ten thousand operations this alone took seconds. Invariant: the
same answers as a plain list. Imports: the standard library. Rejected: a segment tree, which is
slower below a million entries.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 128


class Heights:
    """A list of numbers in blocks; the maximum of each block is known."""

    def __init__(self, heights: Sequence[int]) -> None:
        self.heights = list(heights)
        self.raised = [0] * (len(heights) // BLOCK + 1)  # added to every number of a block
        self.top = [
            max(heights[i : i + BLOCK], default=0) for i in range(0, len(heights) + 1, BLOCK)
        ]

    def highest(self, begin: int, stop: int) -> int:
        """The maximum over [`begin`, `stop`); 0 if that is empty."""
        stop = min(stop, len(self.heights))
        first, last = begin // BLOCK, (stop - 1) // BLOCK
        if begin >= stop:
            return 0
        if first == last:
            return max(self.heights[begin:stop]) + self.raised[first]
        found = max(
            max(self.heights[begin : (first + 1) * BLOCK]) + self.raised[first],
            max(self.heights[last * BLOCK : stop]) + self.raised[last],
        )
        return max(found, max(self.top[first + 1 : last], default=0))

    def add(self, begin: int, stop: int, size: int) -> None:
        """Add `size` to everything in [`begin`, `stop`)."""
        stop = min(stop, len(self.heights))
        while begin < stop:
            block = begin // BLOCK
            end = min((block + 1) * BLOCK, stop)
            if end - begin == BLOCK:
                self.raised[block] += size
                self.top[block] += size
            else:
                part = [height + size for height in self.heights[begin:end]]
                self.heights[begin:end] = part
                self.top[block] = max(self.top[block], max(part) + self.raised[block])
            begin = end
