"""A lower bound that counts second replays, by branching on what is held from the forward on.

Problem: `moments` pays once for each operation, however often it is replayed, and lets values be
held in part. That bound stays some percent below the best plan, in which what is replayed early may
not stay in memory until its later use, and the last value that would fit does not.

Invariant: valid for every plan. Either a value is held from the forward on, and its bytes are paid
for as long as it lives; or its producer is replayed by the time backward first asks for it, and
paid once more if it is replayed after that moment too. Each branch decides this for one value; the
bound is the lowest bound of any open branch.

Imports: `lowtide.planner.moments`, `lowtide.planner.flow`, `lowtide.planner.repair`.

Rejected: an integer program, which proves the same without prices but takes a solver minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from lowtide.planner.cut import SCALE
from lowtide.planner.flow import INFINITE, CutWith, Network
from lowtide.planner.moments import Moments, raise_bound
from lowtide.planner.repair import Problem

Held = dict[int, bool]
"""For the values decided so far, whether they are held from the forward on."""
FIRST_CLIMBS, CLIMBS = 8, 4
"""Cuts spent on improving the prices: before any decision, and after each."""
WIDE = 3
"""Before branching, both decisions are tried for up to this many values."""


class Branch(Moments):
    """Cuts at several moments, given for some values whether they are held."""

    NEVER = -1
    """In place of a moment's index: its price is infinite, as the value cannot be in memory."""

    def __init__(
        self, problem: Problem, moments: list[int], limit: int, cut_with: CutWith | None = None
    ) -> None:
        super().__init__(problem.sim, moments, limit, cut_with)
        self.problem = problem
        self.moments = moments
        self.cuts = 0
        network = self.network
        # For each moment and operation, the arc that pays for another replay after that moment.
        self.again = [
            {op: network.arc(node, Network.SINK, 0) for op, node in nodes.items()}
            for nodes in self.replays
        ]
        # For each value, (moment, arc to its producer, arc that pays for holding it: no replay).
        self.arcs: dict[int, list[tuple[int, int, int]]] = {}
        for index, priced in enumerate(self.priced):
            for one in priced:
                pay = network.arc(one.node, Network.SINK, 0)
                self.arcs.setdefault(one.value, []).append((index, one.arc, pay))
        self.first: dict[int, int] = {}
        for nodes in self.replays:
            for op, node in nodes.items():
                self.first.setdefault(op, node)
        # For each moment and operation, the arc from its node to the sink.
        self.drain = [
            {op: self.base[op] if self.first[op] == node and op in self.base else again[op]
             for op, node in nodes.items()}
            for nodes, again in zip(self.replays, self.again, strict=True)
        ]  # fmt: skip
        self.plain = network.snapshot()

    def start(self) -> Held:
        """What every plan has in common."""
        held: Held = dict.fromkeys(sorted(self.sim.graph.must_hold), True)
        return held | dict.fromkeys(sorted(self.problem.gone), False)

    def replayed(self, held: Held) -> dict[int, int] | None:
        """Operations that are certainly replayed, with the index of the moment before which that
        happens.

        The index is the number of moments if that is after the last. None: one of them cannot be
        replayed.
        """
        sim, first_event = self.sim, self.sim.graph.first_event
        asked = sorted(
            (first_event[v], sim.producer[v])
            for v, h in held.items()
            if not h and first_event[v] >= 0
        )
        found: dict[int, int] = {}
        for event, asked_op in asked:
            if asked_op in found:
                continue
            by = sum(moment < event for moment in self.moments)
            found[asked_op] = by
            work = [asked_op]
            for op in work:
                if not sim.replayable[op]:
                    return None
                for x in sim.reads[op]:
                    if held.get(x) is False and sim.producer[x] not in found:
                        found[sim.producer[x]] = by
                        work.append(sim.producer[x])
        return found

    def decide(self, held: Held) -> bool:
        """Set up the network for these decisions; False if no plan can have them."""
        work = self.replayed(held)
        if work is None:
            return False
        self.held, self.work = held, work
        sim = self.sim
        room = self.plain.copy()
        self.due = [(node, sim.cost[op]) for op, node in self.first.items() if op not in work]
        for op, by in work.items():
            if op in self.base:
                room[self.base[op]] = 0
            if by < len(self.moments) and op in self.again[by]:
                room[self.again[by][op]] = round(sim.cost[op] * SCALE)
                self.due.append((self.replays[by][op], sim.cost[op]))
        self.known = sum(sim.cost[op] for op in work)
        self._sort(held)
        self.undecided = room
        self.met: dict[bool, Sequence[int]] = {}
        return True

    def _sort(self, held: Held) -> None:
        """List the arcs whose capacities depend on prices, given these decisions."""
        sim, needed, network = self.sim, self.sim.graph.needed, self.network
        # (moment, bytes, arc); `asked` also has the drain, the arc by which its flow reaches the
        # sink.
        self.bought: list[tuple[int, int, int]] = []
        self.asked: list[tuple[int, int, int, int]] = []
        # (moment, bytes, node, and the producer's node, or the sink if the value is held).
        self.there: list[tuple[int, int, int, int]] = []
        for value, arcs in self.arcs.items():
            decided, size = held.get(value), sim.nbytes[value]
            for index, arc, pay in arcs:
                moment, drains = self.moments[index], self.drain[index]
                asked = needed[value] >= max(moment, 0)
                # Nothing is replayed before backward: what is not held then is not in memory.
                gone = decided is False and (sim.release[value] < 0 or moment < 0)
                here, maker = network.head[arc ^ 1], network.head[arc]
                self.there.append((index, size, here, Network.SINK if decided else maker))
                if decided:
                    if not asked:  # else it is in memory in every cut, and `there` counts it
                        self.bought.append((index, size, pay))
                    continue
                never = gone or size > self.rooms[index]
                price = (self.NEVER, 1) if never else (index, size)
                if asked:
                    self.asked.append((*price, arc, drains[sim.producer[value]]))
                else:
                    self.bought.append((*price, arc))

    def bound(self, prices: list[float]) -> tuple[float, list[int]]:
        self.cuts += 1
        prices = [min(price, self.dearest) for price in prices]
        self._load(prices)
        side = self.network.cut()
        seconds = self.known + sum(cost for node, cost in self.due if side[node])
        over = [-room for room in self.rooms]
        for index, size, here, maker in self.there:
            if side[here] and not side[maker]:
                over[index] += size
        dear = sum(p * o for p, o in zip(prices, over, strict=True))
        self.met[dear > 0] = self.side = side
        return seconds + dear, over

    def _load(self, prices: list[float]) -> None:
        """Set the capacities, and push the flow that goes straight from a value through its
        producer to the sink."""
        self.network.restore(self.undecided)
        room = self.network.room
        scaled = [*(price * SCALE for price in prices), INFINITE]
        for index, size, arc in self.bought:
            room[arc] = int(scaled[index] * size)
        for index, size, arc, drain in self.asked:
            capacity = int(scaled[index] * size)
            push = min(capacity, room[drain])
            room[arc], room[arc ^ 1] = capacity - push, push
            room[drain] -= push
            room[drain ^ 1] += push

    def _kept(self, value: int, side: Sequence[int]) -> bool:
        """Whether a cut holds a value at the first moment for which it has an arc."""
        _, arc, _ = self.arcs[value][0]
        head = self.network.head
        return bool(side[head[arc ^ 1]]) and not side[head[arc]]

    def candidates(self) -> list[int]:
        """Values to branch on: large ones whose decision the last cuts leave open.

        They are inputs of replays that happen by one of the moments; values that one cut with these
        decisions holds and another does not; and values that backward asks for by the last moment,
        those not held first. If all of these are decided, any others.
        """
        sim, first_event, last = self.sim, self.sim.graph.first_event, len(self.moments)
        reads = (x for op, by in self.work.items() if by < last for x in sim.reads[op])
        differ: Iterable[int] = ()
        if len(self.met) == 2:
            differ = (
                v for v in self.arcs if len({self._kept(v, s) for s in self.met.values()}) > 1
            )
        asked = [v for v in self.arcs if 0 <= first_event[v] <= self.moments[-1]]
        found = [
            *self._largest(reads)[:WIDE],
            *self._largest(differ)[:2],
            *self._largest(v for v in asked if not self._kept(v, self.side))[:2],
            *self._largest(asked)[:2],
        ]
        return list(dict.fromkeys(found))[:WIDE] or self._largest(self.arcs)[:WIDE]

    def _largest(self, values: Iterable[int]) -> list[int]:
        size, held = self.sim.nbytes, self.held
        open_ = {value for value in values if value in self.arcs and value not in held}
        return sorted(open_, key=lambda value: (-size[value], value))


class Tree:
    """The open branches of one model, the one with the lowest bound first."""

    def __init__(self, model: Branch, starts: list[list[float]], target: float) -> None:
        self.model = model
        self.target = target
        self.leaves: list[tuple[float, int, Held, list[float], list[int]]] = []
        self.done = 0  # work so far: cuts times nodes of the network
        model.decide(model.start())
        raised = [raise_bound(model, prices, target, FIRST_CLIMBS) for prices in starts]
        best, prices = max(raised)
        self._add(model.start(), prices, best)

    @property
    def moments(self) -> list[int]:
        """The moments of its model."""
        return self.model.moments

    @property
    def bound(self) -> float:
        """The bound proved so far, at most `target`."""
        return min(self.leaves[0][0], self.target) if self.leaves else self.target

    def grow(self, work: int) -> int:
        """Branch until `work` more is used up (cuts times nodes), or to the end; returns the work
        done since the last call."""
        model = self.model
        nodes = len(model.network.arcs)
        while model.cuts * nodes < self.done + work:
            if self.bound >= self.target or not self.leaves[0][-1]:
                break
            bound, _, held, prices, candidates = heappop(self.leaves)
            value = self._choose(held, prices, bound, candidates)
            for choice in (True, False):
                self._add({**held, value: choice}, prices, bound)
        spent = model.cuts * nodes - self.done
        self.done += spent
        return spent

    def _add(self, held: Held, prices: list[float], least: float) -> None:
        model = self.model
        if model.decide(held):
            bound, prices = raise_bound(model, prices, self.target, CLIMBS)
            leaf = max(bound, least), model.cuts, held, prices, model.candidates()
            heappush(self.leaves, leaf)

    def _choose(self, held: Held, prices: list[float], least: float, candidates: list[int]) -> int:
        """The value to branch on: at every other depth the first (largest) candidate; else the one
        whose two decisions, tried with one cut each, raise the bound most (as a product).

        Trying takes two cuts per candidate; done at every depth, it would follow values of which
        only one decision proves anything.
        """
        if len(candidates) == 1 or len(held) % 2:
            return candidates[0]
        best, chosen = -1.0, candidates[0]
        for value in candidates:
            worth = 1.0
            for choice in (True, False):
                proved = self.target
                if self.model.decide({**held, value: choice}):
                    proved = min(self.model.bound(prices)[0], self.target)
                worth *= max(proved - least, 0.0) + 1e-6 * self.target
            if worth > best * 1.0001:
                best, chosen = worth, value
        return chosen
