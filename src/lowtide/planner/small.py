"""Holding values that are too small to matter: statistics of normalizations, masks, sums.

Problem: at a tight limit the searches drop whatever is at the peak, the small with the large.
They make no room worth naming; but each has to be recomputed, often by an operation that nothing
else needs any more, and a search that changes few values at a time is not led back: one of them
alone saves nothing, as others of the same operation are still missing.

Invariant: only values that together are at most `SHARE` of the limit are held, and only where the
simulator says that the plan still fits and takes no longer.

Imports: `lowtide.planner.repair`, `lowtide.planner.retention`, `lowtide.planner.search`.

Rejected: holding them in every plan. Next to the minimum there is no room even for them.
"""

from __future__ import annotations

from lowtide.planner.repair import Candidate, Problem
from lowtide.planner.retention import HOLD
from lowtide.planner.search import Search

SHARE = 0.002
"""Of the limit: what the small values may take together."""
TRIES = 64
"""Simulations, fewer for large graphs: of all values at once, then halves of what did not fit."""


def holding_small(search: Search) -> tuple[Candidate, frozenset[int]]:
    """The best plan with its small values held, and which of them it holds now."""
    problem, limit, best = search.problem, search.limit, search.best
    small = _small(problem, limit)
    dropped = [value for value in small if best.retain[value] != HOLD]
    left = [dropped] if dropped else []
    for _ in range(min(TRIES, search.allowed // 4)):
        if not left:
            break
        some = left.pop()
        found = _holding(problem, best, some)
        if found.key(limit)[:2] <= best.key(limit)[:2]:
            best = found
        elif len(some) > 1:
            left += [some[len(some) // 2 :], some[: len(some) // 2]]
    return best, frozenset(value for value in small if best.retain[value] == HOLD)


def _holding(problem: Problem, plan: Candidate, values: list[int]) -> Candidate:
    retain = plan.retain.copy()
    for value in values:
        retain[value] = HOLD
    return Candidate(retain, problem.run(retain))


def _small(problem: Problem, limit: int) -> list[int]:
    """The smallest values that a plan may hold, in the order in which they are made."""
    nbytes, left = problem.sim.nbytes, SHARE * limit
    open_ = (
        value
        for value, fixed in enumerate(problem.fixed)
        if not fixed and nbytes[value] and value not in problem.gone
    )
    found = []
    for value in sorted(open_, key=lambda value: (nbytes[value], value)):
        left -= nbytes[value]
        if left < 0:
            break
        found.append(value)
    return sorted(found)
