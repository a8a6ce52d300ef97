"""When to measure a step though nothing new is expected of it.

Problem: what was measured once may change unnoticed (a kernel that takes other memory on other
shapes of as many bytes, a slower clock), but measuring a step of many small operations takes ten
times as long as running it. Invariant: a step at which nothing new was seen puts off the next
check-up, up to a limit; one that shows something new brings it near again; steps that follow the
plan for a larger one put off nothing, as each may be another. What is due depends on what was
measured, not on how long it took. Imports margins and prepared. Rejected: every fiftieth step,
which doubled the cost of the engine on small operations, and never met every other step of a loop.
"""

from __future__ import annotations

from lowtide.memory import margins
from lowtide.running.prepared import Prepared

_SOON = 50  # steps
_SELDOM = 811  # a prime, as loops have rhythms


class CheckUps:
    """Which steps of a budget are measured because none was for long."""

    def __init__(self) -> None:
        self._next = 0
        self._apart = _SOON

    def due(self, step: int) -> bool:
        """Whether this step is to be measured; asked once for each."""
        if step < self._next:
            return False
        self._next = step + self._apart
        return True

    def seen(self, *, new: bool) -> None:
        """Whether the last one has shown anything new; if not, the next is about twice as far."""
        apart = _SOON if new else min(2 * self._apart + 1, _SELDOM)
        self._next += apart - self._apart
        self._apart = apart


def as_planned(followed: Prepared | None, peak: int | None) -> bool:
    """Whether a measured step that followed this plan took the memory that was predicted."""
    if followed is None or peak is None or not followed.measured:
        return False
    return abs(peak - followed.peak) <= margins.HAIR * followed.peak
