"""What was learned from a watched step, and the plan that follows from it.

Problem: the next step is planned from the one before, and there may be no plan that leaves the
margin a plan should leave. Invariant: a plan that was measured to keep its limit is never given up
for another; the result depends only on the graph, the limit and what ran, so ranks that agree on
these agree on the plan. Imports margins, effort, ranks, planner, prepared. Rejected: refusing
whatever does not leave the whole margin, although it would have run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from lowtide.learning.effort import LESSONS
from lowtide.learning.ranks import Known
from lowtide.learning.varying import LARGER, Sizes, sizes_of, total
from lowtide.memory import margins
from lowtide.observing.logs import OpLog
from lowtide.observing.seen import Seen
from lowtide.planner import (
    HOLD,
    Graph,
    Retention,
    Simulation,
    Simulator,
    Solution,
    minimum,
    plain_peak,
    solve,
)
from lowtide.planner.polish import Polish
from lowtide.running.prepared import Prepared, Signature, plain_seconds, signatures_of

_NOTABLE = 0.01  # a share of the step's time
MOST_GROWN = 2.0  # a larger step than this differs too much, as not all memory grows alike


@dataclass(frozen=True)
class Learned:
    """A step that was watched.

    Attributes:
        graph: the step.
        seen: the same, for a later step that has its first operations in common.
        ran: the decisions that its backward followed.
        measured: whether its memory was measured, or modelled from sizes.
        lessons: how many measured steps like it there were, itself included.
        grown: whether it is a larger step than the watched one, see `larger`.
        apart: whether that is for all steps that vary each in its own way, see `bounded`.
        own: if the graph has room for what other steps took, see `Partings`: that without it.
        missing: bytes that it takes more than the graph tells, see `Shortfalls`.
    """

    graph: Graph
    seen: Seen
    ran: list[int] | None
    measured: bool
    lessons: int
    grown: bool = False
    apart: bool = False
    own: Graph | None = None
    missing: int = 0

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
            prepared.apart,
        )

    @cached_property
    def step(self) -> tuple[str, int, int, bool]:
        """What tells it from other steps, in the same way in each process: its operations, its
        place in the context, and the gradients that its backward allocates."""
        seen = self.seen
        gradients = sum(nbytes for _, nbytes in seen.parameters.values())
        return self.graph.fingerprint, seen.place, gradients, seen.retains

    @property
    def known(self) -> Known:
        """What other ranks are told."""
        return Known(self.graph, self.measured, self.lessons, self.seen.before)

    def as_known(self, known: Known) -> Learned:
        """This step, as all ranks know it."""
        return replace(
            self,
            graph=known.graph,
            measured=known.measured,
            lessons=known.lessons,
            seen=replace(self.seen, before=known.before),
        )

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        return signatures_of(self.seen.ops)

    def alone(self) -> Learned:
        """This step, without room for what other steps took, or for what is missing."""
        if self.own is None and not self.missing:
            return self
        return replace(self, graph=self.own or self.graph, own=None, missing=0)

    @cached_property
    def plain_peak(self) -> int:
        """The peak with nothing recomputed."""
        return plain_peak(self.graph if self.own is None else self.own)

    @cached_property
    def outside(self) -> float:
        """What a loss outside the context takes, as a fraction of the bytes that the forward saves
        for backward."""
        return self.graph.turn / self.graph.saved if self.graph.saved else 0.0

    def solve(self, limit: int, polish: Polish | None = None) -> tuple[Retention, int]:
        """A plan for the next step, and its peak, which may be above the limit."""
        limit -= self.missing
        plan, peak = self._solve(max(limit, 0), polish)
        return plan, peak + self.missing

    def _solve(self, limit: int, polish: Polish | None) -> tuple[Retention, int]:
        share = margins.of_step(self.measured)
        margin = 0 if self.measured and self.plain_peak <= limit else int(share * limit)
        solution = solve(self.graph, limit, margin=margin, polish_with=polish)
        if solution.status == "fits":
            return solution.plan, solution.peak
        return self._nearest(limit, solution)

    def _nearest(self, limit: int, closest: Solution) -> tuple[Retention, int]:
        """If no plan leaves the margin free: the cheapest known plan that leaves `margins.HAIR`,
        else the one with the lowest peak. Known are the closest that the search came, and the plan
        that ran: what was measured to keep the limit is never refused."""
        graph = self.graph
        found = [(closest.peak, closest.seconds, closest.plan)]
        if (ran := self._as_it_ran) is not None:
            result, plan = ran
            found.append((result.peak, result.seconds, plan))
        if all(peak > limit for peak, _, _ in found):
            least = minimum(graph)
            found.append((least.peak, least.seconds, least.plan))
        room = int(limit * (1 - margins.HAIR))
        peak, _, plan = min(found, key=lambda known: (max(known[0], room), known[1]))
        return plan, peak

    @cached_property
    def _as_it_ran(self) -> tuple[Simulation, Retention] | None:
        """What the plan that the step followed comes to, as the step is known now."""
        graph, ran = self.graph, self.ran
        if ran is None or len(ran) != graph.recorded:
            return None
        cut = frozenset(graph.cut)  # held whatever the plan said, if FSDP2 freed more than before
        chosen = [HOLD if value in cut else choice for value, choice in enumerate(ran)]
        retain = (*chosen, *(HOLD,) * len(graph.owned))
        return Simulator(graph).run(retain), Retention(retain)

    @property
    def peak_as_it_ran(self) -> int | None:
        """What the graph tells that the plan which the step followed takes; None: it followed none
        that is known."""
        return None if self._as_it_ran is None else self._as_it_ran[0].peak

    def search(self, limit: int, polish: Polish | None = None) -> Prepared | None:
        """A plan for steps like this one; None if it would not fit."""
        plan, peak = self.solve(limit, polish)
        return self.prepared(plan, peak) if peak <= limit else None

    def faster(self, limit: int, polish: Polish | None = None) -> Prepared | None:
        """A plan for steps like this one; None if none would fit, or if it saves less than times
        vary from step to step: every new plan is measured once, which costs more."""
        found, ran = self.search(limit, polish), self._as_it_ran
        if found is None or ran is None or ran[0].peak > limit - self.missing:
            return found
        saved = ran[0].seconds - Simulator(self.graph).run(found.plan.retain).seconds
        return found if saved > _NOTABLE * self.seconds else None

    @property
    def seconds(self) -> float:
        """About how long the step takes, with nothing recomputed."""
        return plain_seconds(self.graph)

    def larger(self, ratio: float = 1.0) -> Learned:
        """A step of these operations on more bytes: `LARGER` times those of one that makes `ratio`
        times the bytes of this one.

        All memory is taken to grow alike. What does not grow (gradients of parameters) will then
        take less; the planned sizes are bounds that each operation is checked against.
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
                replace(
                    event,
                    other=grown(event.other),
                    peak_other=grown(event.peak_other),
                    after=grown(event.after),
                )
                for event in graph.events
            ]
        )
        logs = [
            replace(log, sizes=tuple(map(grown, log.sizes)), wanted=grown(log.wanted))
            for log in self.seen.ops
        ]
        return self._grown_to(Graph(values, ops, events, grown(graph.turn)), logs)

    def bounded(self, sizes: Sizes) -> Learned | None:
        """A step of these operations that makes the most bytes that steps like it may make in each,
        where every one varies in its own way; None if that is far too much.

        Other memory is taken to grow as all sizes do together. A step that makes the most in one
        operation makes that much more there than the others, and as much of its gradient.
        """
        now = sizes_of(self.signatures)
        growth = max(1.0, total(sizes) / max(total(now), 1))
        if growth > MOST_GROWN:
            return None
        pairs = [(sum(most), sum(own)) for most, own in zip(sizes, now, strict=True)]
        more = math.ceil(2 * max([0.0, *(most - growth * own for most, own in pairs)]))
        rates = [max(growth, most / own if own else growth) for most, own in pairs]

        graph, grown = self.graph, partial(_grown, growth)
        most = [grown(node.nbytes) for node in graph.values]
        for log, made in zip(self.seen.ops, sizes, strict=True):
            for number, nbytes in zip(log.outputs, made[:-1], strict=True):
                most[number] = nbytes
        values = [replace(node, nbytes=size) for node, size in zip(graph.values, most, strict=True)]
        ops = [
            replace(
                op,
                workspace=_grown(rate, op.workspace),
                other=grown(op.other),
                peak_other=max(
                    grown(op.peak_other), grown(op.other) + _grown(rate, op.peak_other - op.other)
                ),
            )
            for op, rate in zip(graph.ops, rates, strict=True)
        ]
        events = [
            replace(
                event,
                other=grown(event.other) + more,
                peak_other=grown(event.peak_other) + more,
                after=event.after and grown(event.after) + more,
            )
            for event in graph.events
        ]
        bounds = Graph(tuple(values), tuple(ops), tuple(events), grown(graph.turn))
        return replace(self._grown_to(bounds, self.seen.ops)._of_signatures(sizes), apart=True)

    def _grown_to(self, graph: Graph, logs: Sequence[OpLog]) -> Learned:
        return replace(
            self,
            graph=graph,
            seen=replace(self.seen, ops=tuple(logs)),
            ran=None,
            lessons=LESSONS,
            grown=True,
            own=None,
        )

    def of_sizes(self, sizes: Sizes) -> Learned:
        """A step of these operations that makes these fewer bytes: a bound on what it takes, as all
        other memory stays that of this step until it is measured."""
        values = list(self.graph.values)
        for log, made in zip(self.seen.ops, sizes, strict=True):
            for number, nbytes in zip(log.outputs, made[:-1], strict=True):
                values[number] = replace(values[number], nbytes=nbytes)
        found = replace(self, graph=replace(self.graph, values=tuple(values)), ran=None)
        return replace(found._of_signatures(sizes), lessons=LESSONS)

    def _of_signatures(self, sizes: Sizes) -> Learned:
        logs = [
            replace(log, sizes=made[:-1], wanted=made[-1])
            for log, made in zip(self.seen.ops, sizes, strict=True)
        ]
        return replace(self, seen=replace(self.seen, ops=tuple(logs)))

    def in_part(self) -> Learned:
        """This step, if its backward may ask for a part only of what it asks for now: what it
        passes over stays in memory until the step is over."""
        return replace(self, graph=self.graph.retained(), ran=None)

    def prepared(self, plan: Retention, peak: int) -> Prepared:
        """The plan, for steps that follow it."""
        return Prepared.of(
            plan, self.graph, peak, self.seen, self.measured, self.lessons,
            grown=self.grown, apart=self.apart,
        )  # fmt: skip


def _grown(factor: float, nbytes: int) -> int:
    return math.ceil(factor * nbytes)
