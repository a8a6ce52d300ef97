"""Live bytes over a step, moment by moment, by what they are for.

Problem: a peak is one number, and what to do about it depends on what stands there: activations
that a plan could drop, or gradients that it could not. Invariant: the kinds of a moment add up to
the simulator's bytes of that moment, and the largest moment is the simulated peak, asserted.
Imports dryrun, ledger, planner. Rejected: drawing a plain timeline from a measurement and a
planned one from a simulation, whose difference would not be the plan's.

A moment is an operation of the forward or, in backward, a replay and what follows it up to the next
request. Plain and planned steps have the same operations and events, so they share an axis.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from lowtide.dryrun.ledger import Block, Ledger, Site
from lowtide.dryrun.run import Dry
from lowtide.planner import HOLD, Retention, Simulation, Simulator
from lowtide.planner.simulate import ABSENT, Trace

KINDS = ("kept", "recomputed", "gradient", "temporary")


@dataclass(frozen=True, slots=True)
class Moment:
    """The most that is live during one operation, replay or stretch of backward, in bytes.

    Attributes:
        phase: "forward", "replay" or "backward".
        place: the operation of the forward, or the event of backward; the number of operations
            stands for what follows the last of them, such as a loss that is not among them.
        site: what runs, in which module, on which line; in backward that of its forward.
        kept: activations that live for backward.
        recomputed: activations that were recomputed, and what their recomputation takes.
        gradient: gradients of parameters and other leaves.
        temporary: everything else: what is only passed on, gradients of activations, workspace.
    """

    phase: str
    place: int
    site: Site
    kept: int
    recomputed: int
    gradient: int
    temporary: int

    @property
    def total(self) -> int:
        return self.kept + self.recomputed + self.gradient + self.temporary


@dataclass(frozen=True, slots=True)
class Item:
    """Something that is live at a moment.

    `kind` is one of "kept", "recomputed", "gradient", "temporary", "workspace"; `value` the number
    of the value where it is one, else -1; `name` that of the leaf whose gradient it is.
    """

    nbytes: int
    kind: str
    site: Site
    shape: tuple[int, ...]
    dtype: str
    name: str
    value: int


@dataclass(frozen=True)
class Timeline:
    """All moments of a step under one plan. `peak` is that of the simulator, to the byte."""

    moments: tuple[Moment, ...]
    peak: int
    at: int
    """The first moment of the peak."""
    items: tuple[Item, ...]
    """What stands there, largest first; adds up to `peak`."""

    def __post_init__(self) -> None:
        assert max((m.total for m in self.moments), default=0) == self.peak
        assert sum(item.nbytes for item in self.items) == self.peak

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by kind."""
        if not self.moments:
            return dict.fromkeys(KINDS, 0)
        moment = self.moments[self.at]
        return {kind: getattr(moment, kind) for kind in KINDS}


def timeline(step: Dry, ledger: Ledger, retention: Retention) -> Timeline:
    """Go through a step under a plan and say of each moment what its bytes are for."""
    return Reader(step, ledger, retention).read()


class Reader:
    """What `timeline` is made from, for those who need more of it than its largest moment."""

    def __init__(self, step: Dry, ledger: Ledger, retention: Retention) -> None:
        self.graph, self.ledger = step.graph, ledger
        self.retain = retention.retain
        self.sim = Simulator(self.graph)
        self.result: Simulation = self.sim.run(self.retain, trace=True)
        assert self.result.trace is not None
        self.trace: Trace = self.result.trace
        self.segments = [s.segment for s in ledger.steps]
        self.gradients = self._alive(lambda block: block.gradient)
        self.pinned = self._alive(
            lambda block: block.saved and not block.gradient and self._stays(block)
        )
        self.names = {v: block for block in ledger.blocks for v in block.values if v >= 0}
        self.saved = {s.number: s for s in ledger.saved if s.number >= 0}

    def _stays(self, block: Block) -> bool:
        """Whether no plan lets go of it: somebody else has it, or the tape did not see it made."""
        return any(v < 0 or self.graph.values[v].pinned for v in block.values)

    def _alive(self, wanted: object) -> list[int]:
        """Bytes of the blocks that are wanted, at each step."""
        assert callable(wanted)
        count = len(self.ledger.steps)
        change = [0] * (count + 1)
        for block in self.ledger.blocks:
            if wanted(block):
                change[block.born] += block.nbytes
                change[min(block.died, count)] -= block.nbytes
        return list(accumulate(change))

    # ------------------------------------------------------------------ moments

    def read(self) -> Timeline:
        moments = [*self._forward(), *self._backward()]
        peak = self.result.peak
        at = next((k for k, m in enumerate(moments) if m.total == peak), 0)
        items = self._items(moments[at]) if moments else ()
        return Timeline(tuple(moments), peak, at, items)

    def _instant(self, begin: int, end: int) -> int:
        """The step at which the most is live between two marks, -1 where that is not known."""
        first = bisect_left(self.segments, begin)
        last = bisect_left(self.segments, end)
        if first >= last:
            return -1
        steps = self.ledger.steps
        return max(range(first, last), key=lambda place: steps[place].peak)

    def _operation_instant(self, index: int) -> int:
        if not self.ledger.steps:
            return -1
        if index == len(self.graph.ops):  # what follows the last
            return self._instant(self.ledger.marks[-1][1], self.ledger.requests[0][2])
        begin, end = self.ledger.marks[index]
        # What was let go, or looked at, before it ran is no part of it.
        first, last = bisect_left(self.segments, begin), bisect_left(self.segments, end)
        return last - 1 if first < last else -1

    def _event_instant(self, event: int) -> int:
        if not self.ledger.steps:
            return -1
        requests = self.ledger.requests
        _, _, _, answer = requests[event]
        following = requests[event + 1][2] if event + 1 < len(requests) else 1 << 60
        return self._instant(answer, following)

    def instant(self, moment: Moment) -> int:
        """The step of the ledger at which a moment has its most, -1 where that is not known."""
        if moment.phase == "forward":
            return self._operation_instant(moment.place)
        if moment.phase == "backward":
            return self._event_instant(moment.place)
        begin = self.ledger.requests[moment.place][2]
        return self._instant(begin, begin + 1) if self.ledger.steps else -1

    def _forward(self) -> list[Moment]:
        moments = []
        values = self.graph.values
        kept = 0
        for index, total in enumerate(self.trace.forward):
            for v in self.sim.outputs[index] if index < len(self.graph.ops) else ():
                if self.retain[v] == HOLD and self.trace.alive[v] >= 0 and not values[v].pinned:
                    kept += values[v].nbytes
            instant = self._operation_instant(index)
            gradient = min(total, self.gradients[instant] if instant >= 0 else 0)
            pinned = self.pinned[instant] if instant >= 0 else 0
            here = min(total - gradient, kept + pinned)
            site = self._operation_site(index, instant)
            moments.append(
                Moment("forward", index, site, here, 0, gradient, total - gradient - here)
            )
        return moments

    def _operation_site(self, index: int, instant: int) -> Site:
        if index < len(self.graph.ops):
            return self.ledger.sites[index]
        site = self.ledger.steps[instant].site if instant >= 0 else Site()
        return site if site.operator else Site("what follows the forward")

    def _backward(self) -> list[Moment]:
        graph, trace, count = self.graph, self.trace, len(self.graph.events)
        held, retained = [0] * (count + 1), [0] * (count + 1)
        for v, (node, start, end) in enumerate(
            zip(graph.values, trace.start, trace.alive, strict=True)
        ):
            if self.sim.free[v] or start == ABSENT or end < 0:
                continue
            into = held if self.retain[v] == HOLD else retained
            into[max(start, 0)] += node.nbytes
            into[end + 1] -= node.nbytes
        moments = []
        for index, (event, kept, redone) in enumerate(
            zip(graph.events, accumulate(held), accumulate(retained), strict=False)
        ):
            gradient, pinned = self._others(index)
            if trace.replay[index]:
                moments.append(self._replay(index, kept, gradient, pinned))
            given = 0 if self.there(event.value, index) else graph.values[event.value].nbytes
            other = event.peak_other
            gradient = min(other, gradient)
            pinned = min(other - gradient, pinned)
            moments.append(
                Moment(
                    "backward",
                    index,
                    self._event_site(index),
                    kept + pinned,
                    redone + given,
                    gradient,
                    other - gradient - pinned,
                )
            )
        return moments

    def there(self, value: int, event: int) -> bool:
        """Whether a value is in memory when an event asks for it."""
        return self.sim.free[value] or self.trace.start[value] <= event

    def _replay(self, index: int, kept: int, gradient: int, pinned: int) -> Moment:
        event, total = self.graph.events[index], self.trace.replay[index]
        other = event.other
        gradient = min(other, gradient)
        pinned = min(other - gradient, pinned)
        maker = self.graph.values[event.value].producer
        return Moment(
            "replay",
            index,
            self.ledger.sites[maker],
            kept + pinned,
            total - other - kept,
            gradient,
            other - gradient - pinned,
        )

    def _others(self, index: int) -> tuple[int, int]:
        """Bytes of gradients of leaves, and of what somebody else holds as well, at an event."""
        instant = self._event_instant(index)
        if instant >= 0:
            return self.gradients[instant], self.pinned[instant]
        maker = self.graph.values[self.graph.events[index].value].producer
        return sum(n for n, reader, _ in self.ledger.gradients if reader > maker), 0

    def _event_site(self, index: int) -> Site:
        instant = self._event_instant(index)
        if instant >= 0 and self.ledger.steps[instant].site.operator:
            return self.ledger.steps[instant].site
        maker = self.ledger.sites[self.graph.values[self.graph.events[index].value].producer]
        return Site(f"backward that reads {maker.operator}", maker.module, maker.line)

    # ------------------------------------------------------------------ what stands at one

    def _items(self, moment: Moment) -> tuple[Item, ...]:
        found = [self.item(v, kind) for v, kind in self._values_at(moment)]
        instant = self.instant(moment)
        if moment.phase == "replay":
            # What replays make on the way is known as a sum; of the rest, what was there before.
            passing = moment.recomputed - sum(i.nbytes for i in found if i.kind == "recomputed")
            if passing:
                found.append(Item(passing, "recomputed", moment.site, (), "", "", -1))
        found += self._blocks_at(instant, {i.value for i in found}, moment)
        rest = moment.total - sum(item.nbytes for item in found)
        if rest < 0:
            found, rest = self._billed_once(found, rest)
        if rest < 0 and moment.phase == "backward":
            found, rest = self._still_there(found, rest, instant)
        if rest:
            kind = "workspace" if instant >= 0 else "temporary"
            found.append(Item(rest, kind, moment.site, (), "", "", -1))
        return tuple(sorted(found, key=lambda item: -item.nbytes))

    def _billed_once(self, found: list[Item], rest: int) -> tuple[list[Item], int]:
        """Two contents of one storage (written in place) are two values and one piece of memory."""
        once, seen = [], set()
        for item in found:
            block = self.names.get(item.value)
            if block is not None and rest < 0:
                if block.place in seen:
                    rest += item.nbytes
                    continue
                seen.add(block.place)
            once.append(item)
        return once, rest

    def _still_there(self, found: list[Item], rest: int, instant: int) -> tuple[list[Item], int]:
        """What backward lets go of after a request counts until the next one; at the moment of the
        most bytes between the two it may be gone, and the rest of the step is as much less."""
        there = []
        for item in found:
            block = self.names.get(item.value)
            if rest < 0 <= instant and block is not None and block.died <= instant:
                rest += item.nbytes
            else:
                there.append(item)
        return there, rest

    def _values_at(self, moment: Moment) -> list[tuple[int, str]]:
        """Values that the plan has in memory then, as far as they are the plan's."""
        found = []
        for v, node in enumerate(self.graph.values):
            if self.sim.free[v] or self.trace.alive[v] < 0:
                continue
            kept = self.retain[v] == HOLD
            if moment.phase == "forward":
                if kept and node.producer <= moment.place:
                    found.append((v, "kept"))
                continue
            start = self.trace.start[v]
            # During a replay what it retains itself is still on its way.
            before = start < moment.place if moment.phase == "replay" else start <= moment.place
            if start != ABSENT and before and self.trace.alive[v] >= moment.place:
                found.append((v, "kept" if kept else "recomputed"))
        if moment.phase == "backward":
            value = self.graph.events[moment.place].value
            if not self.there(value, moment.place):
                found.append((value, "recomputed"))
        return found

    def _blocks_at(self, instant: int, listed: set[int], moment: Moment) -> list[Item]:
        if instant < 0:
            return self._gradients_at(moment)
        plans = self.ledger.held
        found = []
        for block in self.ledger.blocks:
            if not block.born <= instant < block.died or listed.intersection(block.values):
                continue
            if plans.intersection(block.values) and not self._still_used(block, moment):
                continue
            found.append(self.block(block))
        return found

    def block(self, block: Block) -> Item:
        """A storage that is there whatever the plan says."""
        kind = "gradient" if block.gradient else "kept" if self._stays(block) else "temporary"
        return Item(block.nbytes, kind, block.site, block.shape, block.dtype, block.name, -1)

    def _still_used(self, block: Block, moment: Moment) -> bool:
        """In the forward what a plan lets go of is there until its last use."""
        return moment.phase == "forward" and any(
            self.graph.stays[v] >= moment.place for v in block.values if v >= 0
        )

    def _gradients_at(self, moment: Moment) -> list[Item]:
        """Where a real step was recorded: gradients by name, nothing else is told apart."""
        if moment.phase == "forward" or not moment.gradient:
            return []
        maker = self.graph.values[self.graph.events[moment.place].value].producer
        found = [item for item, reader in self.recorded_gradients() if reader > maker]
        return found if sum(i.nbytes for i in found) <= moment.gradient else []

    def recorded_gradients(self) -> list[tuple[Item, int]]:
        """Where a real step was recorded: gradients of leaves, and what read each last."""
        return [
            (Item(nbytes, "gradient", Site(), (), "", name, -1), reader)
            for nbytes, reader, name in self.ledger.gradients
        ]

    def item(self, value: int, kind: str) -> Item:
        """A value of the plan's, with what is known of it."""
        node = self.graph.values[value]
        block, saved = self.names.get(value), self.saved.get(value)
        shape: tuple[int, ...] = ()
        dtype = ""
        if saved is not None:
            shape, dtype = saved.shape, saved.dtype
        elif block is not None:
            shape, dtype = block.shape, block.dtype
        return Item(node.nbytes, kind, self.ledger.sites[node.producer], shape, dtype, "", value)
