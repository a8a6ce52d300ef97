"""How much better a plan could be: the cheap bound raised by what other moments demand.

Problem: the cut at the plain peak bounds every plan, but is points below the best where several
moments stand near the limit. Invariant: the larger of valid bounds is one; no plan is touched.
Imports: the other modules of `lowtide.planner`. Rejected: doing this for every search: whoever only
runs a plan need not know how good it is.
"""

from __future__ import annotations

from lowtide.planner.branch import Branch, Tree
from lowtide.planner.flow import CutWith
from lowtide.planner.moments import worst_moments
from lowtide.planner.repair import Candidate, Problem, trace_of
from lowtide.planner.simulate import Trace

WORK = 200_000
"""Nodes of the networks that may be cut."""
COMPILED_WORK, COMPILED_ROUNDS = 2_000_000, 3
"""The same where somebody brings faster cuts, and how many moments may join that of the peak."""
LONGEST = 1e5
"""Seconds of a forward up to which capacities are numbers that the networks take."""
LATER = 4
"""Moments tried besides that of the plain peak."""
PROBE = 3
"""The part of the work that is spent on all of them alike."""
NEAR = 0.98
"""The part of the limit from which on a moment of the plan is one of its peaks."""
LEAST = 8
"""Cuts without which nothing is proved that the cut at one moment does not prove."""


def prove(
    problem: Problem,
    limit: int,
    plain: Candidate,
    best: Candidate,
    main: tuple[int, float],
    bound: float,
    cut_with: CutWith | None = None,
) -> float:
    """The best bound found, `bound` or better.

    `main` is the moment of the plain peak, by its number, and the price of a byte there; `best` is
    the plan found. That moment alone and with another is branched on; with faster cuts those that
    have proved most are joined by a third, and by one more; then what has proved most gets the rest
    of the work.
    """
    event, price = main
    target = best.result.seconds
    if sum(problem.sim.cost) > LONGEST:
        return bound
    work, rounds = (WORK, 1) if cut_with is None else (COMPILED_WORK, COMPILED_ROUNDS)
    later = _later(trace_of(plain.result), trace_of(best.result), event, limit)
    later = later[: rounds * LATER]
    size = len(problem.sim.cost) + len(problem.sim.nbytes)
    trees: list[Tree] = []
    chosen, left = [event], work
    for _ in range(rounds):
        tried = [sorted([*chosen, another]) for another in later if another not in chosen]
        if not trees:
            tried.append(chosen)
        for moments in tried:
            if left < LEAST * len(moments) * size:
                continue
            starts = _starts(moments, event, price)
            trees.append(Tree(Branch(problem, moments, limit, cut_with), starts, target))
            left -= trees[-1].grow(work // (PROBE * rounds * len(tried)))
        # Of those that have proved the same, the first pair has seen the plan's own peak.
        trees.sort(key=lambda tree: -round(tree.bound / target, 3))
        if not trees or trees[0].moments == chosen:
            break
        chosen = trees[0].moments
    for tree in trees:
        left -= tree.grow(left)
    return max(bound, *(tree.bound for tree in trees)) if trees else bound


def _starts(moments: list[int], event: int, price: float) -> list[list[float]]:
    """Prices to begin with: what is held at one of them is mostly held at the others, or the others
    are no peaks."""
    if len(moments) == 1:
        return [[price]]
    return [[price / len(moments)] * len(moments), [price * (m == event) for m in moments]]


def _later(plain: Trace, best: Trace, main: int, limit: int) -> list[int]:
    """Moments besides that of the plain peak that are over the limit in the plain step.

    Those are the later ones of its own peaks and those of the plan, which show what is replayed
    twice, and the highest of the forward where the plan is as high there.
    """
    high, over = best.backward, [level > limit for level in plain.backward]
    own = [event for event in sorted(range(len(high)), key=lambda e: (-high[e], e)) if over[event]]
    near = [*own[:LATER], *worst_moments(plain.backward, limit, LATER)]
    found = [event for event in dict.fromkeys(near) if event > main]
    forward = max(range(len(best.forward)), key=best.forward.__getitem__, default=-1)
    if main >= 0 and forward >= 0 and plain.forward[forward] > limit < best.forward[forward] / NEAR:
        found.insert(0, forward - len(best.forward))
    return found
