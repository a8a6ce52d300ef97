"""What is known of the steps under one limit.

Problem: choosing a plan, learning one, planning the rest of a step and leaving steps alone are
separate jobs, and each changes what the others go by. Invariant: what several of them use is here
once, and what only one uses is with that one; nothing is decided here. Imports allowance, beside,
effort, idling, known_plans, ranks, refusals and behind. Rejected: one class that does all of it,
whose methods may each change anything.
"""

from __future__ import annotations

from lowtide.learning import idling
from lowtide.learning.allowance import Allowance
from lowtide.learning.beside import Beside
from lowtide.learning.effort import Effort
from lowtide.learning.known_plans import KnownPlans
from lowtide.learning.ranks import Ranks
from lowtide.learning.refusals import Refusals
from lowtide.running.behind import Behind


class Knowledge:
    """What the parts of a `lowtide.loop.Loop` share.

    Attributes:
        ranks: the process group whose ranks plan alike, if there is one.
        allowance: what a step may take.
        plans: those that steps may follow.
        refused: steps that no plan brings under the limit.
        effort: which steps are worth measuring and planning.
        beside: searches for plans on a thread of its own.
        behind: earlier steps through whose graphs a backward may go on.
        place: of the running step among those of the context.
        compared: the part of the running step that was compared and not recorded.
    """

    def __init__(self, limit: int | float, ranks: Ranks | None) -> None:
        self.ranks = ranks
        self.allowance = Allowance(limit)
        self.plans = KnownPlans()
        self.refused = Refusals()
        self.effort = Effort()
        self.beside = Beside()
        self.behind = Behind()
        self.place = 0
        self.compared = idling.NOTHING
