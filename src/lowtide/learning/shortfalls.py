"""What steps take that their graphs do not tell.

Problem: a plan that keeps its limit as far as the graph tells may take more when it runs: a module
that shards itself, or code that looks at what is in memory, allocates and frees at other moments
under another plan. Invariant: a step that was measured above its limit under its own plan gets room
for what the graph does not tell of that plan, as long as some plan has that room; none is refused
for it. Imports learned and newest. Rejected: a wider margin for all steps, nearly all of which take
what was predicted to the byte.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.learning.learned import Learned
from lowtide.learning.newest import Newest

_MOST = 64  # steps


class Shortfalls:
    """For each step: the bytes that are missing in its graph."""

    def __init__(self) -> None:
        self._missing = Newest[tuple[object, ...], int](_MOST)

    def note(self, learned: Learned, peak: int) -> None:
        """A step that followed its own plan was measured above its limit."""
        missing = peak - (learned.peak_as_it_ran or peak)
        if missing > 0:
            before = self._missing.get(learned.step, 0)
            self._missing.put(learned.step, max(missing, before))

    def with_room(self, learned: Learned) -> Learned:
        """The learned step, with room for what is missing in its graph."""
        missing = self._missing.get(learned.step, 0) if self._missing else 0
        return replace(learned, missing=missing) if missing else learned
