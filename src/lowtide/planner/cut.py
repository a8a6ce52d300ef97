"""The cheapest recomputation for one moment of the step, as a minimum cut.

Problem: at the peak, every value that backward will still ask for is either in memory or has to be
recomputed from values that are. Choosing which to hold for the least replayed time is a selection
with dependencies, and a minimum cut once bytes are given a price.

Invariant: a node for each operation (is it replayed?) and each value (is it required?). A required
value is paid for in bytes, or its producer is replayed; a replayed operation costs its time and
requires its inputs. Values that nothing saved can be held too: holding a layer's own output allows
a growing concatenation to be dropped. Over all prices of a byte, the cuts trace the lower hull of
time against memory at that moment. A cut's time plus `price x (its bytes - room)` is a lower bound
on the replayed time of every plan.

Imports: `lowtide.planner.flow`, `lowtide.planner.simulate`.

Rejected: an integer program. It needs a solver as a dependency and gains only what the repair of a
cut finds anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.planner.flow import INFINITE, MOST, Network
from lowtide.planner.simulate import Simulation, Simulator

SCALE = 10**12
"""Factor from seconds to integer capacities."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A choice of values to hold, optimal for one price."""

    held: frozenset[int]
    nbytes: int
    """Weight of the held values: their bytes at the moment of the cut."""
    seconds: float
    """Time of the replayed operations, each once."""


class CutModel:
    """Minimum cuts of one graph, given a weight for each value.

    Values that backward still needs at `event` are required.
    """

    def __init__(self, sim: Simulator, weight: list[int], event: int = 0) -> None:
        self.sim = sim
        self.weight = weight
        ops = len(sim.cost)
        self.base = 2 + ops
        self.network = network = Network(self.base + len(weight))
        for op in range(ops):
            capacity = round(sim.cost[op] * SCALE) if sim.replayable[op] else INFINITE
            network.arc(2 + op, Network.SINK, capacity)
            for x in sim.reads[op]:
                if weight[x]:
                    network.arc(2 + op, self.base + x, INFINITE)
        self.priced: list[tuple[int, int]] = []
        for value, size in enumerate(weight):
            if size and not sim.free[value]:
                node = self.base + value
                if value in sim.graph.fleeting:
                    network.arc(node, 2 + sim.producer[value], INFINITE)
                    continue
                self.priced.append((value, network.arc(node, 2 + sim.producer[value], 0)))
                if sim.graph.needed[value] >= event:
                    network.arc(Network.SOURCE, node, INFINITE)
        self.solved = [(0.0, network.snapshot())]
        self._replays = sum(room for room in network.room if room < INFINITE)

    def solve(self, price: float) -> Cut:
        """The cheapest choice when a byte costs `price` seconds.

        The cut returned is the smallest one, which does not depend on the flow that proves it, nor
        on what finds it.
        """
        weight, producer = self.weight, self.sim.producer
        side = self._side([int(price * SCALE * weight[value]) for value, _ in self.priced], price)
        held = frozenset(
            value
            for value, _ in self.priced
            if side[self.base + value] and not side[2 + producer[value]]
        )
        seconds = sum(c for op, c in enumerate(self.sim.cost) if side[2 + op])
        return Cut(held, sum(weight[v] for v in held), seconds)

    def _side(self, prices: list[int], price: float) -> Sequence[int]:
        """For each node, whether it is on the source's side, given the capacities of `priced`."""
        network, fast = self.network, Network.compiled()
        if fast is not None and self._replays + sum(prices) < MOST:
            network.restore(self.solved[0][1])
            for (_, arc), capacity in zip(self.priced, prices, strict=True):
                network.room[arc] = capacity
            return fast(len(network.arcs), network.head, network.room)
        # The flow for the nearest lower price is still feasible: the search continues from it.
        while self.solved[-1][0] > price:
            self.solved.pop()
        below, snapshot = self.solved[-1]
        network.restore(snapshot)
        for (value, arc), capacity in zip(self.priced, prices, strict=True):
            network.room[arc] += capacity - int(below * SCALE * self.weight[value])
        network.maximise()
        self.solved.append((price, network.snapshot()))
        return network.source_side()


def moment_weights(sim: Simulator, at: tuple[str, int]) -> list[int]:
    """Bytes that holding each value costs at a moment; 0 if it is in memory anyway or released."""
    phase, index = at
    if phase == "forward":
        return [
            0 if free or last >= index else size
            for size, free, last in zip(sim.nbytes, sim.free, sim.stays, strict=True)
        ]
    alive = sim.lifetimes([0] * len(sim.nbytes))
    used = sim.event_value[index]
    return [
        0 if free or last < index or value == used else size
        for value, (size, free, last) in enumerate(zip(sim.nbytes, sim.free, alive, strict=True))
    ]


def moment_at(sim: Simulator, number: int) -> tuple[str, int]:
    """The moment with this number, as `moment_weights` takes it: numbers from 0 on are events of
    backward; negative ones are operations of the forward (and its end), counted backwards."""
    if number >= 0:
        return "backward", number
    return "forward", len(sim.forward_peak) + number


def number_of(sim: Simulator, at: tuple[str, int]) -> int:
    """The number of a moment; the inverse of `moment_at`."""
    phase, index = at
    return index if phase == "backward" else index - len(sim.forward_peak)


def room_at(sim: Simulator, at: tuple[str, int], limit: int) -> int:
    """Bytes that a plan may hold at a moment if the peak may be `limit`. The moment of an event is
    before its releases."""
    phase, index = at
    if phase == "forward":
        return limit - sim.forward_peak[index]
    used = sim.event_value[index]
    own = 0 if sim.free[used] else sim.nbytes[used]
    return limit - sim.event_peak[index] - own


def free_holds(sim: Simulator, weight: list[int]) -> frozenset[int]:
    """Saved values without weight at the moment: a cut has no reason to drop them."""
    return frozenset(
        v for v, size in enumerate(weight) if not size and not sim.free[v] and sim.release[v] >= 0
    )


def lower_bound(room: int, cuts: dict[float, Cut]) -> float:
    """The best lower bound on replayed time that the cuts prove for plans with this room."""
    return max((_proved(room, *item) for item in cuts.items()), default=0.0)


def best_price(room: int, cuts: dict[float, Cut]) -> float:
    """The price whose cut proves `lower_bound`."""
    return max(cuts.items(), key=lambda item: _proved(room, *item))[0]


def _proved(room: int, price: float, cut: Cut) -> float:
    return cut.seconds + price * (cut.nbytes - room)


def hull(
    model: CutModel,
    sim: Simulator,
    room: int,
    *,
    steps: int = 14,
    first: float = 0.0,
    enough: float = float("inf"),
) -> dict[float, Cut]:
    """Cuts by price, around the price at which the held bytes just fit the room.

    The price rises from `first`, or from far below the mean price of a byte, until a cut fits the
    room. From then on the slope between the two nearest cuts is the next price. The search ends
    when there is no corner of the hull between them, which proves the best bound that prices can
    prove, or when the bound has reached `enough`.
    """
    total = sum(model.weight) or 1
    high = first or sum(sim.cost) / total * 1e-2
    cuts: dict[float, Cut] = {}
    over: Cut | None = None
    for _ in range(40):
        under = cuts[high] = model.solve(high)
        if under.nbytes <= room or not under.held:
            break
        over, high = under, high * 4
    if over is None:
        over = cuts[0.0] = model.solve(0.0)
    for _ in range(steps):
        if over.nbytes <= under.nbytes or lower_bound(room, cuts) >= enough:
            break
        price = (under.seconds - over.seconds) / (over.nbytes - under.nbytes)
        if price <= 0 or price in cuts:
            break
        cut = cuts[price] = model.solve(price)
        if cut.seconds + price * cut.nbytes >= (over.seconds + price * over.nbytes) * (1 - 1e-9):
            break
        if cut.nbytes <= room:
            under = cut
        else:
            over = cut
    return cuts


def peak_moment(result: Simulation) -> tuple[str, int]:
    """The moment of a simulation's peak, as `moment_weights` takes it."""
    phase, index = result.peak_at
    return ("forward" if phase == "forward" else "backward"), index
