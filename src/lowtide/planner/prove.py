"""How much better a plan could be: the cheap bound raised by what other moments demand.

Problem: the cut at the plain peak bounds every plan, but is points below the best where several
moments stand near the limit. Invariant: the larger of valid bounds is one; no plan is touched.
Imports: the other modules of `lowtide.planner`. Rejected: doing this for every search: whoever only
runs a plan need not know how good it is.
"""

from __future__ import annotations

from lowtide.planner.branch import Branch, Tree
from lowtide.planner.moments import worst_moments
from lowtide.planner.repair import Candidate, Problem, trace_of

WORK = 200_000
"""Nodes of the networks that may be cut."""
LATER = 4
"""Moments tried besides that of the plain peak."""
PROBE = 3
"""The part of the work that is spent on all of them alike."""
LEAST = 8
"""Cuts without which nothing is proved that the cut at one moment does not prove."""


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
    The moment of the plain peak alone and with a later one is branched on; then what has proved
    most gets the rest of the work.
    """
    event, price = main
    target = best.result.seconds
    pairs = _pairs(trace_of(plain.result).backward, trace_of(best.result).backward, event, limit)
    trees: list[Tree] = []
    left = WORK
    for moments in [*pairs, [event]]:
        if left < LEAST * len(moments) * (len(problem.sim.cost) + len(problem.sim.nbytes)):
            continue
        model = Branch(problem, moments, limit)
        starts = [[price]]
        if len(moments) > 1:
            # What is held at one of them is mostly held at the other, or the other is no peak.
            starts = [[price / 2, price / 2], [price, 0.0]]
        trees.append(Tree(model, starts, target))
        left -= trees[-1].grow(WORK // (PROBE * (len(pairs) + 1)))
    # Of those that have proved the same, the first pair has seen the plan's own peak.
    trees.sort(key=lambda tree: -round(tree.bound / target, 3))
    for tree in trees:
        left -= tree.grow(left)
    return max(bound, *(tree.bound for tree in trees)) if trees else bound


def _pairs(plain: list[int], best: list[int], main: int, limit: int) -> list[list[int]]:
    """The moment of the plain peak and a later one over the limit in the plain step.

    Those are its own peaks and those of the plan; they show what is replayed twice.
    """
    own = [event for event in sorted(range(len(best)), key=lambda e: (-best[e], e))
           if plain[event] > limit]  # fmt: skip
    near = [*own[:LATER], *worst_moments(plain, limit, LATER)]
    return [[main, event] for event in dict.fromkeys(near) if event > main][:LATER]
