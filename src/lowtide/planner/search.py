"""The state of one search: the best plan so far, the work left, and when to stop.

Problem: the searches for the cheapest plan and for the lowest peak share their state and their
criteria for stopping. Invariant: deterministic; work is counted in simulated operations, not
seconds. Imports the other modules of `lowtide.planner`. Rejected: passing a list of plans from one
method to the next, which does not say how much work is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

from lowtide.planner.exchange import Pool
from lowtide.planner.repair import Candidate, Problem, grow
from lowtide.planner.retention import HOLD, Retention
from lowtide.planner.segments import Boundaries
from lowtide.planner.solution import Solution

WORK = 250_000
"""Operations and events that one search may simulate: one to two seconds of plain Python."""
GOOD_ENOUGH = 1.02
"""A plan within this factor of the proved bound, plus `SMALL`, ends the search."""
SMALL = 5e-3
"""A difference of this share of the forward's time is not worth searching for."""
DOUBTFUL = 2.0
"""If the best plan takes more than this many times the bound, nested anchors are tried too."""
SEGMENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Numbers of segments into which the forward is divided, with anchors at their boundaries."""
OUTER, INNER = (2, 4, 8, 12, 16), (2, 3, 4, 6)
"""For nested anchors: numbers of outer segments, and of inner segments in each of them."""
SCREEN = 24
"""Anchored starting points are limited to one for every so many simulations that a search has."""
LARGE = 1000
"""With more operations than this, a search has too few simulations to try everything in turn."""


@dataclass
class Search:
    """The state of one search: the best plan so far and the work left."""

    problem: Problem
    limit: int
    deadline: float
    plain: Candidate = field(init=False)
    best: Candidate = field(init=False)
    method: str = "keep all"
    bound: float = 0.0
    price: tuple[int, float] | None = None
    """The event of the plain peak, and the price of a byte there that proves the best bound; None
    if that peak is in the forward."""
    main: tuple[int, float] | None = None
    """The same for a peak at any moment, given by its number (`cut.moment_at`)."""

    def __post_init__(self) -> None:
        retain = self.problem.keep_all()
        self.plain = self.best = Candidate(retain, self.problem.run(retain))
        sim = self.problem.sim
        self.allowed = max(WORK // (len(sim.cost) + len(sim.event_value) + 1), 24)
        self.stop = sim.evaluations + self.allowed
        self.slack = SMALL * sum(sim.cost)
        self.pool = Pool(self.problem, self.limit)

    def offer(self, candidate: Candidate, method: str) -> None:
        self.pool.add(candidate)
        if candidate.key(self.limit) < self.best.key(self.limit):
            self.best, self.method = candidate, method

    @property
    def fits(self) -> bool:
        return self.best.result.peak <= self.limit

    def wanted_bound(self) -> float:
        """The bound that would end the search with the best plan so far."""
        if not self.fits:
            return float("inf")
        return (self.best.result.seconds - self.slack) / GOOD_ENOUGH

    def enough(self) -> float:
        """The time of a plan that would end the search."""
        return self.bound * GOOD_ENOUGH + self.slack

    def near_bound(self) -> bool:
        seconds = min(self.best.result.seconds, self.pool.seconds)
        return self.fits and seconds <= self.enough()

    def doubtful(self) -> bool:
        return not self.fits or self.best.result.seconds > DOUBTFUL * self.bound

    def done(self) -> bool:
        if self.near_bound():
            return True
        return self.problem.sim.evaluations >= self.stop or perf_counter() > self.deadline

    def solution(self, began: float) -> Solution:
        result, sim = self.best.result, self.problem.sim
        return Solution(
            status="fits" if self.fits else "infeasible",
            plan=Retention(tuple(self.best.retain)),
            peak=result.peak,
            seconds=result.seconds,
            plain_peak=self.plain.result.peak,
            lower_bound=min(self.bound, result.seconds) if self.fits else None,
            evaluations=sim.evaluations,
            solve_seconds=perf_counter() - began,
            method=self.method,
        )


def offer_anchors(search: Search) -> None:
    """Simulate each number of anchors once, and improve only the best of them.

    For large graphs a search has too few simulations to shrink each of them.
    """
    problem, limit = search.problem, search.limit
    bounds = Boundaries(problem.sim)
    found = []
    for segments in SEGMENTS:
        retain = problem.start(bounds.anchors(bounds.places(segments)))
        found.append(Candidate(retain, problem.run(retain)))
    best = min(found, key=lambda candidate: candidate.key(limit))
    search.offer(best, "anchors")
    if best.result.peak <= limit:
        search.offer(grow(problem, best, limit), "anchors")
    search.stop += len(SEGMENTS)


def nested_anchors(search: Search) -> Iterator[Candidate]:
    """Anchors of two levels: some held, others retained when a replay recomputes their segment."""
    problem = search.problem
    bounds = Boundaries(problem.sim)
    for outer in OUTER[:: max(2 * SCREEN * len(OUTER) // search.allowed, 1)]:
        for inner in INNER:
            places = sorted({*bounds.places(outer), *bounds.places(outer * inner)})
            retain = problem.start(bounds.anchors(bounds.places(outer)))
            for value, event in bounds.waiting(places).items():
                if retain[value] != HOLD:
                    retain[value] = event
            yield Candidate(retain, problem.run(retain))
