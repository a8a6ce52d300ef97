"""A lower bound that counts second replays, by branching on what is held from the forward.

Problem: with one payment for each operation, however often it is replayed, a bound stays points
below the best plan wherever what is replayed early cannot stay in memory to its later use.

Invariant: valid for every plan. The step is split at one event. A value that is asked for up to
there is held from the forward, or its producer is replayed by then, paid for, and paid for once
more if it is replayed later. Each branch decides for one value; the bound is the least of the
branches that are left.

Imports: `lowtide.planner.moments`, `lowtide.planner.flow`, `lowtide.planner.repair`.

Rejected: an integer program with a solver, which proves the same without prices, in minutes.
"""

from __future__ import annotations

from heapq import heappop, heappush

from lowtide.planner.cut import SCALE
from lowtide.planner.flow import INFINITE, Network
from lowtide.planner.moments import Moments, raise_bound
from lowtide.planner.repair import Problem

Held = dict[int, bool]
"""Of some values, whether they are held from the forward on."""
CLIMBS = 4
"""Cuts with which the prices of a branch are moved."""


class Branch(Moments):
    """Cuts at several moments where it is decided of some values whether they are held."""

    def __init__(self, problem: Problem, moments: list[int], limit: int, split: int) -> None:
        super().__init__(problem.sim, moments, limit)
        self.problem = problem
        self.split = split
        network, sim = self.network, problem.sim
        later = [event >= split for event in moments]
        # Of each value, (moment, arc to its producer, arc to pay without being replayed).
        self.arcs: dict[int, list[tuple[int, int, int]]] = {}
        self.counted: list[list[tuple[int, int, int, int]]] = []
        first: dict[int, int] = {}
        again: dict[int, int] = {}
        for index, nodes in enumerate(self.replays):
            for op, node in nodes.items():
                if later[index] and op not in again:
                    again[op] = network.arc(node, Network.SINK, 0)
                first.setdefault(op, node)
        for index, priced in enumerate(self.priced):
            for value, (arc, _, here, _) in zip(self.values[index], priced, strict=True):
                pay = network.arc(here, Network.SINK, 0)
                self.arcs.setdefault(value, []).append((index, arc, pay))
        self.first, self.again = first, again
        self.plain = network.snapshot()
        self.held: Held = dict.fromkeys(sim.graph.must_hold, True)
        self.branched: list[int] = []

    def forced(self) -> list[int] | None:
        """Operations that are replayed by the split, in the order found; None: one cannot be."""
        sim, first_event = self.problem.sim, self.problem.sim.graph.first_event
        found = dict.fromkeys(
            sim.producer[v] for v, held in self.held.items()
            if not held and 0 <= first_event[v] <= self.split
        )  # fmt: skip
        work = list(found)
        for op in work:
            if not sim.replayable[op]:
                return None
            for x in sim.reads[op]:
                if self.held.get(x) is False and sim.producer[x] not in found:
                    found[sim.producer[x]] = None
                    work.append(sim.producer[x])
        return work

    def decide(self, held: Held) -> bool:
        """Take these decisions; False when no plan has them."""
        self.held = held
        work = self.forced()
        if work is None:
            return False
        self.work = work
        sim = self.problem.sim
        room = self.plain.copy()
        for op in work:
            cost = round(sim.cost[op] * SCALE)
            if op in self.first:
                room[self.base[op]] = 0
            if op in self.again:
                room[self.again[op]] = cost
        self.known = sum(sim.cost[op] for op in work)
        self.empty = room
        return True

    def bound(self, prices: list[float]) -> tuple[float, list[int]]:
        network, sim = self.network, self.problem.sim
        network.restore(self.empty)
        room = network.room
        for value, arcs in self.arcs.items():
            held, size = self.held.get(value), sim.nbytes[value]
            unsaved = sim.release[value] < 0
            for index, arc, pay in arcs:
                capacity = int(prices[index] * SCALE * size)
                if held:
                    room[pay] = capacity
                elif held is False and unsaved:
                    room[arc] = INFINITE
                else:
                    room[arc] = capacity
        network.maximise()
        side = self.side = network.source_side()
        work = set(self.work)
        seconds = self.known + sum(
            sim.cost[op] for op, node in self.first.items() if op not in work and side[node]
        )
        for op in self.work:
            if op in self.again and side[self.again_node(op)]:
                seconds += sim.cost[op]
        over = [-room for room in self.rooms]
        for value, arcs in self.arcs.items():
            held = self.held.get(value)
            for index, arc, _ in arcs:
                here, maker = network.head[arc ^ 1], network.head[arc]
                if side[here] and (held or not side[maker]):
                    over[index] += sim.nbytes[value]
        return seconds + sum(p * o for p, o in zip(prices, over, strict=True)), over

    def again_node(self, op: int) -> int:
        return self.network.head[self.again[op] ^ 1]

    def next_value(self) -> int | None:
        """The value to decide on: what a replay by the split reads, else what is replayed by it."""
        sim, graph = self.problem.sim, self.problem.sim.graph
        reads = [
            x for op in self.work for x in sim.reads[op] if x not in self.held and sim.nbytes[x]
        ]
        if reads:
            return max(reads, key=lambda x: (sim.nbytes[x], -x))
        asked = [
            value
            for value, arcs in self.arcs.items()
            if value not in self.held
            and 0 <= graph.first_event[value] <= self.split
            and self.side[self.network.head[arcs[0][1]]]
        ]
        return max(asked, key=lambda value: (sim.nbytes[value], -value), default=None)


def branched_bound(
    problem: Problem,
    moments: list[int],
    limit: int,
    split: int,
    prices: list[float],
    target: float,
    cuts: int,
) -> float:
    """The best bound that so many cuts prove; no more than `target` is asked for."""
    model = Branch(problem, moments, limit, split)
    done = 0
    held: Held = dict.fromkeys(sorted(problem.sim.graph.must_hold), True)
    held.update(dict.fromkeys(sorted(problem.gone), False))
    leaves: list[tuple[float, int, Held, list[float], int | None]] = []

    def add(held: Held, prices: list[float], least: float) -> None:
        nonlocal done
        if not model.decide(held):
            return
        bound, prices = raise_bound(model, prices, 0.0, target, CLIMBS)
        model.bound(prices)
        done += CLIMBS + 1
        heappush(leaves, (max(bound, least), done, held, prices, model.next_value()))

    add(held, prices, 0.0)
    while leaves and done < cuts and leaves[0][0] < target:
        bound, _, held, prices, value = leaves[0]
        if value is None:
            break
        heappop(leaves)
        for choice in (True, False):
            add({**held, value: choice}, prices, bound)
    return leaves[0][0] if leaves else target
