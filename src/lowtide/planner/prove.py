"""How much better a plan could be: the cheap bound raised by what other moments demand.

Problem: the cut at the plain peak bounds every plan, but is points below the best where several
moments stand near the limit. Invariant: the larger of valid bounds is one; no plan is touched.
Imports: the other modules of `lowtide.planner`. Rejected: doing this for every search: whoever only
runs a plan need not know how good it is.
"""

from __future__ import annotations

from lowtide.planner.branch import branched_bound
from lowtide.planner.moments import Moments, raise_bound, worst_moments
from lowtide.planner.repair import Candidate, Problem, trace_of

WORK = 40_000, 100_000
"""Nodes of the networks that may be cut: for pairs of moments, and for branching on them."""
CLIMBS = 12
"""Cuts with which the prices at a pair of moments are moved."""
TRIED = 4


def prove(
    problem: Problem,
    limit: int,
    plain: Candidate,
    best: Candidate,
    main: tuple[int, float],
    bound: float,
) -> float:
    """The best bound found, `bound` or better.

    `main` is the event of the plain peak and the price of a byte there, `best` the plan found.
    """
    event, price = main
    target = best.result.seconds
    found = []
    pairs, branches = WORK
    others = _others(trace_of(plain.result).backward, trace_of(best.result).backward, event, limit)
    # Two at a time prove more for the same work than all of them.
    for moments in [sorted((event, other)) for other in others]:
        model = Moments(problem.sim, moments, limit)
        nodes = len(model.network.arcs)
        cuts = max(min(CLIMBS, pairs // (nodes * TRIED)), 4)
        # What is held at one of them is mostly held at the other: their prices add up to the one.
        proved, prices = raise_bound(model, [price / 2, price / 2], 0.0, target, cuts)
        bound = max(bound, proved)
        found.append((moments, nodes, prices))
    split = [pair for pair in found if pair[0][0] == event]
    for moments, nodes, prices in split:
        cuts = branches // (nodes * len(split))
        if cuts >= 2 * CLIMBS:
            proved = branched_bound(problem, moments, limit, moments[1], prices, target, cuts)
            bound = max(bound, proved)
    return bound


def _others(plain: list[int], best: list[int], main: int, limit: int) -> list[int]:
    """Events over the limit in the plain step: its own peaks, and those of the plan."""
    own = [event for event in sorted(range(len(best)), key=lambda e: (-best[e], e))
           if plain[event] > limit]  # fmt: skip
    near = [*worst_moments(plain, limit, TRIED), *own[:TRIED]]
    return [event for event in dict.fromkeys(near) if event != main][:TRIED]
