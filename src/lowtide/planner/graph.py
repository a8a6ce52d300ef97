"""A recorded step as plain data: what was computed, what was saved, what backward asked for.

Problem: deciding what to recompute needs only sizes, times, dependencies and the memory that the
plan does not control. Tensors here would keep memory alive and could not be serialized.

Invariant: a `Graph` is immutable and checked when built. Operations are in recorded order, so
every operation reads values with smaller producers; events are in backward order; a value is
never released before its last event. Whatever passes the constructor can be simulated.

Imports: `lowtide.errors`, `lowtide.planner.fields`, `lowtide.planner.nodes`,
`lowtide.planner.wellformed`, the standard library. Never torch.

Rejected: a general graph library. Ids are positions in tuples; the solvers copy them into flat
lists once and never touch these classes in a loop.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from lowtide.errors import UsageError
from lowtide.planner import fields
from lowtide.planner.nodes import UNKNOWN as UNKNOWN
from lowtide.planner.nodes import Event as Event
from lowtide.planner.nodes import OpNode as OpNode
from lowtide.planner.nodes import ValueNode as ValueNode
from lowtide.planner.wellformed import EXTERNAL as EXTERNAL
from lowtide.planner.wellformed import check

FORMAT = "lowtide.graph"
VERSION = 4


@dataclass(frozen=True)
class Graph:
    """A recorded step. It has no slots, so that derived facts can be cached."""

    values: tuple[ValueNode, ...]
    ops: tuple[OpNode, ...]
    events: tuple[Event, ...]
    turn: int = 0
    """The maximum of bytes that the plan does not hold between the last operation and the first
    event, where a loss that was not recorded may allocate. 0 where it is no higher than the
    neighbouring peaks."""

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the operations that read it, in recorded order."""
        found: list[list[int]] = [[] for _ in self.values]
        for index, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                found[value].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each value, the last operation of the forward that reads it; if none does, the one
        that makes it."""
        return tuple(
            readers[-1] if readers else node.producer
            for node, readers in zip(self.values, self.consumers, strict=True)
        )

    @cached_property
    def stays(self) -> tuple[int, ...]:
        """For each value, the operation up to which it is in memory even if it is not held."""
        return tuple(
            max(node.named, last) for node, last in zip(self.values, self.last_use, strict=True)
        )

    @property  # not cached: it may be this graph, which would refer to itself
    def plain(self) -> Graph:
        """The plain step: what autograd saves for a graph that dies before any backward stays in
        memory as long as that graph lives, and what is only read does not stay."""
        change = [0] * (len(self.ops) + 2)
        values = list(self.values)
        for value, (node, stays) in enumerate(zip(values, self.stays, strict=True)):
            mine = node.producer >= 0 and not (node.pinned or node.overwritten)
            if mine and node.forgotten > stays:
                change[stays + 1] += node.nbytes
                change[node.forgotten + 1] -= node.nbytes
                values[value] = replace(node, named=node.forgotten)
            if node.cut >= 0:
                change[node.cut + 1] -= node.nbytes
                change[stays + 1] += node.nbytes
                values[value] = replace(values[value], named=node.cut, cut=-1)
        if not any(change) and not self.cut:
            return self
        ops = tuple(
            replace(op, other=max(0, op.other + more), peak_other=max(0, op.peak_other + more))
            for op, more in zip(self.ops, accumulate(change), strict=False)
        )
        turn = max(0, self.turn + sum(change[: len(ops) + 1]))
        return replace(self, values=tuple(values), ops=ops, turn=turn)

    @cached_property
    def over(self) -> Graph:
        """The step once its forward is over: the memory of that does not count."""
        ops = tuple([replace(op, other=0, peak_other=0) for op in self.ops])
        return replace(self, ops=ops, turn=0)

    @cached_property
    def first_event(self) -> tuple[int, ...]:
        """For each value, the first event that unpacks it, or -1."""
        first = [-1] * len(self.values)
        for index in range(len(self.events) - 1, -1, -1):
            first[self.events[index].value] = index
        return tuple(first)

    @cached_property
    def last_event(self) -> tuple[int, ...]:
        """For each value, the last event that unpacks it, or -1."""
        last = [-1] * len(self.values)
        for index, event in enumerate(self.events):
            last[event.value] = index
        return tuple(last)

    @cached_property
    def release(self) -> tuple[int, ...]:
        """For each value, the event after which no handle is left, or -1 if there never was one.

        A value that is unpacked and never released (a retained graph) has its handle to the end.
        """
        end = len(self.events) - 1
        release = [-1 if last < 0 else end for last in self.last_event]
        for index, event in enumerate(self.events):
            for value in event.releases:
                release[value] = index
        return tuple(release)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """For each event, the last one during which the node that asks has what it was given."""
        return tuple(
            self.release[event.value] if event.more == UNKNOWN else index + event.more
            for index, event in enumerate(self.events)
        )

    @cached_property
    def asked(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the events that unpack it."""
        found: list[list[int]] = [[] for _ in self.values]
        for index, event in enumerate(self.events):
            found[event.value].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def latest(self) -> tuple[int, ...]:
        """For each value, the last event from which on a plan may have reason to retain it; -1 if
        none unpacks it.

        That is the first that unpacks it, or a later one if the nodes that ask before then are over
        by then, as in another backward through the same graph.
        """
        found = []
        for events in self.asked:
            latest = events[0] if events else -1
            for event, following in pairwise(events):
                if self.ends[event] >= following:
                    break
                latest = following
            found.append(latest)
        return tuple(found)

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """For each value, the last event at which backward needs it, or -1.

        That is its release. A value that is never released, because the graph is retained, is
        needed until its last unpack: it may then be dropped, and recomputed if another backward
        asks for it.
        """
        released = {value for event in self.events for value in event.releases}
        return tuple(
            release if value in released else last
            for value, (release, last) in enumerate(zip(self.release, self.last_event, strict=True))
        )

    def retained(self) -> Graph:
        """This step with a retained graph: its backward releases no saved value. What it does not
        ask for, and another graph has, is released after the last event."""
        released = {value for event in self.events for value in event.releases}
        others = tuple(sorted(released.difference(event.value for event in self.events)))
        events = [replace(event, releases=()) for event in self.events]
        if others:
            events[-1] = replace(events[-1], releases=others)
        return replace(self, events=tuple(events))

    @cached_property
    def must_hold(self) -> frozenset[int]:
        """Values that no replay can make but that backward or a replay may need."""
        found = set()
        for op in self.ops:
            if op.replayable:
                continue
            for value in op.outputs:
                read = any(self.ops[reader].replayable for reader in self.consumers[value])
                if self.release[value] >= 0 or read:
                    found.add(value)
        return frozenset(found.union(self.owned, self.cut))

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The values of its operations that no replay can make, see `ValueNode`."""
        return tuple([value for value, node in enumerate(self.values) if node.cut >= 0])

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """The externals that only the record has. They are the last of its values."""
        return tuple([value for value, node in enumerate(self.values) if node.owned])

    @property
    def recorded(self) -> int:
        """How many of its values are not `owned`: those whose ids the recorder knows."""
        return len(self.values) - len(self.owned)

    @cached_property
    def fleeting(self) -> frozenset[int]:
        """Values that no plan may hold: nothing saves them, and their storage is overwritten. One
        that no replay can make is held all the same, if a replay may read it."""
        return frozenset(
            value
            for value, (node, release) in enumerate(zip(self.values, self.release, strict=True))
            if node.overwritten and release < 0 and value not in self.must_hold
        )

    @cached_property
    def seconds(self) -> float:
        """Time of the recorded operations, once each."""
        return sum(op.seconds for op in self.ops)

    @cached_property
    def saved(self) -> int:
        """Bytes of the saved values that a plan decides on."""
        return sum(
            node.nbytes
            for node, release in zip(self.values, self.release, strict=True)
            if release >= 0 and node.producer >= 0 and not node.pinned
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the structure: equal fingerprints mean that value ids mean the same.

        Times, memory outside the plan, `pinned`, `named`, `owned` and `cut` values are observations
        that vary from step to step, so they are left out: a plan stays applicable when they are
        measured again.
        """
        known = self.recorded
        text = json.dumps(
            [
                [[v.nbytes, v.producer] for v in self.values[:known]],
                [
                    [o.name, [v for v in o.inputs if v < known], o.outputs, o.replayable]
                    for o in self.ops
                ],
                [[e.value, [v for v in e.releases if v < known]] for e in self.events],
            ],
            separators=(",", ":"),
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """The graph as JSON; `from_json` reads an equal one back."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "values": [[v.nbytes, v.producer, v.pinned, v.named] for v in self.values],
                "overwritten": [k for k, v in enumerate(self.values) if v.overwritten],
                "owned": self.owned,
                "cut": [[value, self.values[value].cut] for value in self.cut],
                "forgotten": [
                    [k, v.forgotten] for k, v in enumerate(self.values) if v.forgotten >= 0
                ],
                "ops": [
                    [
                        o.name,
                        o.seconds,
                        o.inputs,
                        o.outputs,
                        o.workspace,
                        o.replayable,
                        o.other,
                        o.peak_other,
                    ]
                    for o in self.ops
                ],
                "overwrites": [[k, o.overwrites] for k, o in enumerate(self.ops) if o.overwrites],
                "events": [
                    [e.value, e.other, e.peak_other, e.releases, e.after] for e in self.events
                ],
                "more": [e.more for e in self.events],
                "turn": self.turn,
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Graph:
        """Read what `to_json` wrote. Anything else is a `UsageError`; nothing is executed."""
        data = fields.read_document(text, FORMAT, VERSION)
        overwritten = frozenset(fields.ids(data.get("overwritten")))
        owned = frozenset(fields.ids(data.get("owned")))
        cut = fields.at_places(data, "cut", fields.whole)
        forgotten = fields.at_places(data, "forgotten", fields.whole)
        overwrites = fields.at_places(data, "overwrites", fields.ids)
        values = tuple(
            ValueNode(
                fields.whole(row[0]),
                fields.whole(row[1]),
                fields.flag(row[2]),
                place in overwritten,
                fields.whole(row[3]),
                forgotten.get(place, -1),
                place in owned,
                cut.get(place, -1),
            )
            for place, row in enumerate(fields.rows(data, "values", 4))
        )
        ops = tuple(
            OpNode(
                fields.text(row[0]),
                fields.number(row[1]),
                fields.ids(row[2]),
                fields.ids(row[3]),
                fields.whole(row[4]),
                fields.flag(row[5]),
                fields.whole(row[6]),
                fields.whole(row[7]),
                overwrites.get(place, ()),
            )
            for place, row in enumerate(fields.rows(data, "ops", 8))
        )
        events = tuple(
            Event(
                fields.whole(row[0]),
                fields.whole(row[1]),
                fields.whole(row[2]),
                fields.ids(row[3]),
                fields.whole(row[4]),
            )
            for row in fields.rows(data, "events", 5)
        )
        more = fields.ids(data.get("more", [UNKNOWN] * len(events)))
        if len(more) != len(events):
            raise UsageError(f"damaged document: {len(events)} events, {len(more)} entries in more")
        events = tuple(map(lambda event, count: replace(event, more=count), events, more))
        return Graph(values, ops, events, fields.whole(data.get("turn")))
