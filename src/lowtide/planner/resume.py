"""A plan for a backward that begins with part of the forward already let go.

Problem: a step that no plan covers reaches its backward with whatever was held; from there on the
order is known, and the rest can be planned. Invariant: what is not held is never held from the
forward on; the forward, which is over, weighs nothing. Imports the other modules of
`lowtide.planner`. Rejected: `solve`, whose starting points hold what is gone.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lowtide.planner.descent import descend
from lowtide.planner.graph import Graph
from lowtide.planner.repair import Candidate, Problem, grow, shrink
from lowtide.planner.search import WORK
from lowtide.planner.simulate import Simulator

_DEAR = 3.0  # times the forward that a backward may replay without a second thought


def forward_over(graph: Graph, held: Container[int]) -> Graph:
    """The same step where its forward cannot be changed any more: it weighs nothing.

    What somebody else has in memory and the tape has let go of is there, and of no use.
    """
    ops = tuple(replace(op, other=0, peak_other=0) for op in graph.ops)
    values = tuple(
        replace(node, pinned=False) if node.pinned and value not in held else node
        for value, node in enumerate(graph.values)
    )
    return Graph(values, ops, graph.events)  # and what followed it


def from_held(graph: Graph, held: set[int], limit: int, *, search: bool = True) -> Candidate:
    """The cheapest plan found that holds no more than `held`, at most `limit` in backward.

    If none is found, the one of the lowest peak met. Without `search` only the estimates are
    followed, not every move tried.
    """
    gone = frozenset(range(len(graph.values))) - held
    problem = Problem(Simulator(graph), gone)
    found = shrink(problem, problem.start(held), limit, rounds=80)
    if search and found.result.peak > limit:
        work = max(WORK // (len(graph.ops) + len(graph.events) + 1), 24)
        found = descend(problem, found, limit, work)
    return grow(problem, found, limit)


def with_margin(
    graph: Graph, held: set[int], limit: int, margin: float, *, search: bool
) -> Candidate:
    """The same with a share of the limit left free; less of it where that takes much time."""
    found = from_held(graph, held, int(limit * (1 - margin)), search=search)
    if found.result.seconds <= _DEAR * sum(Simulator(graph).cost):
        return found
    closer = from_held(graph, held, int(limit * (1 - margin / 3)), search=search)
    return min(found, closer, key=lambda candidate: candidate.key(limit))
