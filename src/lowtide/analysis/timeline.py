"""Live bytes over a step, moment by moment, by what they are for.

Problem: a peak is one number, and what to do about it depends on what is in memory then:
activations, which a plan could drop, or gradients, which it could not. Invariant: the kinds of a
moment add up to the simulator's bytes at that moment, and the largest moment is the simulated peak
(asserted). Imports dryrun, ledger, planner. Rejected: a plain timeline from a measurement next to a
planned one from a simulation: the difference would not be due to the plan alone.

A moment is an operation of the forward or, in backward, a replay, or the time from a request's
answer to the next request. Plain and planned steps have the same operations and events, so they
share an axis.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from lowtide.dryrun.ledger import Block, Ledger, Site
from lowtide.dryrun.run import Dry
from lowtide.limits import format_bytes
from lowtide.planner import HOLD, Retention, Simulation, Simulator
from lowtide.planner.simulate import ABSENT, Trace
from lowtide.texttable import count_of

KINDS = ("kept", "recomputed", "gradient", "temporary")


@dataclass(frozen=True, slots=True)
class Moment:
    """The most that is live during one operation, replay or stretch of backward, in bytes.

    Attributes:
        phase: "forward", "replay" or "backward".
        place: the operation of the forward, or the event of backward; in the forward, the number of
            operations means the time after the last of them (an unrecorded loss, for example).
        site: what runs, in which module, on which line; in backward that of its forward.
        kept: activations kept for backward.
        recomputed: activations that were recomputed, and the memory of recomputing them.
        gradient: gradients of parameters and other leaves.
        temporary: everything else: values that are only passed on, gradients of activations,
            workspace.
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

    `kind` is one of "kept", "recomputed", "gradient", "temporary", "workspace"; `value` is the
    number of the value if it is one, else -1; `name` is that of the leaf if it is a gradient.
    """

    nbytes: int
    kind: str
    site: Site
    shape: tuple[int, ...]
    dtype: str
    name: str
    value: int


@dataclass(frozen=True, repr=False)
class Timeline:
    """All moments of a step under one plan. `peak` is that of the simulator, to the byte."""

    moments: tuple[Moment, ...]
    peak: int
    at: int
    """The first moment of the peak."""
    items: tuple[Item, ...]
    """What is live then, largest first; adds up to `peak`."""

    def __post_init__(self) -> None:
        assert max((m.total for m in self.moments), default=0) == self.peak
        assert sum(item.nbytes for item in self.items) == self.peak

    def __repr__(self) -> str:
        size = format_bytes(self.peak)
        return f"<Timeline: {count_of(len(self.moments), 'moment')}, peak {size}>"

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import timeline_html

        return timeline_html(self)

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by kind."""
        if not self.moments:
            return dict.fromkeys(KINDS, 0)
        moment = self.moments[self.at]
        return {kind: getattr(moment, kind) for kind in KINDS}


def timeline(step: Dry, ledger: Ledger, retention: Retention) -> Timeline:
    """Simulate a step under a plan, and say for each moment what its bytes are for."""
    return Reader(step, ledger, retention).read()


class Reader:
    """Makes a `timeline`; for callers that need more than the items of its largest moment."""

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
        """Whether no plan can drop it: it is pinned, or the tape did not see it made, unless it is
        there only as long as a replay may read it."""
        values = self.graph.values
        if any(v >= 0 and values[v].owned for v in block.values):
            return False
        return any(v < 0 or values[v].pinned for v in block.values)

    def _alive(self, wanted: Callable[[Block], bool]) -> list[int]:
        """Live bytes of the blocks for which `wanted` is true, at each step of the ledger."""
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
        """The step of the ledger between two marks with the most live bytes; -1 if unknown."""
        first = bisect_left(self.segments, begin)
        last = bisect_left(self.segments, end)
        if first >= last:
            return -1
        steps = self.ledger.steps
        return max(range(first, last), key=lambda place: steps[place].peak)

    def _operation_instant(self, index: int) -> int:
        if not self.ledger.steps:
            return -1
        if index == len(self.graph.ops):  # the time after the last operation
            begin = self.ledger.marks[-1][1] if self.ledger.marks else 0
            asked = self.ledger.requests  # none, if backward needs nothing that the step has made
            return self._instant(begin, asked[0].entry if asked else 1 << 60)
        begin, end = self.ledger.marks[index]
        # Earlier steps between its marks are not the operation itself.
        first, last = bisect_left(self.segments, begin), bisect_left(self.segments, end)
        return last - 1 if first < last else -1

    def _event_instant(self, event: int) -> int:
        if not self.ledger.steps:
            return -1
        requests = self.ledger.requests
        answer = requests[event].answer
        following = requests[event + 1].entry if event + 1 < len(requests) else 1 << 60
        return self._instant(answer, following)

    def instant(self, moment: Moment) -> int:
        """The step of the ledger at which a moment has the most live bytes; -1 if unknown."""
        if moment.phase == "forward":
            return self._operation_instant(moment.place)
        if moment.phase == "backward":
            return self._event_instant(moment.place)
        if not self.ledger.steps:
            return -1
        return bisect_left(self.segments, self.ledger.requests[moment.place].entry)

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
        held_ends, retained_ends = [0] * count, [0] * count
        for v, (node, start, end) in enumerate(
            zip(graph.values, trace.start, trace.alive, strict=True)
        ):
            if self.sim.free[v] or start == ABSENT or end < 0:
                continue
            holds = self.retain[v] == HOLD
            into, ends = (held, held_ends) if holds else (retained, retained_ends)
            into[max(start, 0)] += node.nbytes
            into[end + 1] -= node.nbytes
            ends[end] += node.nbytes
        for index, end in self._given():
            nbytes = graph.values[graph.events[index].value].nbytes
            retained[index] += nbytes
            retained[end + 1] -= nbytes
            retained_ends[end] += nbytes
        moments = []
        for index, (event, kept, redone) in enumerate(
            zip(graph.events, accumulate(held), accumulate(retained), strict=False)
        ):
            gradient, pinned = self._others(index)
            if trace.replay[index]:
                moments.append(self._replay(index, kept, gradient, pinned))
            other = event.peak_other
            if event.after > other + held_ends[index] + retained_ends[index]:
                other = event.after  # the most is after its releases
                kept, redone = kept - held_ends[index], redone - retained_ends[index]
            gradient = min(other, gradient)
            pinned = min(other - gradient, pinned)
            moments.append(
                Moment(
                    "backward",
                    index,
                    self._event_site(index),
                    kept + pinned,
                    redone,
                    gradient,
                    other - gradient - pinned,
                )
            )
        return moments

    def _given(self) -> Iterator[tuple[int, int]]:
        """Events whose node has a value that the plan does not retain, with the last event of that
        node."""
        for index, event in enumerate(self.graph.events):
            if not self.there(event.value, index):
                yield index, self.graph.ends[index]

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
        """Bytes of leaves' gradients, and of what no plan can drop (`_stays`), at an event."""
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

    # ------------------------------------------------------------------ the items of a moment

    def _items(self, moment: Moment) -> tuple[Item, ...]:
        found = [self.item(v, kind) for v, kind in self._values_at(moment)]
        instant = self.instant(moment)
        if moment.phase == "replay":
            # What the replay makes on its way is known only as a sum.
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
        """Count a storage once: contents written in place are several values of one storage."""
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
        """Remove items that were freed by `instant`: what the releases of an event free is not
        there after them, where the most bytes may be."""
        there = []
        for item in found:
            block = self.names.get(item.value)
            if rest < 0 <= instant and block is not None and block.died <= instant:
                rest += item.nbytes
            else:
                there.append(item)
        return there, rest

    def _values_at(self, moment: Moment) -> list[tuple[int, str]]:
        """Values that the plan holds or has recomputed at a moment, with their kinds."""
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
            # What a replay itself retains does not count as retained during that replay.
            before = start < moment.place if moment.phase == "replay" else start <= moment.place
            if start != ABSENT and before and self.trace.alive[v] >= moment.place:
                found.append((v, "kept" if kept else "recomputed"))
        if moment.phase != "forward":
            for index, end in self._given():
                if index + (moment.phase == "replay") <= moment.place <= end:
                    found.append((self.graph.events[index].value, "recomputed"))
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
        """The item for a storage that is live whatever the plan says."""
        kind = "gradient" if block.gradient else "kept" if self._stays(block) else "temporary"
        return Item(block.nbytes, kind, block.site, block.shape, block.dtype, block.name, -1)

    def _still_used(self, block: Block, moment: Moment) -> bool:
        """Whether a value that the plan drops is still in memory, as the forward still uses it."""
        return moment.phase == "forward" and any(
            self.graph.stays[v] >= moment.place for v in block.values if v >= 0
        )

    def _gradients_at(self, moment: Moment) -> list[Item]:
        """If a real step was recorded: gradients by name; nothing else can be told apart."""
        if moment.phase == "forward" or not moment.gradient:
            return []
        maker = self.graph.values[self.graph.events[moment.place].value].producer
        found = [item for item, reader in self.recorded_gradients() if reader > maker]
        return found if sum(i.nbytes for i in found) <= moment.gradient else []

    def recorded_gradients(self) -> list[tuple[Item, int]]:
        """If a real step was recorded: gradients of leaves, with each leaf's last reader."""
        return [
            (Item(nbytes, "gradient", Site(), (), "", name, -1), reader)
            for nbytes, reader, name in self.ledger.gradients
        ]

    def item(self, value: int, kind: str) -> Item:
        """The item for a value, with what is known about it."""
        node = self.graph.values[value]
        block, saved = self.names.get(value), self.saved.get(value)
        shape: tuple[int, ...] = ()
        dtype = ""
        if saved is not None:
            shape, dtype = saved.shape, saved.dtype
        elif block is not None:
            shape, dtype = block.shape, block.dtype
        if not node.owned:
            site = self.ledger.sites[node.producer]
        elif block is not None:
            site = block.site
        else:  # no operation of the record has made it
            reader = self.ledger.sites[self.graph.consumers[value][0]]
            site = replace(reader, operator=f"read by {reader.operator}")
        return Item(node.nbytes, kind, site, shape, dtype, "", value)
