"""What a step that was watched has shown, and the plan that follows from it.

Problem: the next step is to be planned from the one before, which may leave no plan the margin that
a plan should have. Invariant: a plan that was measured to keep its limit is never refused for
another; what comes out depends on the graph, the limit and what ran, so that ranks which agree on
these agree on the plan. Imports margins, effort, planner, prepared. Rejected: refusing whatever
does not leave the whole margin, when it would have run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from lowtide.learning.effort import LESSONS
from lowtide.memory import margins
from lowtide.observing.seen import Seen
from lowtide.planner import Graph, Retention, Simulator, Solution, minimum, plain_peak, solve
from lowtide.planner.polish import Polish
from lowtide.running.prepared import Prepared, Signature

LARGER = 1.15  # a step that others outgrow is planned for so much more as well
MOST_GROWN = 2.0  # beyond that, what does not grow with the rest says too little


@dataclass(frozen=True)
class Learned:
    """A step that was watched.

    Attributes:
        graph: the step.
        seen: the same, for the part that a later step may have in common.
        ran: the retention that its backward followed.
        measured: whether its memory was measured, or modelled from sizes.
        lessons: how many measured steps like it there were, itself included.
        grown: whether it is a larger one than was watched, see `larger`.
    """

    graph: Graph
    seen: Seen
    ran: list[int] | None
    measured: bool
    lessons: int
    grown: bool = False

    @staticmethod
    def of(prepared: Prepared) -> Learned:
        """The step that a plan was made from."""
        return Learned(
            prepared.graph,
            prepared.seen,
            None,
            prepared.measured,
            prepared.lessons,
            prepared.grown,
        )

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

    def search(self, limit: int, polish: Polish | None = None) -> Prepared | None:
        """A plan for steps like this one; None: it would not fit."""
        plan, peak = self.solve(limit, polish)
        return self.prepared(plan, peak) if peak <= limit else None

    def larger(self, ratio: float = 1.0) -> Learned:
        """The same operations on more bytes, for steps that are a little larger than one that makes
        `ratio` times the bytes of this one.

        All of its memory is taken to grow alike. What does not, gradients of parameters say, is
        less than that then; the planned sizes are a bound that each operation is held to.
        """
        graph, grown = self.graph, partial(_grown, LARGER * ratio)
        values = tuple([replace(node, nbytes=grown(node.nbytes)) for node in graph.values])
        ops = tuple(
            [
                replace(
                    op,
                    workspace=grown(op.workspace),
                    other=grown(op.other),
                    peak_other=grown(op.peak_other),
                )
                for op in graph.ops
            ]
        )
        events = tuple(
            [
                replace(event, other=grown(event.other), peak_other=grown(event.peak_other))
                for event in graph.events
            ]
        )
        logs = tuple(
            [
                replace(log, sizes=tuple(map(grown, log.sizes)), wanted=grown(log.wanted))
                for log in self.seen.ops
            ]
        )
        return replace(
            self,
            graph=Graph(values, ops, events, grown(graph.turn)),
            seen=replace(self.seen, ops=logs),
            ran=None,
            lessons=LESSONS,
            grown=True,
        )

    def of_sizes(self, seen: Sequence[Signature]) -> Learned:
        """The same operations on fewer bytes, those that each makes: a bound on what such a step
        takes, as all else is left as it is until it is measured."""
        values, logs = list(self.graph.values), []
        for log, (_, made, _, wanted) in zip(self.seen.ops, seen, strict=True):
            for number, nbytes in zip(log.outputs, made, strict=True):
                values[number] = replace(values[number], nbytes=nbytes)
            logs.append(replace(log, sizes=made, wanted=wanted))
        return replace(
            self,
            graph=replace(self.graph, values=tuple(values)),
            seen=replace(self.seen, ops=tuple(logs)),
            ran=None,
            lessons=LESSONS,
        )

    def prepared(self, plan: Retention, peak: int) -> Prepared:
        """The plan, for steps that follow it."""
        return Prepared.of(
            plan, self.graph, peak, self.seen, self.measured, self.lessons, grown=self.grown
        )


def _grown(factor: float, nbytes: int) -> int:
    return math.ceil(factor * nbytes)
