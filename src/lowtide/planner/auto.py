"""Choosing a plan: which way of searching, in which order, and when to stop.

Problem: no single method is best at every limit, and a user waits while it searches.

Invariant: deterministic. Work is counted in simulated operations, not seconds, so the same graph
and limit give the same plan on any machine; `time_limit` is a guard that only ends a search early.

Imports: the other modules of `lowtide.planner`.

Rejected: annealing. It needs thousands of evaluations and its answer depends on when it is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from lowtide.planner.cut import (
    Cut,
    CutModel,
    best_price,
    free_holds,
    hull,
    lower_bound,
    moment_weights,
    peak_moment,
    room_at,
)
from lowtide.planner.descent import descend
from lowtide.planner.exchange import Pool
from lowtide.planner.graph import Graph
from lowtide.planner.greedy import greedy
from lowtide.planner.moments import worst_moments
from lowtide.planner.prove import prove as raised
from lowtide.planner.repair import Candidate, Problem, grow, shrink, trace_of
from lowtide.planner.retention import HOLD, Retention
from lowtide.planner.segments import Boundaries
from lowtide.planner.simulate import Simulation, Simulator
from lowtide.planner.solution import Solution

WORK = 250_000
"""Operations and events that one search may simulate: one to two seconds of plain Python."""
EXCHANGE_WORK = 400_000
"""The same for the exchanges after it."""
CONSTANT = 100
"""What an exchange takes besides, in operations: the smallest graphs are not searched for ever."""
MOMENTS = 3
"""Moments whose cuts are starting points, the plain peak besides."""
NEAREST = 3
"""Cuts at a moment that are repaired first."""
CUT_WORK = 2
"""Simulations that take as long as one cut."""
GOOD_ENOUGH = 1.02
"""A plan within this factor of the proved bound, and `SMALL`, ends the search."""
SMALL = 5e-3
"""A share of the forward's time that is not worth searching for."""
HOPELESS = 1.5
"""A plan that takes this many times the best one's time will not overtake it by holding again."""
LARGE = 1000
"""Operations above which a search has too few simulations to try everything in turn."""
FAR = 3.0
"""A first plan above so many times the bound: replays stand at the peak, anchors are needed."""
DOUBTFUL = 2.0
"""The best plan above so many times the bound: anchors of two levels are tried as well."""
DEAR = 2.0
"""Of a starting point, what an excess as large as the limit counts as, in forwards."""
SCREEN = 24
"""Simulations that a search must have for each starting point that it weighs."""
OUTER, INNER = (2, 4, 8, 12, 16), (2, 3, 4, 6)
"""Segments whose anchors are held, and into how many of them each is divided again."""
SEGMENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)


@dataclass
class _Search:
    """The state of one search: the best plan so far and the work left."""

    problem: Problem
    limit: int
    deadline: float
    plain: Candidate = field(init=False)
    best: Candidate = field(init=False)
    method: str = "keep all"
    bound: float = 0.0
    price: tuple[int, float] | None = None
    """The event of the plain peak, and the price of a byte there that proves most."""

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

    def near_bound(self) -> bool:
        seconds = min(self.best.result.seconds, self.pool.seconds)
        return self.fits and seconds <= self.bound * GOOD_ENOUGH + self.slack

    def doubtful(self) -> bool:
        return not self.fits or self.best.result.seconds > DOUBTFUL * self.bound

    def done(self) -> bool:
        if self.near_bound():
            return True
        return self.problem.sim.evaluations >= self.stop or perf_counter() > self.deadline


def solve(
    graph: Graph, limit: int, *, margin: int = 0, time_limit: float = 60.0, prove: bool = False
) -> Solution:
    """The cheapest plan found whose peak is at most `limit - margin`.

    Decision table, in order; the search ends when a plan is within 2 % of the proved bound or the
    work is used up, and the best plan met is returned:

    | situation                          | what is tried                                     |
    |------------------------------------|---------------------------------------------------|
    | keeping everything fits            | that; nothing is replayed                         |
    | always                             | greedy at the peak                                |
    | always                             | minimum cuts at the plain peak, prices around the |
    |                                    | limit, each repaired                              |
    | no cut is near the bound           | the same with anchors held, few to many, and what |
    |                                    | one simulation says is most promising first       |
    | nothing fits                       | the search of `minimum`, ended when the limit is  |
    |                                    | reached; what is left is held again               |
    | something fits                     | exchanges of what the cheapest plans hold         |
    | nothing does, or twice the bound   | anchors of two levels; exchanges where they help  |
    | nothing fits even so               | "infeasible", with the lowest peak met            |

    With `prove`, as much time again goes into raising the bound; the plan stays the same.
    """
    began = perf_counter()
    search = _Search(Problem(Simulator(graph)), limit - margin, began + time_limit)
    if not search.fits:
        search.offer(greedy(search.problem, search.limit), "greedy")
        if len(search.problem.sim.cost) > LARGE:
            _anchors(search)
        _cuts(search)
    if not search.fits:
        low = _lowest(search.problem, search.limit, search.deadline)
        search.offer(grow(search.problem, low.best, search.limit), low.method)
    _exchange(search)
    if search.doubtful() and _nested(search):
        _exchange(search)
    if prove and search.price is not None and search.fits and not search.near_bound():
        search.bound = raised(
            search.problem, search.limit, search.plain, search.best, search.price, search.bound
        )
    return _solution(search, graph, began)


def minimum(graph: Graph, *, time_limit: float = 60.0) -> Solution:
    """The lowest peak that the planner can reach.

    Greedy and anchors are pushed down as far as they go; then the best of them is asked for less,
    move by move. `solve` follows the same path, so a limit of this peak can be solved.
    """
    began = perf_counter()
    search = _lowest(Problem(Simulator(graph)), 0, began + time_limit)
    # The limit that was met is the peak found, so the answer fits by definition.
    search.limit = search.best.result.peak
    return _solution(search, graph, began)


def _solution(search: _Search, graph: Graph, began: float) -> Solution:
    result = search.best.result
    return Solution(
        status="fits" if search.fits else "infeasible",
        plan=Retention(tuple(search.best.retain), graph.fingerprint),
        peak=result.peak,
        seconds=result.seconds,
        plain_peak=search.plain.result.peak,
        lower_bound=min(search.bound, result.seconds) if search.fits else None,
        evaluations=search.problem.sim.evaluations,
        solve_seconds=perf_counter() - began,
        method=search.method,
    )


def _near(cuts: dict[float, Cut], room: int) -> Iterator[Cut]:
    """Distinct cuts, those whose bytes are nearest to the room first."""
    seen: set[frozenset[int]] = set()
    order = sorted(cuts.items(), key=lambda item: (abs(item[1].nbytes - room), item[0]))
    for _, cut in order:
        if cut.held not in seen:
            seen.add(cut.held)
            yield cut


def _cuts(search: _Search) -> None:
    problem, limit = search.problem, search.limit
    sim = problem.sim
    at = peak_moment(search.plain.result)
    weight = moment_weights(sim, at)
    room = room_at(sim, at, limit)
    event = at[1] if at[0] == "backward" else 0
    model = CutModel(sim, weight, event)
    # A bound that shows the greedy plan to be good enough needs no better one.
    cuts = hull(model, sim, room, enough=search.wanted_bound())
    search.stop -= CUT_WORK * len(cuts)
    search.bound = lower_bound(room, cuts)
    free = free_holds(sim, weight)
    if search.done():
        return
    if at[0] == "backward":
        search.price = at[1], best_price(room, cuts)
    stop = sim.evaluations + search.allowed // 4
    for held in _starts(search, cuts, weight, room, event):
        _start(search, held | free)
        if search.done() or (search.fits and sim.evaluations > stop):
            break
    if search.price is None or not search.fits or search.near_bound():
        return
    for event in worst_moments(trace_of(search.plain.result).backward, limit, MOMENTS):
        if event != search.price[0]:
            at = "backward", event
            weight, room = moment_weights(sim, at), room_at(sim, at, limit)
            cuts = hull(CutModel(sim, weight, event), sim, room, steps=3, first=search.price[1])
            for cut in list(_near(cuts, room))[:NEAREST]:
                _start(search, cut.held | free_holds(sim, weight))


def _start(search: _Search, held: frozenset[int]) -> None:
    """Repair what a cut would hold."""
    problem, limit = search.problem, search.limit
    found = shrink(problem, problem.start(held), limit)
    if not search.fits or found.result.seconds <= HOPELESS * search.best.result.seconds:
        found = grow(problem, found, limit)
    search.offer(found, "cut")


def _starts(
    search: _Search, cuts: dict[float, Cut], weight: list[int], room: int, event: int
) -> Iterable[frozenset[int]]:
    """Starting points: the nearest cut; cuts with and without anchors, as promising as they are.

    A cut knows one moment. Where replays stand at the peak, what is nearest there is far from
    fitting, and its repair ends far from the best plan; one simulation of each tells.
    """
    near = [cut.held for cut in _near(cuts, room)]
    yield near[0]
    sim = search.problem.sim
    if search.fits and search.best.result.seconds <= FAR * search.bound:
        yield from near[1 : NEAREST + 1]
        tried = []
    else:
        tried = near[1 : NEAREST + 1]
    tried += _anchored(search, cuts, weight, room, event)
    free = free_holds(sim, weight)
    found = [
        _promise(search, search.problem.run(search.problem.start(held | free))) for held in tried
    ]
    for place in sorted(range(len(tried)), key=lambda place: (found[place], place)):
        yield tried[place]
    yield from near[NEAREST + 1 :]


def _anchored(
    search: _Search, cuts: dict[float, Cut], weight: list[int], room: int, event: int
) -> Iterator[frozenset[int]]:
    """Cuts with anchors held, few to many."""
    price = min(cuts, key=lambda price: (abs(cuts[price].nbytes - room), price)) / 2
    sim = search.problem.sim
    bounds = Boundaries(sim)
    for segments in SEGMENTS[:: max(SCREEN * len(SEGMENTS) // search.allowed, 1)]:
        anchors = bounds.anchors(bounds.places(segments))
        taken = sum(weight[v] for v in anchors)
        if not anchors or taken > room:
            continue
        unanchored = [0 if v in anchors else size for v, size in enumerate(weight)]
        model = CutModel(sim, unanchored, event)
        inner = hull(model, sim, room - taken, steps=5, first=price)
        search.stop -= CUT_WORK * len(inner)
        yield next(_near(inner, room - taken)).held | anchors


def _anchors(search: _Search) -> None:
    """Offer every number of anchors as it is, one simulation each, and improve the best.

    A large graph leaves a search too few simulations to shrink each of them.
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


def _nested(search: _Search) -> bool:
    """Anchors of two levels: held, and retained when the replay of a segment passes by.

    Whether that is better than the best plan so far.
    """
    before, problem, limit = search.best, search.problem, search.limit
    bounds = Boundaries(problem.sim)
    found: list[tuple[float, int, Candidate]] = []
    for outer in OUTER[:: max(2 * SCREEN * len(OUTER) // search.allowed, 1)]:
        for inner in INNER:
            places = sorted({*bounds.places(outer), *bounds.places(outer * inner)})
            retain = problem.start(bounds.anchors(bounds.places(outer)))
            for value, event in bounds.waiting(places).items():
                if retain[value] != HOLD:
                    retain[value] = event
            candidate = Candidate(retain, problem.run(retain))
            found.append((_promise(search, candidate.result), len(found), candidate))
    stop = problem.sim.evaluations + search.allowed // 2
    for _, _, candidate in sorted(found):
        repaired = grow(problem, shrink(problem, candidate.retain, limit), limit)
        if repaired.key(limit) < search.best.key(limit):  # no worse plans to exchange from
            search.offer(repaired, "anchors")
        if problem.sim.evaluations > stop:
            break
    return search.best is not before


def _promise(search: _Search, result: Simulation) -> float:
    """What a starting point may cost once it fits: time, and a price for what it is over."""
    dear = DEAR * sum(search.problem.sim.cost) / max(search.limit, 1)
    return result.seconds + dear * max(result.peak - search.limit, 0)


def _exchange(search: _Search) -> None:
    """Exchange what the cheapest plans hold for something better, until the work is used up."""
    sim, pool = search.problem.sim, search.pool
    size = len(sim.cost) + len(sim.event_value) + CONSTANT
    stop = sim.evaluations + max(EXCHANGE_WORK // size, 24)
    while sim.evaluations < stop and perf_counter() < search.deadline:
        if search.near_bound() or not pool.step():
            break
    if pool.best is not None:
        search.offer(pool.best, "exchange")


def _lowest(problem: Problem, enough: int, deadline: float) -> _Search:
    """Search for the lowest peak; ends once it is at most `enough`, on the same path."""
    search = _Search(problem, 0, deadline)
    search.offer(greedy(problem, 0), "greedy")
    if len(problem.sim.cost) > LARGE:
        _anchors(search)
    bounds = Boundaries(problem.sim)
    named = _in_memory_anyway(problem.sim)
    for segments in SEGMENTS:
        held = _lower_start(problem, bounds.anchors(bounds.places(segments)), named)
        for limit in (search.best.result.peak * 9 // 10, 0):
            search.offer(shrink(problem, problem.start(held), limit), "anchors")
        if search.best.result.peak <= enough or search.done():
            break
    _lower(search, enough)
    return search


def _in_memory_anyway(sim: Simulator) -> frozenset[int]:
    """Saved values that nothing can take away from the operation with the least room for others."""
    if not sim.forward_peak:
        return frozenset()
    least = sim.forward_peak.index(max(sim.forward_peak))
    return free_holds(sim, moment_weights(sim, ("forward", least)))


def _lower_start(
    problem: Problem, anchors: frozenset[int], named: frozenset[int]
) -> frozenset[int]:
    """Anchors alone, or with what the forward has room for anyway: whatever has the lower peak."""
    both = anchors | named
    alone, more = (problem.run(problem.start(held)).peak for held in (anchors, both))
    return both if more < alone else anchors


def _lower(search: _Search, enough: int) -> None:
    """Ask for less than the best peak met, by steps that shrink whenever one fails."""
    sim = search.problem.sim
    stop = sim.evaluations + search.allowed
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
