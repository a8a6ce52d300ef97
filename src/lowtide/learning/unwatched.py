"""Which steps nobody watches, though no plan covers them.

Problem: where hardly any step comes again, watching each of them takes many times the step's own
time, and teaches nothing. Invariant: a step is left alone only if measured ones took at most half
of the limit, and it is watched as soon as it may take more than all of it; whether it is decides
about time, never about what is kept or refused. Imports settling, decide, engine. Rejected:
leaving the first steps alone, from which all that is known of a loop is learned.
"""

from __future__ import annotations

from typing import Any

from lowtide import engine
from lowtide.learning.settling import Settling
from lowtide.running.decide import StepDecisions
from lowtide.running.prepared import Prepared

_ROOM = 2  # times the largest measured step must fit


class Unwatched(Settling):
    """The part of `lowtide.loop.Loop` that leaves steps alone."""

    @property
    def far_below(self) -> bool:
        """Whether steps are far below the limit, and one that leaves its plan need not be watched
        from its beginning on."""
        if engine.core() is None or self._ranks is not None or self.behind.nbytes:
            return False
        return 0 < _ROOM * self.allowance.largest <= self.allowance.target(0, 0)

    @property
    def may_go_alone(self) -> bool:
        """Whether a step that no plan covers need not be watched."""
        return self._effort.leaves_alone() and self.far_below

    def headroom(self, recorder: Any, left: Prepared | None, *, teaches: bool) -> Any:
        """What adds up the most that a step may take, or None if it has to be watched. `left`: the
        plan that it has followed so far. `teaches`: it may get a plan."""
        alone = self.may_go_alone if teaches else self.far_below
        if not alone or not isinstance(recorder, engine.core().State):
            return None
        if left is not None and not left.keeps_all:
            return None
        start = 0 if left is None else left.unrecorded_peak
        allowance = self.allowance
        return engine.core().Headroom(allowance.target(0, 0), allowance.outside, start)

    def _alone_to_the_end(self, decisions: StepDecisions) -> bool:
        """The backward of such a step begins: whether it needs no plan."""
        headroom = decisions.headroom
        if self.behind.nbytes or headroom.at_most(decisions.live[0]) > headroom.limit:
            decisions.watch_from_here()
            return False
        decisions.settle_alone()
        return True

    def _learn_alone(self, decisions: StepDecisions) -> None:
        """A step is over: whether those like it come again is all that is learned if it was left
        alone."""
        if decisions.headroom is None and not decisions.estimated:
            return
        decisions.end_alone()
        if not decisions.partial:
            self._effort.went_alone(decisions.seen, in_vain=decisions.estimated)
