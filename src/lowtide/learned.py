"""What a step that was watched has shown, and the plan that follows from it.

Problem: the next step is to be planned from the one before, which may leave no plan the margin that
a plan should have. Invariant: a plan that was measured to keep its limit is never refused for
another; what comes out depends on the graph, the limit and what ran, so that ranks which agree on
these agree on the plan. Imports margins, planner, prepared. Rejected: refusing whatever does not
leave the whole margin, when it would have run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lowtide import margins
from lowtide.planner import Graph, Retention, Simulator, Solution, minimum, plain_peak, solve
from lowtide.planner.polish import Polish
from lowtide.prepared import Prepared
from lowtide.seen import Seen


@dataclass(frozen=True)
class Learned:
    """A step that was watched.

    Attributes:
        graph: the step.
        seen: the same, for the part that a later step may have in common.
        ran: the retention that its backward followed.
        measured: whether its memory was measured, or modelled from sizes.
        lessons: how many measured steps like it there were, itself included.
    """

    graph: Graph
    seen: Seen
    ran: list[int] | None
    measured: bool
    lessons: int

    @cached_property
    def plain_peak(self) -> int:
        """With nothing recomputed."""
        return plain_peak(self.graph)

    @cached_property
    def outside(self) -> float:
        """What a loss takes that is not among the operations, in parts of what the forward saves
        for backward."""
        return self.graph.turn / self.graph.saved if self.graph.saved else 0.0

    def solve(self, limit: int, polish: Polish | None = None) -> tuple[Retention, int]:
        """A plan for the next step, and its peak; that may be above the limit."""
        share = margins.MEASURED if self.measured else margins.MODELLED
        margin = 0 if self.measured and self.plain_peak <= limit else int(share * limit)
        solution = solve(self.graph, limit, margin=margin, polish_with=polish)
        if solution.status == "fits":
            return solution.plan, solution.peak
        return self._nearest(limit, solution)

    def _nearest(self, limit: int, closest: Solution) -> tuple[Retention, int]:
        """Where nothing leaves the margin free: the cheapest plan known that leaves a hair, else
        the one of the lowest peak. Known are what a search came closest with and the plan that
        ran: what was measured to keep the limit is never refused."""
        graph, ran = self.graph, self.ran
        found = [(closest.peak, closest.seconds, closest.plan)]
        if ran is not None and len(ran) == len(graph.values):
            result = Simulator(graph).run(ran)
            found.append((result.peak, result.seconds, Retention(tuple(ran), graph.fingerprint)))
        if all(peak > limit for peak, _, _ in found):
            least = minimum(graph)
            found.append((least.peak, least.seconds, least.plan))
        room = int(limit * (1 - margins.HAIR))
        peak, _, plan = min(found, key=lambda known: (max(known[0], room), known[1]))
        return plan, peak

    def prepared(self, plan: Retention, peak: int) -> Prepared:
        """The plan, for steps that follow it."""
        return Prepared.of(plan, self.graph, peak, self.seen, self.measured, self.lessons)
