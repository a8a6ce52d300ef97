"""Every plan of a tiny graph: the reference for the solvers.

Tries every combination in which a value is retained no later than at its own last event, which is
more than the solvers propose: they wait no longer than for the first, unless the node that asks
there is known to be over before the next (`Graph.latest`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from graphs import random_graph

from lowtide.planner import keep_all
from lowtide.planner.graph import Graph
from lowtide.planner.repair import Candidate, Problem
from lowtide.planner.retention import HOLD, NEVER
from lowtide.planner.simulate import Simulator

MOST = 100_000


def choices(problem: Problem, value: int) -> tuple[int, ...]:
    """The decisions for one value that can make a difference."""
    sim = problem.sim
    if problem.fixed[value]:
        return (HOLD,)
    if sim.release[value] < 0:
        if value in problem.gone or not sim.graph.consumers[value]:
            return (NEVER,)
        return (HOLD, NEVER)
    own = sim.graph.last_event[value]
    if own < 0:
        return (HOLD, *range(sim.release[value] + 1), NEVER)
    never = (NEVER,) if sim.release[value] > sim.graph.needed[value] else ()
    return (HOLD, *range(own + 1), *never)


def brute_force(graph: Graph, limit: int) -> tuple[Candidate | None, int]:
    """The cheapest plan within the limit, if there is one, and the lowest peak of any plan."""
    problem = Problem(Simulator(graph))
    options = [choices(problem, value) for value in range(len(graph.values))]
    combinations = prod(map(len, options))
    assert combinations <= MOST, f"{combinations} combinations are too many to try one by one"
    best: Candidate | None = None
    lowest = 1 << 100
    for choice in product(*options):
        retain = list(choice)
        result = problem.sim.run(retain)
        lowest = min(lowest, result.peak)
        if result.peak <= limit and (best is None or result.seconds < best.result.seconds):
            best = Candidate(retain, result)
    return best, lowest


def tiny_graphs() -> Iterator[tuple[Graph, int, int, Candidate]]:
    """Some fifty random graphs; of each the lowest peak of any plan, a limit a third of the way
    from there to the plain peak, and the cheapest plan within it."""
    for seed in range(60):
        graph = random_graph(seed, 3 + seed % 3)
        problem = Problem(Simulator(graph))
        if prod(len(choices(problem, v)) for v in range(len(graph.values))) > 2_000:
            continue
        plain = problem.sim.run(keep_all(graph).retain).peak
        _, lowest = brute_force(graph, 0)
        limit = lowest + (plain - lowest) // 3
        best, _ = brute_force(graph, limit)
        assert best is not None
        yield graph, lowest, limit, best
