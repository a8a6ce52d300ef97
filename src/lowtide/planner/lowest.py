"""The lowest peak that can be reached, for `minimum` and where nothing else fits.

Problem: near the floor several moments of the step stand at the peak, and what is cheap to let go
is not what helps. Invariant: ended early or not, the search takes the same path, so that a limit of
the peak it finds can be solved. Imports the other modules of `lowtide.planner`. Rejected: to let
everything go, which is far above the floor where replays hold what they pass by.
"""

from __future__ import annotations

from time import perf_counter

from lowtide.planner.descent import descend
from lowtide.planner.greedy import greedy
from lowtide.planner.repair import Problem, shrink
from lowtide.planner.search import LARGE, SEGMENTS, Search, nested_anchors, offer_anchors
from lowtide.planner.segments import Boundaries

LOWER = 4
"""How much more work than the cheapest plan the lowest may take: it is what a refusal names."""
NESTED = 3
"""Of the anchors of two levels, those from which less is asked for."""


def lowest(problem: Problem, enough: int, deadline: float) -> Search:
    """Search for the lowest peak; ends once it is at most `enough`, on the same path."""
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
    return search


def _nested(search: Search) -> None:
    """Anchors of two levels, those with the lowest peaks pushed down like the others.

    Where segments are long and many, replays within one want anchors of their own.
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
    """Ask for less than the best peak met, by steps that shrink whenever one fails."""
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
