"""A joint graph as a recorded step, for lowtide's planner.

Problem: the planner assumes that each value is made by an operation that runs by itself; compiled
code fuses operations, and what stays inside a fused kernel takes no memory and little time to
recompute. Invariant: a value has the number of its storage. A storage that the forward never writes
to memory is replaced by the ones it is computed from, and its readers are charged for the time. The
backward's reads are the events; what backward itself makes counts as `other`. Imports joint,
schedule, planner. Rejected: a value for every FX node. The planner then holds what costs nothing to
recompute, and finds limits impossible that are not.
"""

from __future__ import annotations

from lowtide.inductor.joint import OUTSIDE, Joint
from lowtide.inductor.schedule import Outcome, Scheduler
from lowtide.planner import Event, Graph, OpNode, ValueNode


def step_graph(scheduler: Scheduler, saved: frozenset[int]) -> Graph:
    """The graph for the planner. Storages in `saved` count as written to memory in any case."""
    return _View(scheduler, saved).graph()


class _View:
    def __init__(self, scheduler: Scheduler, saved: frozenset[int]) -> None:
        self.scheduler = scheduler
        self.joint: Joint = scheduler.joint
        self.inside = scheduler.inside_forward() - saved
        self.bases: dict[int, tuple[dict[int, None], float]] = {}
        self.early = [
            index
            for index, op in enumerate(self.joint.ops)
            if not op.late and not (op.makes and self.inside.issuperset(op.makes))
        ]
        place = {index: position for position, index in enumerate(self.early)}
        self.values = tuple(
            ValueNode(s.nbytes, place.get(s.maker, OUTSIDE), pinned=number in self.joint.returned)
            for number, s in enumerate(self.joint.storages)
        )

    def graph(self) -> Graph:
        return Graph(self.values, self._operations(), self._events())

    def _base(self, storage: int) -> tuple[dict[int, None], float]:
        """The values in memory that a storage is computed from, and the seconds that takes."""
        if storage not in self.inside:
            return {storage: None}, 0.0
        known = self.bases.get(storage)
        if known is None:
            op = self.joint.ops[self.joint.storages[storage].maker]
            found: dict[int, None] = {}
            seconds = op.seconds
            for read in op.reads:
                below, spent = self._base(read)
                found |= below
                seconds += spent
            known = self.bases[storage] = found, seconds
        return known

    def _reads(self, index: int) -> tuple[tuple[int, ...], float]:
        """What an operation reads from memory, and the seconds of what is computed on the way."""
        found: dict[int, None] = {}
        seconds = 0.0
        for storage in self.joint.ops[index].reads:
            below, spent = self._base(storage)
            found |= below
            seconds += spent
        return tuple(found), seconds

    def _operations(self) -> tuple[OpNode, ...]:
        joint, values = self.joint, self.values
        read = [self._reads(index) for index in self.early]
        last: dict[int, int] = {}
        for position, index in enumerate(self.early):
            for storage in (*joint.ops[index].makes, *read[position][0]):
                last[storage] = position
        nodes = []
        level = 0
        for position, index in enumerate(self.early):
            op = joint.ops[index]
            reads, spent = read[position]
            new = sum(values[s].nbytes for s in op.makes)
            going = sum(
                values[s].nbytes
                for s in {*op.makes, *reads}
                if last[s] == position and values[s].producer != OUTSIDE and not values[s].pinned
            )
            seconds = op.seconds + spent
            if op.fused:  # about half of this traffic is shared with others in the same kernel
                touched = sum(values[s].nbytes for s in (*op.makes, *reads))
                seconds += 0.5 * touched / joint.bandwidth
            peak = level + new + op.workspace - (min(new, going) if op.fused else 0)
            level += new - going
            nodes.append(
                OpNode(
                    str(op.node.target), seconds, reads, op.makes, op.workspace, op.again,
                    level, max(peak, level),
                )
            )  # fmt: skip
        return tuple(nodes)

    def _events(self) -> tuple[Event, ...]:
        """What each operation of the backward reads of the forward's values, and what else is in
        memory at that time."""
        joint = self.joint
        everything = self.scheduler.savable() - self.inside
        outcome = self.scheduler.run(everything)
        others = self._others(outcome)
        asks: list[tuple[int, int]] = []
        for position, index in enumerate(outcome.order):
            if joint.ops[index].late:
                for storage in self._reads(index)[0]:
                    if self.values[storage].producer != OUTSIDE:
                        asks.append((position, storage))
        final = {storage: number for number, (_, storage) in enumerate(asks)}
        events = []
        for number, (position, storage) in enumerate(asks):
            end = asks[number + 1][0] if number + 1 < len(asks) else len(outcome.order)
            level = others[position]
            peak = max(others[position:end], default=level)
            releases = (storage,) if final[storage] == number else ()
            events.append(Event(storage, level, peak, releases))
        return tuple(events)

    def _others(self, outcome: Outcome) -> list[int]:
        """Bytes at each operation of the backward that are not saved by the forward."""
        joint = self.joint
        ours = outcome.kept - joint.returned
        left = dict.fromkeys(ours, 0)
        for position, index in enumerate(outcome.order):
            for storage in self._reads(index)[0] if joint.ops[index].late else ():
                if storage in left:
                    left[storage] = position
        drop = [0] * (len(outcome.order) + 1)
        for storage, position in left.items():
            drop[position + 1] += joint.storages[storage].nbytes
        held = sum(joint.storages[s].nbytes for s in ours)
        others = []
        for position, level in enumerate(outcome.profile):
            held -= drop[position]
            others.append(max(0, level - held))
        return others
