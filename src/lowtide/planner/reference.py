"""Every plan of a tiny graph: the oracle for the solvers that are fast.

Problem: a heuristic needs something that is certainly right to be compared with.
Invariant: tries every combination in which a value waits at most for its own first event, which is
what the solvers propose: after it, autograd may hold the value next to the others that the same
backward operation unpacks, and a plan that counts on its absence would be wrong. Refuses graphs
where that would take long.
Imports: `lowtide.planner.repair`, `lowtide.planner.simulate`. Rejected: branch and bound, which
would need an argument for why it is exact.
"""

from __future__ import annotations

from itertools import product
from math import prod

from lowtide.errors import UsageError
from lowtide.planner.graph import Graph
from lowtide.planner.repair import Candidate, Problem
from lowtide.planner.retention import HOLD, NEVER
from lowtide.planner.simulate import Simulator

MOST = 100_000
"""Combinations that are still tried."""


def choices(problem: Problem, value: int) -> tuple[int, ...]:
    """The decisions worth telling apart for one value."""
    sim = problem.sim
    if problem.fixed[value]:
        return (HOLD,)
    if sim.release[value] < 0:
        if value in problem.gone or not sim.graph.consumers[value]:
            return (NEVER,)
        return (HOLD, NEVER)
    own = sim.graph.first_event[value]
    if own < 0:
        return (HOLD, *range(sim.release[value] + 1), NEVER)
    never = (NEVER,) if sim.release[value] > sim.graph.needed[value] else ()
    return (HOLD, *range(own + 1), *never)


def brute_force(graph: Graph, limit: int) -> tuple[Candidate | None, int]:
    """The cheapest plan under a limit, if there is one, and the lowest peak of any plan."""
    problem = Problem(Simulator(graph))
    options = [choices(problem, value) for value in range(len(graph.values))]
    combinations = prod(map(len, options))
    if combinations > MOST:
        raise UsageError(
            f"{combinations} combinations are too many to try one by one (at most {MOST}); "
            "use lowtide.planner.solve"
        )
    best: Candidate | None = None
    lowest = 1 << 100
    for choice in product(*options):
        retain = list(choice)
        result = problem.sim.run(retain)
        lowest = min(lowest, result.peak)
        if result.peak <= limit and (best is None or result.seconds < best.result.seconds):
            best = Candidate(retain, result)
    return best, lowest
