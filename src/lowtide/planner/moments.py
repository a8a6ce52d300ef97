"""A lower bound that takes several moments of the step into account.

Problem: a plan has to stay within the limit at every moment; a cut at one moment drops values as if
the other moments did not matter, and its bound is up to three percent below what can be proved.

Invariant: valid for every plan. A replayed operation is paid for once, whenever and however often
it is replayed. At each moment, a value that backward has yet to ask for is in memory, or its
producer is replayed after that moment; an operation replayed after one moment is also replayed
after every earlier one. For any prices of a byte at the moments, the value of the minimum cut,
minus the price of the room at each moment, is a lower bound. Prices are raised at the moments where
the cut exceeds the room.

Imports: `lowtide.planner.cut`, `lowtide.planner.flow`, `lowtide.planner.simulate`.

Rejected: a linear program, to whose optimum this bound converges, but which needs a solver: a
dependency, or the compiled core (`relaxed`).
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.planner.cut import SCALE, moment_at, moment_weights, room_at
from lowtide.planner.flow import INFINITE, MOST, CutWith, Network
from lowtide.planner.simulate import Simulator

APART = 2
"""Chosen moments are more than this many events apart."""
NEGLIGIBLE = 1000
"""The smallest values, up to one part in this many of the limit in all, are left out: cuts are then
much faster."""


def worst_moments(backward: list[int], limit: int, count: int) -> list[int]:
    """The events with the most bytes over the limit, in order, none close to another."""
    chosen: list[int] = []
    for event in sorted(range(len(backward)), key=lambda event: (-backward[event], event)):
        if backward[event] <= limit or len(chosen) == count:
            break
        if all(abs(event - other) > APART for other in chosen):
            chosen.append(event)
    return sorted(chosen)


def small_up_to(sizes: list[int], total: int) -> int:
    """The largest size such that all values up to it have at most `total` bytes together."""
    found = below = 0
    for size in sorted(sizes):
        if size > below:
            found, below = below, size
        total -= size
        if total < 0:
            return found
    return below


class Priced(NamedTuple):
    """A value that may be held at a moment, for its bytes times a price."""

    value: int
    nbytes: int
    arc: int
    """The arc whose capacity is what holding it costs: from its node to its producer's."""
    node: int
    maker: int
    """The node of its producer."""


class Moments:
    """Cuts of one graph at several moments, for any prices.

    `moments` are numbers as in `moment_at`, in increasing order.
    """

    def __init__(
        self, sim: Simulator, moments: list[int], limit: int, cut_with: CutWith | None = None
    ) -> None:
        self.sim = sim
        small = small_up_to(sim.nbytes, limit // NEGLIGIBLE)
        self.rooms = [room_at(sim, moment_at(sim, moment), limit) for moment in moments]
        self.network = Network(2, cut_with)
        self.paid: list[tuple[int, float]] = []
        self.base: dict[int, int] = {}  # for each operation, the arc that pays for it
        self.replays: list[dict[int, int]] = []  # for each moment, the nodes of its operations
        self.priced: list[list[Priced]] = []  # for each moment, the values that have a price
        earlier: dict[int, int] = {}
        for moment in moments:
            sizes = moment_weights(sim, moment_at(sim, moment))
            weight = [
                0 if free or size <= small else size
                for size, free in zip(sizes, sim.free, strict=True)
            ]
            replays = self._replayed(weight, earlier)
            self.priced.append(self._required(moment, weight, replays))
            self.replays.append(replays)
            earlier.update(replays)
        self.empty = self.network.snapshot()
        # The highest price of a byte, so that all finite capacities together stay below `MOST`.
        self.dearest = MOST / (2 * SCALE * len(moments) * max(sum(sim.nbytes), 1))

    def _replayed(self, weight: list[int], earlier: dict[int, int]) -> dict[int, int]:
        """Add a node for each operation that makes one of a moment's values, and what pays for it.
        `earlier`: the nodes of operations at earlier moments."""
        sim, network = self.sim, self.network
        replays: dict[int, int] = {}
        for value, size in enumerate(weight):
            op = sim.producer[value]
            if not size or op in replays:
                continue
            here = replays[op] = network.node()
            # What is replayed after this moment is also replayed after the earlier ones.
            if op in earlier:
                network.arc(here, earlier[op], INFINITE)
            elif sim.replayable[op]:
                self.base[op] = network.arc(here, Network.SINK, round(sim.cost[op] * SCALE))
                self.paid.append((here, sim.cost[op]))
            else:
                network.arc(here, Network.SINK, INFINITE)
        return replays

    def _required(self, moment: int, weight: list[int], replays: dict[int, int]) -> list[Priced]:
        """Add a node for each of a moment's values, and what requires it: backward, or a replay."""
        sim, network = self.sim, self.network
        required: dict[int, int] = {}
        priced = []
        for value, size in enumerate(weight):
            if not size:
                continue
            here = required[value] = network.node()
            maker = replays[sim.producer[value]]
            if value in sim.graph.fleeting:
                network.arc(here, maker, INFINITE)
                continue
            priced.append(Priced(value, size, network.arc(here, maker, 0), here, maker))
            if sim.graph.needed[value] >= max(moment, 0):
                network.arc(Network.SOURCE, here, INFINITE)
        for op, here in replays.items():
            for x in sim.reads[op]:
                if x in required:
                    network.arc(here, required[x], INFINITE)
        return priced

    def bound(self, prices: list[float]) -> tuple[float, list[int]]:
        """Seconds that these prices prove, and the bytes by which the cut exceeds each room."""
        network, prices = self.network, [min(price, self.dearest) for price in prices]
        network.restore(self.empty)
        for price, priced in zip(prices, self.priced, strict=True):
            scaled = price * SCALE
            for one in priced:
                network.room[one.arc] = int(scaled * one.nbytes)
        side = network.cut()
        seconds = sum(cost for node, cost in self.paid if side[node])
        over = [
            sum(one.nbytes for one in priced if side[one.node] and not side[one.maker]) - room
            for priced, room in zip(self.priced, self.rooms, strict=True)
        ]
        return seconds + sum(p * o for p, o in zip(prices, over, strict=True)), over


def raise_bound(
    model: Moments, prices: list[float], target: float, cuts: int
) -> tuple[float, list[float]]:
    """Raise the bound by moving the prices, for at most `cuts` cuts; returns the best bound and its
    prices.

    `target` is the time of a plan that fits: the bound cannot rise above it.
    """
    best, found, pace = 0.0, prices, 1.0
    for _ in range(cuts):
        seconds, over = model.bound(prices)
        if seconds > best:
            best, found = seconds, prices
        else:
            pace *= 0.85
        uphill = [float(o) if o > 0 or p > 0 else 0.0 for o, p in zip(over, prices, strict=True)]
        steep = sum(u * u for u in uphill)
        if not steep or best >= target:
            break
        step = pace * (target - seconds) / steep
        prices = [max(p + step * u, 0.0) for p, u in zip(prices, uphill, strict=True)]
    return best, found
