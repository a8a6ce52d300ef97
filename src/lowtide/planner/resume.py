"""A plan for a backward that begins after part of the forward was already dropped.

Problem: a step without a plan reaches its backward with whatever was held; from there on the order
of unpacks is known, and the rest can be planned. Invariant: a plan never holds from the forward on
what is not held now; the forward is over, so its memory does not count. Imports the other modules
of `lowtide.planner`. Rejected: `solve`, whose starting points hold values that are already dropped.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lowtide.planner.descent import descend
from lowtide.planner.graph import Graph, OpNode
from lowtide.planner.repair import Candidate, Problem, grow, shrink
from lowtide.planner.search import WORK
from lowtide.planner.simulate import REPLAY_OVERHEAD, Simulator

_DEAR = 3.0  # a plan that replays more than this many forwards is retried with a smaller margin


def forward_over(graph: Graph, held: Container[int]) -> Graph:
    """A step whose forward is over and cannot be changed: its memory does not count.

    A pinned value that the tape has already dropped is no longer pinned: its memory is still in
    use, but a replay cannot read it.
    """
    over = graph.over
    dropped = [v for v, node in enumerate(over.values) if node.pinned and v not in held]
    if not dropped:
        return over
    values = list(over.values)
    for value in dropped:
        values[value] = replace(values[value], pinned=False)
    return replace(over, values=tuple(values))


def settled_in(graph: Graph, settled: Container[int]) -> Graph:
    """A step in which nothing makes these values again: an earlier backward of it has cut their
    links to what they were made from. An operation whose other results may be made again is left
    as it is."""

    def over(op: OpNode) -> bool:
        wanted = [v for v in op.outputs if graph.release[v] >= 0 or graph.consumers[v]]
        return bool(wanted) and all(value in settled for value in wanted)

    ops = tuple([replace(op, replayable=False) if over(op) else op for op in graph.ops])
    return graph if ops == graph.ops else replace(graph, ops=ops)


def from_held(graph: Graph, held: set[int], limit: int, *, search: bool = True) -> Candidate:
    """The cheapest plan found that holds nothing but `held` and stays within `limit` in backward.

    If none fits, the one with the lowest peak found. Without `search`, moves are chosen by
    estimates only, not simulated one by one.
    """
    held = held.union(graph.owned, graph.cut)
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
    """As `from_held`, with a share of the limit left free, the `margin`.

    A smaller share is left if that replays too much, or if not even the limit is kept: a search for
    a lower peak may end at a moment that one for a higher peak passes. The reverse happens too, so
    before a step is refused, the lowest peak is looked for.
    """
    found = from_held(graph, held, int(limit * (1 - margin)), search=search)
    forward = sum(op.seconds + REPLAY_OVERHEAD for op in graph.ops)
    dear = found.result.seconds > _DEAR * forward
    if found.result.peak <= limit and not dear:
        return found
    for goal in (int(limit * (1 - margin / 3)), limit, 0):
        closer = from_held(graph, held, goal, search=search)
        found = min(found, closer, key=lambda candidate: candidate.key(limit))
        if found.result.peak <= limit:
            break
    return found
