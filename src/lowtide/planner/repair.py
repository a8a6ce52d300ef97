"""Bringing a plan under a limit, and then using the room that is left.

Problem: a cut knows only one moment of the step, and not the memory of replays. Its plan may exceed
the limit elsewhere, or leave room unused.

Invariant: estimates only choose among moves; the simulator alone decides whether a plan fits and
what it costs. All loops go over ids in a fixed order, so equal input gives equal output.

Imports: `lowtide.planner.simulate`, `lowtide.planner.retention`.

Rejected: trying every move with the simulator. It finds little that the estimates do not, and
takes a thousand evaluations where this takes a few dozen.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest

from lowtide.planner.heights import Heights
from lowtide.planner.retention import HOLD, NEVER
from lowtide.planner.simulate import ABSENT, Simulation, Simulator, Trace

EXPLODED = 8.0
"""A plan that replays more than this many forwards is not worth simulating to the end."""


FEW, PARTS = 40, 32
"""For `_cover`: how many values it considers, and into how many parts it divides the excess."""


@dataclass(slots=True)
class Problem:
    """A simulator, and the facts about its graph that all solvers need."""

    sim: Simulator
    gone: frozenset[int] = frozenset()
    """Values that no plan may hold from the forward on: they are already dropped, or will be
    overwritten (`Graph.fleeting`)."""
    fixed: list[bool] = field(init=False)
    """For each value, whether it is always held: it must be, or holding it is free."""
    seconds_cap: float = field(init=False)

    def __post_init__(self) -> None:
        graph = self.sim.graph
        self.fixed = list(self.sim.free)
        for value in graph.must_hold:
            self.fixed[value] = True
        self.gone |= graph.fleeting
        self.seconds_cap = EXPLODED * sum(self.sim.cost)

    def dropped(self, value: int) -> int:
        """The decision that drops a value and retains it the first time it is recomputed."""
        return 0 if self.sim.release[value] >= 0 else NEVER

    def less_of(self, value: int, trace: Trace, event: int) -> int | None:
        """The decision that takes a value, now in memory at an event (-1: in the forward), out of
        it; None: there is none.

        A held value is dropped. A value that a replay retains is retained later, unless a node that
        asked for it has it at the event in any case. A value that only a retained graph still keeps
        at the event is never retained.
        """
        graph = self.sim.graph
        if graph.needed[value] < event <= graph.release[value]:
            return NEVER
        if trace.start[value] == -1:
            return self.dropped(value)
        return event + 1 if self.later(value, event) else None

    def later(self, value: int, event: int) -> bool:
        """Whether a plan that retains a value only after an event is without it at the event."""
        graph = self.sim.graph
        if graph.latest[value] <= event:
            return False
        asked = graph.asked[value]
        before = bisect_right(asked, event) - 1
        return before < 0 or graph.ends[asked[before]] < event

    def start(self, held: set[int] | frozenset[int]) -> list[int]:
        """The plan that holds these values and retains others once they are recomputed."""
        return [
            HOLD if fixed or (v in held and v not in self.gone) else self.dropped(v)
            for v, fixed in enumerate(self.fixed)
        ]

    def keep_all(self) -> list[int]:
        """The plan that holds every saved value."""
        return [
            HOLD if fixed or self.sim.release[v] >= 0 else NEVER
            for v, fixed in enumerate(self.fixed)
        ]

    def run(self, retain: list[int], seconds_cap: float = float("inf")) -> Simulation:
        """Simulate with a trace."""
        cap = min(seconds_cap, self.seconds_cap)
        return self.sim.run(retain, trace=True, seconds_limit=cap)


@dataclass(slots=True)
class Candidate:
    """A plan and its simulation."""

    retain: list[int]
    result: Simulation

    def key(self, limit: int) -> tuple[int, float, int]:
        """Sort key, best first: least excess over the limit, then least time, then least peak."""
        over = max(self.result.peak - limit, 0) if self.result.complete else 1 << 100
        return over, self.result.seconds, self.result.peak


def shrink(
    problem: Problem,
    retain: list[int],
    limit: int,
    rounds: int = 40,
    frozen: frozenset[int] = frozenset(),
    seconds_cap: float = float("inf"),
    moved: list[int] | None = None,
) -> Candidate:
    """Drop values at the peak, most bytes for the least time first, until the plan fits.

    Each round makes enough moves to cover the excess and simulates once. Returns the best plan
    found, which may still exceed the limit. Decisions for `frozen` values do not change; a plan
    that replays for more than `seconds_cap` is given up. Values that were moved are appended to
    `moved`.
    """
    retain = retain.copy()
    result = problem.run(retain, seconds_cap)
    best = Candidate(retain.copy(), result)
    stale = 0
    for _ in range(rounds):
        if not result.complete or result.peak <= limit or stale > 12:
            break
        moves = _moves(problem, result, result.peak - limit, frozen)
        if not moves:
            break
        for value, choice in moves:
            retain[value] = choice
        if moved is not None:
            moved += [value for value, _ in moves]
        result = problem.run(retain, seconds_cap)
        found = Candidate(retain.copy(), result)
        if found.key(limit) < best.key(limit):
            best, stale = found, 0
        else:
            stale += 1
    return best


def live_at_peak(problem: Problem, result: Simulation) -> list[int]:
    """Values that a plan has in memory at the peak although nothing uses them there."""
    sim, trace = problem.sim, trace_of(result)
    phase, index = result.peak_at
    start, alive, fixed = trace.start, trace.alive, problem.fixed
    if phase == "forward":
        stays = sim.stays
        return [
            v
            for v, at in enumerate(start)
            if at == -1 and not fixed[v] and alive[v] >= 0 and stays[v] < index
        ]
    used = {sim.event_value[index]}
    if trace.peak_op >= 0:
        used.update(sim.reads[trace.peak_op])
    return [
        v
        for v, at in enumerate(start)
        if at <= index <= alive[v] and not fixed[v] and v not in used
    ]


def _moves(
    problem: Problem, result: Simulation, excess: int, frozen: frozenset[int]
) -> list[tuple[int, int]]:
    """The cheapest moves at the peak that together should cover the excess."""
    sim, trace = problem.sim, trace_of(result)
    event = -1 if result.peak_at[0] == "forward" else result.peak_at[1]
    gone: set[int] = set()
    paid: set[int] = set()
    heap: list[tuple[float, int]] = []
    for value in live_at_peak(problem, result):
        size = sim.nbytes[value]
        if size and value not in frozen and problem.less_of(value, trace, event) is not None:
            cost, _ = closure_cost(sim, trace, value, gone, paid)
            heap.append((cost / size, value))
    heapify(heap)
    spare = [(ratio * sim.nbytes[value], value) for ratio, value in nsmallest(FEW, heap)]
    needed = excess
    chosen: list[int] = []
    spent = 0.0
    while heap and excess > 0:
        _, value = heappop(heap)
        size = sim.nbytes[value]
        cost, ops = closure_cost(sim, trace, value, gone, paid)
        if heap and cost / size > heap[0][0] * 1.000001:
            heappush(heap, (cost / size, value))
            continue
        chosen.append(value)
        spent += cost
        gone.add(value)
        paid.update(ops)
        excess -= size
    if len(chosen) > 1 or (chosen and excess < 0):
        cost, cover = _cover(sim, spare, needed)
        if cost < spent:
            chosen = cover
    choices = [(value, problem.less_of(value, trace, event)) for value in chosen]
    return [(value, choice) for value, choice in choices if choice is not None]


def _cover(sim: Simulator, spare: list[tuple[float, int]], needed: int) -> tuple[float, list[int]]:
    """The cheapest values that together have `needed` bytes: a knapsack over sizes in coarse parts,
    as if their costs were independent.

    Taking the cheapest per byte first overshoots if the last one taken is large.
    """
    costs = [0.0] + [float("inf")] * PARTS
    chosen: list[tuple[int, ...]] = [()] * (PARTS + 1)
    for cost, value in spare:
        parts = sim.nbytes[value] * PARTS // needed
        for have in range(PARTS if parts else 0, 0, -1):
            total = costs[max(have - parts, 0)] + cost
            if total < costs[have]:
                costs[have] = total
                chosen[have] = (*chosen[max(have - parts, 0)], value)
    return costs[PARTS], list(chosen[PARTS])


def closure_cost(
    sim: Simulator, trace: Trace, value: int, gone: set[int], paid: set[int]
) -> tuple[float, list[int]]:
    """Estimate the cost of dropping a value: the operations of its closure not replayed anyway.

    A value that is retained was already replayed once; to retain it later replays its closure
    again.
    """
    again = trace.start[value] >= 0
    replays, start, reads, producer = trace.replays, trace.start, sim.reads, sim.producer
    op = producer[value]
    if op in paid or (replays[op] and not again):
        return 0.0, []
    ops = [op]
    seen = {op}
    cost = 0.0
    for op in ops:
        cost += sim.cost[op]
        for x in reads[op]:
            if start[x] != ABSENT and x not in gone:
                continue
            maker = producer[x]
            if maker in seen or maker in paid or (replays[maker] and not again):
                continue
            seen.add(maker)
            ops.append(maker)
    return cost, ops


def grow(
    problem: Problem,
    candidate: Candidate,
    limit: int,
    rounds: int = 6,
    frozen: frozenset[int] = frozenset(),
) -> Candidate:
    """Hold values again, or retain them earlier, until nothing more fits.

    The largest saving goes first. If a batch of moves does not help as a whole, half of it is
    tried.
    """
    best = candidate
    for _ in range(rounds):
        before = best
        for find in (_returns, _advances):
            if best.result.peak > limit:
                return best
            moves = [move for move in find(problem, best, limit) if move[0] not in frozen]
            take = len(moves)
            while take:
                retain = best.retain.copy()
                for value, choice in moves[:take]:
                    retain[value] = choice
                result = problem.run(retain)
                if (
                    result.complete
                    and (result.peak <= limit)
                    and (result.seconds < best.result.seconds)
                ):
                    best = Candidate(retain, result)
                    break
                take //= 2
        if best is before:
            break
    return best


def _advances(problem: Problem, candidate: Candidate, limit: int) -> list[tuple[int, int]]:
    """Values to retain from an earlier replay than now, so that later replays are not needed."""
    sim, trace = problem.sim, trace_of(candidate.result)
    profile = Heights(trace.backward)
    missed = trace.missed_at()
    ranked = sorted(
        (-len(events) * sim.cost[sim.producer[value]], value) for value, events in missed.items()
    )
    moves = []
    for _, value in ranked:
        size, at = sim.nbytes[value], trace.start[value]
        stop = at if at != ABSENT else sim.release[value] + 1
        for event in missed[value]:
            if profile.highest(event + 1, stop) + size <= limit:
                moves.append((value, event))
                profile.add(event + 1, stop, size)
                break
    return moves


def _returns(problem: Problem, candidate: Candidate, limit: int) -> list[tuple[int, int]]:
    """Values to hold again, judged by the plan's current profile of bytes."""
    sim, trace = problem.sim, trace_of(candidate.result)
    split, end = len(trace.forward), len(trace.forward) + len(trace.backward)
    profile = Heights(trace.forward + trace.backward)
    replays = trace.replays.copy()
    ranked = []
    for value, at in enumerate(trace.start):
        if at == -1 or trace.alive[value] < 0 or not replays[max(sim.producer[value], 0)]:
            continue
        if value in problem.gone:
            continue
        seconds, _ = saving(sim, trace, value, replays)
        if seconds > 0:
            ranked.append((-seconds, value))
    ranked.sort()
    taken = []
    for _, value in ranked:
        at = trace.start[value]
        stop = split + at if at != ABSENT else min(split + trace.alive[value] + 1, end)
        begin = min(sim.stays[value] + 1, split)
        size = sim.nbytes[value]
        if profile.highest(begin, stop) + size > limit:
            continue
        seconds, ops = saving(sim, trace, value, replays)
        if seconds <= 0:
            continue
        taken.append((value, HOLD))
        for op in ops:
            replays[op] = 0
        profile.add(begin, stop, size)
    return taken


def saving(sim: Simulator, trace: Trace, value: int, replays: list[int]) -> tuple[float, list[int]]:
    """Estimate the replays that holding a value saves: its producer, and ancestors that are then
    unused."""
    consumers = sim.graph.consumers
    dead: set[int] = set()
    order: list[int] = []
    stack = [value]
    seconds = 0.0
    while stack:
        held = stack.pop()
        op = sim.producer[held]
        if op < 0 or op in dead or not replays[op]:
            continue
        if any(
            w != held
            and trace.start[w] != -1
            and (sim.release[w] >= 0 or any(replays[c] and c not in dead for c in consumers[w]))
            for w in sim.outputs[op]
        ):
            continue
        dead.add(op)
        order.append(op)
        seconds += replays[op] * sim.cost[op]
        for x in sim.reads[op]:
            if (
                trace.start[x] != -1
                and sim.release[x] < 0
                and not any(replays[c] and c not in dead for c in consumers[x])
            ):
                stack.append(x)
    return seconds, order


def trace_of(result: Simulation) -> Trace:
    assert result.trace is not None, "the solvers simulate with a trace"
    return result.trace
