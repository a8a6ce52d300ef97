"""How far backwards went that began after the same forward.

Problem: one forward may get another loss from step to step (an auxiliary one at times, two tasks
in turn), and nothing in the forward shows how much its backward will ask for. Invariant: a plan may
have more requests than a backward that follows it, never knowingly fewer; where both come, the plan
is the one for more. Imports prepared. Rejected: one plan for each depth, as a forward cannot know
which of them it will need.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.running.prepared import Prepared, Signature

_PATIENCE = 50  # steps that ask for less, after which the one that asked for more is forgotten


class Depth:
    """What a budget remembers of its backwards; one for each budget."""

    def __init__(self) -> None:
        self._all = False  # a backward has asked for all that was planned, since it was last asked
        self._more: tuple[tuple[Signature, ...], int] | None = None  # a forward, and its requests
        self._left = 0
        self._fewer = 0  # backwards in a row that have asked for less than planned

    def strayed(self, followed: Prepared, count: int) -> bool:
        """A backward that followed a plan made `count` requests: whether that is more than planned,
        so that nothing shows that it kept its limit."""
        planned = len(followed.graph.events)
        self._all = self._all or count >= planned
        self._fewer = 0 if count >= planned else self._fewer + 1
        if count > planned:
            self._more, self._left = (followed.signatures, count), _PATIENCE
        return count > planned

    def only_fewer(self) -> bool:
        """Whether so many backwards in a row have asked for less than planned that one which asks
        for all is not expected any more: their own plan may keep more. If so, the count begins
        anew."""
        if self._fewer < _PATIENCE:
            return False
        self._fewer = 0
        return True

    def shallower(self, seen: Sequence[Signature], count: int, followed: Prepared | None) -> bool:
        """Whether a watched step, whose backward made `count` requests, is one of those that ask
        for less than others of the same forward do. Its own plan would be too small for them."""
        if followed is not None:
            if count >= len(followed.graph.events):
                self._all, self._fewer = True, 0
                return False
            others, self._all = self._all, False
            return others
        if self._more is None or count >= self._more[1] or tuple(seen) != self._more[0]:
            return False
        self._left -= 1
        if self._left <= 0:
            self._more = None
        return True
