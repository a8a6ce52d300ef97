"""Which of the nodes that have saved something the running backward reaches.

Problem: what a backward does not ask for stays in memory as long as its graph lives (the unused
output of another head that a variable holds), and a plan that expects it to be released lets the
step exceed its limit. Invariant: where it is not sure that a node is passed over, it counts as
reached: one of which nothing is known, everything without the compiled core, which alone can ask
autograd, and what was saved after a custom Function began, until the next node. Imports `_compat`.
Rejected: the nodes that can be reached from the first one that asks, which has
siblings.
"""

from __future__ import annotations

from bisect import bisect_left

from lowtide import _compat

Numbers = tuple[int, int]
"""The first and the last number of the nodes that were made for a call; none: nothing is known."""

UNKNOWN: Numbers = (0, -1)


class Nodes:
    """For which of autograd's nodes something is saved.

    A node is made before its operation runs and saves tensors before and after that. Others may be
    made for the same call: clones of what it overwrites, views whose base was written to, and once
    it has run, those of a write to a view. The latter are there before the result is saved; what is
    made after that is for the next call.
    """

    def __init__(self) -> None:
        self._newest = _compat.newest_node()
        self._last = UNKNOWN
        self._before = self._saved = self._newest  # none of the next call's; when one saved last

    def ran(self) -> None:
        """An operation has run. It may be a clone of what another one is about to overwrite, which
        has saved something before and saves the clone after this."""
        newest = _compat.newest_node()
        self._last = self._before + 1, newest
        self._newest = self._before = self._saved = newest

    def saving(self) -> Numbers:
        """Something is saved now: for the last operation, or for one that is about to run."""
        newest = _compat.newest_node()
        return self._last if newest == self._newest else self._since(newest)

    def _since(self, newest: int) -> Numbers:
        if newest > self._saved:
            self._before, self._saved = self._saved, newest
        return self._before + 1, newest


class Reached:
    """The nodes of the running backward, by their numbers."""

    def __init__(self, spans: list[Numbers] | None) -> None:
        self._spans = spans  # see `compiled/reached.h`; None: nobody knows

    def asks(self, nodes: Numbers) -> bool:
        """Whether one of these nodes may ask for what was saved for it."""
        first, last = nodes
        if self._spans is None or first > last:
            return True
        at = bisect_left(self._spans, first, key=lambda span: span[1])
        return at < len(self._spans) and self._spans[at][0] <= last
