"""Which of the nodes that have saved something the running backward reaches.

Problem: what a backward does not ask for stays in memory as long as its graph lives (the unused
output of another head that a variable holds), and a plan that expects it to be released lets the
step exceed its limit. Invariant: where it is not sure that a node is passed over, it counts as
reached: one whose number is not known, everything without the compiled core, which alone can ask
autograd, and what was saved after a custom Function began, until the next node. Imports engine.
Rejected: the nodes that can be reached from the first one that asks, which has siblings.
"""

from __future__ import annotations

from bisect import bisect_right

from lowtide import engine


class Reached:
    """The nodes of the backward that runs on this thread, by their numbers."""

    def __init__(self) -> None:
        core = engine.core()
        spans = None if core is None else core.reached()
        self._spans: list[tuple[int, int]] | None = spans

    def asks(self, node: int) -> bool:
        """Whether the node with this number may ask for what was saved for it."""
        if self._spans is None or node < 0:
            return True
        at = bisect_right(self._spans, (node, node)) - 1
        candidates = self._spans[max(at, 0) : at + 2]
        return any(first <= node <= last for first, last in candidates)
