"""The lowest peak that can be reached, for `minimum` and where nothing else fits.

Problem: near the lowest peak several moments of the step are equally high, and what is cheap to
drop is not what helps. Invariant: whether or not it ends early, the search takes the same path, so
that a limit of the peak it finds can be solved. Imports the other modules of `lowtide.planner`.
Rejected: dropping everything. That is far above the lowest peak where replays hold much of what
they recompute on their way.
"""

from __future__ import annotations

from time import perf_counter

from lowtide.planner.descent import descend, pairs
from lowtide.planner.greedy import greedy
from lowtide.planner.repair import Problem, shrink
from lowtide.planner.search import LARGE, SEGMENTS, Search, nested_anchors, offer_anchors
from lowtide.planner.segments import Boundaries

LOWER = 4
"""How many times the work of a search for the cheapest plan: a refusal names the lowest peak."""
PAIRS, NEARER = 3, 400
"""The same for pairs of moves at the end, whose goal is this part of the peak below it."""
NESTED = 3
"""How many plans with nested anchors are shrunk further."""


def lowest(problem: Problem, enough: int, deadline: float) -> Search:
    """Search for the lowest peak, along a path that does not depend on `enough`, until the peak is
    at most that."""
    search = Search(problem, 0, deadline)
    search.offer(greedy(problem, 0), "greedy")
    if len(problem.sim.cost) > LARGE:
        offer_anchors(search)
    bounds = Boundaries(problem.sim)
    for segments in SEGMENTS:
        held = bounds.anchors(bounds.places(segments))
        for limit in (search.best.result.peak * 9 // 10, 0):
            search.offer(shrink(problem, problem.start(held), limit), "anchors")
        if search.best.result.peak <= enough or search.done():
            break
    if search.best.result.peak > enough and len(problem.sim.cost) <= LARGE:
        _nested(search)
    _lower(search, enough)
    _pair(search, enough)
    return search


def _nested(search: Search) -> None:
    """Shrink the plans with nested anchors that have the lowest peaks.

    Where there are many long segments, replays within one need anchors of their own.
    """
    problem = search.problem
    found = sorted(nested_anchors(search), key=lambda candidate: candidate.result.peak)
    stop = problem.sim.evaluations + search.allowed // 4
    for candidate in found[:NESTED]:
        for limit in (search.best.result.peak * 9 // 10, 0):
            search.offer(shrink(problem, candidate.retain, limit), "anchors")
        if problem.sim.evaluations > stop:
            break


def _lower(search: Search, enough: int) -> None:
    """Try to lower the best peak, by a step that becomes smaller whenever it fails."""
    sim = search.problem.sim
    stop = sim.evaluations + LOWER * search.allowed
    step = max(search.best.result.peak // 20, 1)
    while search.best.result.peak > enough and perf_counter() < search.deadline:
        left = stop - sim.evaluations
        if left <= 0:
            return
        best = search.best
        goal = best.result.peak - step
        search.offer(descend(search.problem, best, goal, (left + 1) // 2), "descent")
        if search.best is best:
            if step == 1:
                return
            step = max(step // 4, 1)


def _pair(search: Search, enough: int) -> None:
    """Lower the best peak, where single moves have ended, by pairs of them."""
    sim = search.problem.sim
    stop = sim.evaluations + PAIRS * search.allowed
    best = search.best
    while search.best.result.peak > enough and perf_counter() < search.deadline:
        left = stop - sim.evaluations
        goal = best.result.peak - max(best.result.peak // NEARER, 1)
        found = pairs(search.problem, best, goal, left)
        if found is best:
            return
        best = found  # less above the goal; perhaps only the next one has a lower peak
        search.offer(best, "descent")
