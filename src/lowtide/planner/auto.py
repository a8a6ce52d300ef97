"""Choosing a plan: which way of searching, in which order, and when to stop.

Problem: no single method is best at every limit, and a user waits while it searches.

Invariant: deterministic. Work is counted in simulated operations, not seconds, so the same graph
and limit give the same plan on any machine; `time_limit` is a guard that only ends a search early.

Imports: the other modules of `lowtide.planner`.

Rejected: annealing in place of the searches. It needs a plan that fits to begin with, and tens of
thousands of evaluations, which take minutes here; where somebody brings a simulator that is fast
enough, it comes after them, see `polish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter

from lowtide.planner.cut import (
    Cut,
    CutModel,
    best_price,
    free_holds,
    hull,
    lower_bound,
    moment_weights,
    number_of,
    peak_moment,
    room_at,
)
from lowtide.planner.flow import CutWith
from lowtide.planner.graph import Graph
from lowtide.planner.greedy import greedy
from lowtide.planner.lowest import lowest
from lowtide.planner.moments import worst_moments
from lowtide.planner.polish import Polish, polish
from lowtide.planner.prove import prove as raised
from lowtide.planner.repair import Problem, grow, shrink, trace_of
from lowtide.planner.search import LARGE, SCREEN, SEGMENTS, Search, nested_anchors, offer_anchors
from lowtide.planner.segments import Boundaries
from lowtide.planner.simulate import Simulation, Simulator
from lowtide.planner.solution import Solution

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
HOPELESS = 1.5
"""A plan that takes this many times the best one's time will not overtake it by holding again."""
FAR = 3.0
"""A first plan above so many times the bound: replays stand at the peak, anchors are needed."""
DEAR = 2.0
"""Of a starting point, what an excess as large as the limit counts as, in forwards."""


def solve(
    graph: Graph,
    limit: int,
    *,
    margin: int = 0,
    time_limit: float = 60.0,
    prove: bool = False,
    polish_with: Polish | None = None,
    cut_with: CutWith | None = None,
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
    | something fits, `polish_with` is   | the best plan changed at random, as often as half |
    | there and the graph is not large   | a second allows                                   |
    | nothing fits even so               | "infeasible", with the lowest peak met            |

    `polish_with` never decides whether something fits: a limit is refused with it or without.
    With `prove`, as much time again goes into raising the bound; the plan stays the same. With
    `cut_with` that proves more.
    """
    began = perf_counter()
    search = Search(Problem(Simulator(graph)), limit - margin, began + time_limit)
    if not search.fits:
        search.offer(greedy(search.problem, search.limit), "greedy")
        if len(search.problem.sim.cost) > LARGE:
            offer_anchors(search)
        _cuts(search)
    if not search.fits:
        low = lowest(search.problem, search.limit, search.deadline)
        search.offer(grow(search.problem, low.best, search.limit), low.method)
    _exchange(search)
    if search.doubtful() and _nested(search):
        _exchange(search)
    if polish_with is not None and search.fits and not search.near_bound():
        polish(search, polish_with)
    if prove and search.main is not None and search.fits and not search.near_bound():
        search.bound = raised(
            search.problem, search.limit, search.plain, search.best, search.main, search.bound,
            cut_with,
        )  # fmt: skip
    return search.solution(began)


def minimum(graph: Graph, *, time_limit: float = 60.0) -> Solution:
    """The lowest peak that the planner can reach.

    Greedy and anchors are pushed down as far as they go; then the best of them is asked for less,
    move by move. `solve` follows the same path, so a limit of this peak can be solved.
    """
    began = perf_counter()
    search = lowest(Problem(Simulator(graph)), 0, began + time_limit)
    # The limit that was met is the peak found, so the answer fits by definition.
    search.limit = search.best.result.peak
    return search.solution(began)


def _near(cuts: dict[float, Cut], room: int) -> Iterator[Cut]:
    """Distinct cuts, those whose bytes are nearest to the room first."""
    seen: set[frozenset[int]] = set()
    order = sorted(cuts.items(), key=lambda item: (abs(item[1].nbytes - room), item[0]))
    for _, cut in order:
        if cut.held not in seen:
            seen.add(cut.held)
            yield cut


def _cuts(search: Search) -> None:
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
    search.main = number_of(sim, at), best_price(room, cuts)
    if at[0] == "backward":
        search.price = search.main
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


def _start(search: Search, held: frozenset[int]) -> None:
    """Repair what a cut would hold."""
    problem, limit = search.problem, search.limit
    found = shrink(problem, problem.start(held), limit)
    if not search.fits or found.result.seconds <= HOPELESS * search.best.result.seconds:
        found = grow(problem, found, limit)
    search.offer(found, "cut")


def _starts(
    search: Search, cuts: dict[float, Cut], weight: list[int], room: int, event: int
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
    search: Search, cuts: dict[float, Cut], weight: list[int], room: int, event: int
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


def _nested(search: Search) -> bool:
    """Anchors of two levels: held, and retained when the replay of a segment passes by.

    Whether that is better than the best plan so far.
    """
    before, problem, limit = search.best, search.problem, search.limit
    found = [
        (_promise(search, candidate.result), number, candidate)
        for number, candidate in enumerate(nested_anchors(search))
    ]
    stop = problem.sim.evaluations + search.allowed // 2
    for _, _, candidate in sorted(found):
        repaired = grow(problem, shrink(problem, candidate.retain, limit), limit)
        if repaired.key(limit) < search.best.key(limit):  # no worse plans to exchange from
            search.offer(repaired, "anchors")
        if problem.sim.evaluations > stop:
            break
    return search.best is not before


def _promise(search: Search, result: Simulation) -> float:
    """What a starting point may cost once it fits: time, and a price for what it is over."""
    dear = DEAR * sum(search.problem.sim.cost) / max(search.limit, 1)
    return result.seconds + dear * max(result.peak - search.limit, 0)


def _exchange(search: Search) -> None:
    """Exchange what the cheapest plans hold for something better, until the work is used up."""
    sim, pool = search.problem.sim, search.pool
    size = len(sim.cost) + len(sim.event_value) + CONSTANT
    stop = sim.evaluations + max(EXCHANGE_WORK // size, 24)
    while sim.evaluations < stop and perf_counter() < search.deadline:
        if search.near_bound() or not pool.step():
            break
    if pool.best is not None:
        search.offer(pool.best, "exchange")
