"""Which steps nobody watches, though no plan covers them.

Problem: where hardly any step comes again, watching each of them takes many times the step's own
time, and teaches nothing. Invariant: a step is left alone only if a quarter more than the largest
measured one would fit, and it is watched as soon as it may take more than the limit; whether it is
decides about time, never about what is kept or refused. Imports knowledge, decide, engine.
Rejected: leaving the first steps alone, from which all that is known of a loop is learned.
"""

from __future__ import annotations

from typing import Any

from lowtide import engine
from lowtide.learning.knowledge import Knowledge
from lowtide.running.decide import StepDecisions
from lowtide.running.prepared import Prepared

_ROOM = 1.25  # times the largest measured step must fit
_FAR = 2  # from so many times on, it fits however far a plan is off


class Unwatched:
    """The part of a budget that leaves steps alone."""

    def __init__(self, knows: Knowledge) -> None:
        self._knows, self._allowance, self._effort = knows, knows.allowance, knows.effort

    @property
    def far_below(self) -> bool:
        """Whether steps are far below the limit."""
        return self._fits(_FAR)

    @property
    def may_leave(self) -> bool:
        """Whether a step that leaves its plan need not be watched from its beginning on."""
        return self._fits(_ROOM)

    def _fits(self, times: float) -> bool:
        """Whether so many times the largest measured step would fit, as far as a step can be left
        alone."""
        if engine.core() is None or self._knows.ranks is not None or self._knows.behind.nbytes:
            return False
        return 0 < times * self._allowance.largest <= self._allowance.target(0, 0)

    @property
    def may_go_alone(self) -> bool:
        """Whether a step that no plan covers need not be watched."""
        return self._effort.leaves_alone() and self.may_leave

    def headroom(self, recorder: Any, left: Prepared | None, index: int, *, teaches: bool) -> Any:
        """What adds up the most that a step may take, or None if it has to be watched. `left`: the
        plan that it has followed up to an operation. `teaches`: it may get a plan."""
        alone = self.may_go_alone if teaches else self.may_leave
        if not alone or not isinstance(recorder, engine.core().State):
            return None
        if left is not None and not left.keeps_all:
            return None
        start = 0 if left is None else left.backward_before(index)
        leaves = [] if left is None else left.seen.leaves_there()
        target, outside = self._allowance.target(0, 0), self._allowance.outside
        return engine.core().Headroom(target, outside, start, leaves)

    def to_the_end(self, decisions: StepDecisions) -> bool:
        """The backward of such a step begins: whether it needs no plan."""
        headroom = decisions.headroom
        if self._knows.behind.nbytes or headroom.at_most(decisions.live[0]) > headroom.limit:
            decisions.watch_from_here()
            return False
        decisions.settle_alone()
        return True

    def learn(self, decisions: StepDecisions) -> None:
        """A step is over: whether those like it come again is all that is learned if it was left
        alone."""
        if decisions.headroom is None and not decisions.estimated:
            return
        decisions.end_alone()
        if not decisions.partial:
            self._effort.went_alone(decisions.seen, in_vain=decisions.estimated)
