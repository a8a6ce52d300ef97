"""Choosing a plan: which search methods to use, in which order, and when to stop.

Problem: no single method is best at every limit, and the user waits while the planner searches.

Invariant: deterministic. Work is counted in simulated operations, not seconds, so the same graph
and limit give the same plan on any machine; `time_limit` is a guard that only ends a search early.

Imports: the other modules of `lowtide.planner`.

Rejected: annealing in place of the searches. It has to start from a plan that fits and needs tens
of thousands of evaluations, which take minutes here. If the caller has a simulator that is fast
enough, annealing follows the searches: see `polish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
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
from lowtide.planner.relaxed import PriceWith
from lowtide.planner.repair import Problem, grow, shrink, trace_of
from lowtide.planner.search import LARGE, SCREEN, SEGMENTS, Search, nested_anchors, offer_anchors
from lowtide.planner.segments import Boundaries
from lowtide.planner.simulate import Simulation, Simulator
from lowtide.planner.small import holding_small
from lowtide.planner.solution import Solution

TIME_LIMIT = 60.0
"""Seconds after which a search ends early, on a machine too slow for it."""
EXCHANGE_WORK = 400_000
"""Operations and events that the exchanges may simulate, as `search.WORK` for the rest."""
_EVEN = 1e-6
"""Seconds of an operation whose own do not count."""
CONSTANT = 100
"""Overhead of a simulation, in operations, so that searches of tiny graphs are bounded too."""
MOMENTS = 3
"""Moments besides that of the plain peak whose cuts are starting points."""
NEAREST = 3
"""Cuts at a moment that are repaired first."""
CUT_WORK = 2
"""One cut takes as long as this many simulations."""
HOPELESS = 1.5
"""A plan that takes this many times the best one's time will not overtake it by holding more."""
FAR = 3.0
"""If the best plan takes more than this many times the bound, replays dominate the peak: cuts with
anchors are then ranked with the nearest cuts, not tried after them."""
DEAR = 2.0
"""In `_promise`, an excess as large as the limit counts as this many times the forward's time."""


def solve(
    graph: Graph,
    limit: int,
    *,
    margin: int = 0,
    time_limit: float = TIME_LIMIT,
    prove: bool = False,
    polish_with: Polish | None = None,
    cut_with: CutWith | None = None,
    price_with: PriceWith | None = None,
) -> Solution:
    """The cheapest plan found whose peak is at most `limit - margin`.

    Decision table, in order. The search ends when a plan is within 2 % of the proved bound or the
    work is used up, and returns the best plan found:

    | situation                          | what is tried                                     |
    |------------------------------------|---------------------------------------------------|
    | keeping everything fits            | that; nothing is replayed                         |
    | it does not fit                    | greedy at the peak                                |
    | it does not fit                    | minimum cuts at the plain peak, at prices around  |
    |                                    | the limit; each cut is repaired                   |
    | no cut is near the bound           | the same with anchors held, few to many; the most |
    |                                    | promising first, judged by one simulation each    |
    | nothing fits yet                   | the search of `minimum`, until the limit is met;  |
    |                                    | what there is room for is then held again         |
    | something fits                     | exchanges of what the cheapest plans hold         |
    | nothing fits, or the best plan     | anchors of two levels, and exchanges again if     |
    | takes over twice the bound         | they gave a better plan                           |
    | something fits                     | small values held, as far as they save time       |
    | something fits, `polish_with` is   | random changes to the best plan, for less than a |
    | given and the graph is not large   | second                                            |
    | nothing fits after all that        | "infeasible", with the lowest peak found          |

    `polish_with` never decides whether something fits: the same limits are refused without it.
    With `prove`, as much time again is spent on raising the bound; the plan stays the same.
    `cut_with` makes that faster, so that more is proved; with `price_with`, linear programs come
    first, and cuts where these leave much unproved.
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
    if search.fits and not search.near_bound():
        small = holding_small(search)
        search.offer(small[0], "small")
        if polish_with is not None and not search.near_bound():
            polish(search, polish_with, *small)
    if prove and search.fits and not search.near_bound():
        search.bound = raised(search, cut_with, price_with)
    return search.solution(began)


def minimum(graph: Graph, enough: int = 0, *, by_sizes: bool = False) -> Solution:
    """The plan with the lowest peak that the planner can reach, or the first one found whose peak
    is at most `enough`.

    Greedy and anchored plans are shrunk as far as they go; then single moves lower the best of them
    further. Times say where that begins, so a graph that is not large is also searched as if all
    operations took equally long, which sometimes ends far lower.

    `by_sizes`: only so. Another measurement of the same step has other times, but its lowest peak
    is then the same.
    """
    least = None if by_sizes else _lowest_of(graph, enough)
    if least is not None and (least.peak <= enough or len(graph.ops) > LARGE):
        return least
    even = replace(graph, ops=tuple([replace(op, seconds=_EVEN) for op in graph.ops]))
    other = _lowest_of(even, enough)
    if least is not None and least.peak <= other.peak:
        return least
    seconds = Simulator(graph).run(other.plan.retain).seconds
    return replace(other, seconds=seconds, lower_bound=None)


def _lowest_of(graph: Graph, enough: int) -> Solution:
    began = perf_counter()
    search = lowest(Problem(Simulator(graph)), enough, began + TIME_LIMIT)
    # The peak that was found is the limit, so that the status is "fits".
    search.limit = search.best.result.peak
    return search.solution(began)


def _near(cuts: dict[float, Cut], room: int) -> Iterator[Cut]:
    """Distinct cuts, the ones whose bytes are nearest to the room first."""
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
    # Once the bound shows that the greedy plan is good enough, a better bound is not needed.
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
    """Repair the plan that holds these values, and offer it."""
    problem, limit = search.problem, search.limit
    found = shrink(problem, problem.start(held), limit)
    if not search.fits or found.result.seconds <= HOPELESS * search.best.result.seconds:
        found = grow(problem, found, limit)
    search.offer(found, "cut")


def _starts(
    search: Search, cuts: dict[float, Cut], weight: list[int], room: int, event: int
) -> Iterable[frozenset[int]]:
    """Starting points: the nearest cut, then cuts with and without anchors, most promising first.

    A cut knows only one moment. Where replays dominate the peak, the nearest cut is far from
    fitting, and repairing it ends far from the best plan; so each is simulated once and ranked.
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
    """Cuts with anchors held: few anchors first, then more."""
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
    """Anchors of two levels: some held, others retained when a replay recomputes their segment.

    Returns whether that gave a plan better than the best so far.
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
    """An estimate of what a starting point will cost once it fits: its time, and its excess over
    the limit at a price."""
    dear = DEAR * sum(search.problem.sim.cost) / max(search.limit, 1)
    return result.seconds + dear * max(result.peak - search.limit, 0)


def _exchange(search: Search) -> None:
    """Exchange values that the cheapest plans hold for others, until the work is used up."""
    sim, pool = search.problem.sim, search.pool
    size = len(sim.cost) + len(sim.event_value) + CONSTANT
    stop = sim.evaluations + max(EXCHANGE_WORK // size, 24)
    while sim.evaluations < stop and perf_counter() < search.deadline:
        if search.near_bound() or not pool.step():
            break
    if pool.best is not None:
        search.offer(pool.best, "exchange")
