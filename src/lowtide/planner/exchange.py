"""From plans that fit to cheaper ones that fit, by exchanging what is held.

Problem: a cut knows only one moment of the step. Some of what it dropped could stay once the repair
is done, and where several moments are near the limit it is some percent from the best plan.

Invariant: every plan in the pool fits, according to the simulator. The next exchange is made from
the cheapest plan that has an untried one, in a fixed order, so equal input gives equal output.

Imports: `lowtide.planner.repair`.

Rejected: annealing in its place. It needs a thousand times as many simulations, which take minutes
here; with a compiled simulator it follows the exchanges, in `polish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from lowtide.planner.repair import (
    Candidate,
    Problem,
    closure_cost,
    grow,
    saving,
    shrink,
    trace_of,
)
from lowtide.planner.retention import HOLD

ROUNDS = 6
"""After this many simulations, an exchange that does not fit yet is given up."""
TRIES = 3
"""How often an exchange is tried: each time, the largest value that the last try dropped stays."""
WORTH = 1.3
"""An exchange whose plan exceeds this many times the best plan's time is given up."""
NEAR = 1.1
"""Plans of up to this many times the best plan's time are starting points too."""


class _Best:
    """The best plan so far. The exchanges that are under way know it and not the pool, which holds
    them: no plan is to wait for Python's garbage collector."""

    __slots__ = ("plan", "seconds")

    def __init__(self) -> None:
        self.plan: Candidate | None = None
        self.seconds = float("inf")


class Pool:
    """Plans that fit, the cheapest first, and the best of them."""

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem = problem
        self.limit = limit
        self._best = _Best()
        self.plans: list[tuple[float, int, Iterator[Candidate]]] = []
        self.known: set[tuple[int, ...]] = set()

    @property
    def best(self) -> Candidate | None:
        return self._best.plan

    @property
    def seconds(self) -> float:
        """The seconds that the best plan replays for."""
        return self._best.seconds

    def add(self, plan: Candidate) -> None:
        """Add a plan, if it fits and is new."""
        if plan.result.peak > self.limit or not plan.result.complete:
            return
        key = tuple(trace_of(plan.result).start)
        if key in self.known:
            return
        self.known.add(key)
        seconds = plan.result.seconds
        if seconds < self.seconds:
            self._best.plan, self._best.seconds = plan, seconds
        if seconds <= self.seconds * NEAR:
            exchanges = _exchanges(self.problem, self.limit, self._best, plan)
            heappush(self.plans, (seconds, len(self.known), exchanges))

    def step(self) -> bool:
        """Try one exchange; False when none is left."""
        if not self.plans or self.plans[0][0] > self.seconds * NEAR:
            return False
        found = next(self.plans[0][2], None)
        if found is None:
            heappop(self.plans)
        else:
            self.add(found)
        return True


def _exchanges(problem: Problem, limit: int, best: _Best, plan: Candidate) -> Iterator[Candidate]:
    for change in _changes(problem, plan):
        retain = plan.retain.copy()
        for value, choice in change:
            retain[value] = choice
        frozen = frozenset(value for value, _ in change)
        moved: list[int]
        for _ in range(TRIES):
            cap, moved = best.seconds * WORTH, []
            found = shrink(problem, retain, limit, ROUNDS, frozen, cap, moved)
            if found.result.complete and found.result.peak <= limit:
                found = grow(problem, found, limit, 2, frozen)
            yield found
            if not moved:
                break
            # Estimates ignore second replays, so `shrink` may have dropped the wrong values.
            frozen |= {max(moved, key=lambda value: (problem.sim.nbytes[value], value))}


def _changes(problem: Problem, plan: Candidate) -> Iterator[list[tuple[int, int]]]:
    """What to hold or retain earlier, largest saving first; then what to drop, cheapest first."""
    sim, trace = problem.sim, trace_of(plan.result)
    start, producer, cost = trace.start, sim.producer, sim.cost
    ranked: list[tuple[float, int, int]] = []
    for value in _replayed(problem, plan):
        seconds, _ = saving(sim, trace, value, trace.replays)
        if seconds > 0:
            ranked.append((-seconds, value, HOLD))
    for value, events in trace.missed_at().items():
        ranked.append((-len(events) * cost[producer[value]], value, events[0]))
        if len(events) > 1:
            ranked.append((-cost[producer[value]], value, events[-1]))
    for _, value, choice in sorted(ranked):
        yield [(value, choice)]
    held = [
        (closure_cost(sim, trace, value, set(), set())[0] / sim.nbytes[value], value)
        for value, at in enumerate(start)
        if at == HOLD and sim.nbytes[value] and trace.alive[value] >= 0 and not problem.fixed[value]
    ]
    for _, value in sorted(held):
        drop = (value, problem.dropped(value))
        yield [drop]
        inputs = [x for x in sim.reads[producer[value]] if start[x] != HOLD]
        if inputs and not problem.gone.intersection(inputs):
            yield [drop, *((x, HOLD) for x in inputs)]


def _replayed(problem: Problem, plan: Candidate) -> Iterable[int]:
    """Values that are recomputed and could be held."""
    sim, trace = problem.sim, trace_of(plan.result)
    for value, at in enumerate(trace.start):
        can = not problem.fixed[value] and value not in problem.gone
        if can and at != HOLD and trace.alive[value] >= 0 and trace.replays[sim.producer[value]]:
            yield value
