"""How much better a plan could be: the cheap bound, raised by considering several moments.

Problem: the cut at the plain peak bounds every plan, but this bound is some percent below the best
plan where several moments are near the limit. Invariant: the result is the largest of several valid
bounds, so it is valid; no plan is changed. Imports: the other modules of `lowtide.planner`.
Rejected: doing this in every search: to run a plan, it need not be known how good it is. Cuts in
each proof: where prices leave less than a tenth, they take as long and prove hardly more.
"""

from __future__ import annotations

from lowtide.planner.branch import Branch, Tree
from lowtide.planner.flow import CutWith
from lowtide.planner.moments import worst_moments
from lowtide.planner.relaxed import PriceWith, relaxed
from lowtide.planner.repair import trace_of
from lowtide.planner.search import Search
from lowtide.planner.simulate import Trace

WORK = 200_000
"""How much may be cut: each cut counts as many as its network has nodes."""
COMPILED_WORK, COMPILED_ROUNDS = 2_000_000, 3
"""The same with the caller's faster cuts, and how many moments may be added to the plain peak's."""
LONGEST = 1e5
"""If the forward takes more seconds than this, capacities would be too large for the networks."""
LATER = 4
"""Moments tried besides that of the plain peak."""
PROBE = 3
"""One part in this many of the work is spent on trying all combinations of moments alike."""
NEAR = 0.98
"""A moment of the plan above this share of the limit counts as one of its peaks."""
HIGHEST, SPREAD = 11, 30
"""Moments that are tried in linear programs: first those that are further from each other than one
part in `SPREAD` of backward, up to half, then any."""
PRICED = 2_000
"""Operations: the rows of more take longer than the work that there is for them."""
CLOSE = 0.9
"""If prices have proved this part of the plan's time, cuts are not tried."""
LEAST = 8
"""With fewer cuts than this, no more is proved than by the cut at one moment."""


def prove(search: Search, cut_with: CutWith | None, price_with: PriceWith | None) -> float:
    """The best lower bound found, at least that of the search: by prices, and by cuts where there
    are none or much is left. The search has a plan that fits."""
    cost = search.problem.sim.cost
    if search.main is None or sum(cost) > LONGEST:
        return search.bound
    if price_with is None or len(cost) > PRICED:
        return _by_cuts(search, *search.main, cut_with)
    bound = max(search.bound, _by_prices(search, search.main[0], price_with))
    if bound >= CLOSE * search.best.result.seconds:
        return bound
    return max(bound, _by_cuts(search, *search.main, cut_with))


def _by_prices(search: Search, main: int, price_with: PriceWith) -> float:
    """The bound by linear programs. Their moments are the plan's highest, of those that are over
    the limit in the plain step, whose own peak is the first; and the peaks of the forward."""
    plan, limit = trace_of(search.best.result), search.limit
    high, over, forward = plan.backward, trace_of(search.plain.result).backward, plan.forward
    found = sorted(
        (event for event in range(len(high)) if over[event] > limit),
        key=lambda event: (-high[event], event),
    )
    apart: list[int] = [main] if main >= 0 else []
    for event in found:
        if all(abs(event - other) > len(high) // SPREAD for other in apart):
            apart.append(event)
    moments = list(dict.fromkeys([*apart[: HIGHEST // 2], *found]))[:HIGHEST]
    steps = [max(range(len(forward)), key=forward.__getitem__)] if forward else []
    if main < 0:
        steps = sorted({len(forward) + main, *steps})
    seconds = search.best.result.seconds
    return relaxed(search.problem, limit, seconds, moments, steps, price_with)


def _by_cuts(search: Search, event: int, price: float, cut_with: CutWith | None) -> float:
    """The best lower bound that branches over cuts prove, at least that of the search.

    `event` is the number of the moment of the plain peak, and `price` that of a byte there. Branch
    and bound runs on that moment alone and on pairs with another moment; with faster cuts, a third
    moment is added to the pair that proved most, and then a fourth. The combination that proved
    most gets the rest of the work.
    """
    problem, limit, target = search.problem, search.limit, search.best.result.seconds
    work, rounds = (WORK, 1) if cut_with is None else (COMPILED_WORK, COMPILED_ROUNDS)
    plain, best = trace_of(search.plain.result), trace_of(search.best.result)
    later = _later(plain, best, event, limit)
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
        # The sort is stable: of equal ones, the first pair has the moment of the plan's own peak.
        trees.sort(key=lambda tree: -round(tree.bound / target, 3))
        if not trees or trees[0].moments == chosen:
            break
        chosen = trees[0].moments
    for tree in trees:
        left -= tree.grow(left)
    return max([search.bound, *(tree.bound for tree in trees)])


def _starts(moments: list[int], event: int, price: float) -> list[list[float]]:
    """Two sets of initial prices: one spread evenly, as values held at one moment are mostly held
    at the others too, and one for the case that the other moments are no peaks."""
    if len(moments) == 1:
        return [[price]]
    return [[price / len(moments)] * len(moments), [price * (m == event) for m in moments]]


def _later(plain: Trace, best: Trace, main: int, limit: int) -> list[int]:
    """Moments to try besides that of the plain peak; all are over the limit in the plain step.

    They are later peaks of the plan and of the plain step, which show what is replayed twice, and
    the highest moment of the forward if the plan is near the limit there.
    """
    high, over = best.backward, [level > limit for level in plain.backward]
    own = [event for event in sorted(range(len(high)), key=lambda e: (-high[e], e)) if over[event]]
    near = [*own[:LATER], *worst_moments(plain.backward, limit, LATER)]
    found = [event for event in dict.fromkeys(near) if event > main]
    forward = max(range(len(best.forward)), key=best.forward.__getitem__, default=-1)
    if main >= 0 and forward >= 0 and plain.forward[forward] > limit < best.forward[forward] / NEAR:
        found.insert(0, forward - len(best.forward))
    return found
