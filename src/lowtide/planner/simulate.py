"""The engine's memory behaviour, event by event, for a plan that has not been run.

Problem: a solver tries hundreds of plans and needs the peak and the replayed time of each, exactly
as the engine would give them, in a few milliseconds of plain Python.

Invariant: this module is the definition of what a plan means. The rules:
1. In the forward a held value counts from the operation after its last use, or after the last
   during which something outside the tape holds it (`ValueNode.named`). Until then it is in memory
   in any case and is part of `other`.
2. A value lives until its release and as long as an operation that reads it may be replayed; an
   operation may be replayed as long as one of its outputs that is not held lives. A held value cuts
   the link to its producer. A held or retained value is freed after the last event of its life.
   An external that only the record has (`ValueNode.owned`) is such a value, and always held; so
   is a value that is cut off from its operation (`ValueNode.cut`).
3. At an event whose value is missing, the operations that lead to it from values in memory run in
   recorded order. Outputs that nothing needs are freed right after their operation, temporaries
   after their last reader in this replay; an output with a pending handle is retained if the plan
   says so.
4. While an operation is replayed, all its outputs and its workspace count. One that writes in place
   writes the memory of a temporary that it is the last to read, and that of a copy otherwise. An
   unpacked value that is not retained counts until the last event of the node that asked for it
   (`Graph.ends`), though no replay finds it.
5. What ends at an event is in memory until its releases, and not from then to the next event.

Imports: `lowtide.planner.graph`, `lowtide.planner.retention`, `lowtide.errors`.

Rejected: vectorising with numpy. A replay is a walk with few independent steps, and numpy would be
the package's only dependency besides torch. Where there is a compiled simulator, it is asked; what
it says is equal, so this remains the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Any, ClassVar, Protocol

from lowtide.errors import UsageError
from lowtide.planner.graph import Graph
from lowtide.planner.retention import keep_all

REPLAY_OVERHEAD = 20e-6
"""Seconds added for each replayed operation: dispatch takes time even if the kernel takes none."""

ABSENT = 1 << 61
"""In `Trace.start`: the value is never held or retained."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a plan's bytes are and when: lists indexed by operation, event or value."""

    forward: list[int]
    """For each operation, the peak while it runs in the forward; then, if `Graph.turn` is set, the
    peak between the last operation and the first event."""
    backward: list[int]
    """For each event, the peak from its unpack (replay included) to the next, also after its
    releases."""
    replay: list[int]
    """For each event, the peak within its replay, 0 where nothing is replayed."""
    start: list[int]
    """For each value, the event that retains it; -1 if held from the forward; else `ABSENT`."""
    alive: list[int]
    """For each value, the last event of its life; -1 if backward never needs it."""
    replays: list[int]
    """For each operation, how often it is replayed."""
    peak_op: int
    """The operation being replayed at the peak, or -1."""
    missed: list[tuple[int, int]]
    """(value, event): a value with a pending handle was recomputed and, by the plan, dropped."""

    def missed_at(self) -> dict[int, list[int]]:
        """For each value in `missed`, its events in their order."""
        found: dict[int, list[int]] = {}
        for value, event in self.missed:
            found.setdefault(value, []).append(event)
        return found


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan costs."""

    peak: int
    peak_at: tuple[str, int]
    """("forward", operation), ("replay", event) or ("backward", event). In the forward, an index
    equal to the number of operations means the time after the last of them."""
    seconds: float
    """Replayed time, including `REPLAY_OVERHEAD` for each operation."""
    replayed_ops: int
    held_bytes_at_peak: int
    """Bytes at the peak that are held or retained by the plan."""
    complete: bool = True
    """False if the simulation was cut short because it replayed more than the caller allowed."""
    trace: Trace | None = None


Lists = tuple[list[Any], ...]


class Compiled(Protocol):
    """Simulates plans of one graph as `Simulator` does, in a hundredth of the time; see
    `simulator.h`."""

    def run(
        self, retain: Sequence[int], seconds_limit: float, trace: bool, /
    ) -> tuple[Any, ...] | None:
        """The fields of a `Simulation` in their order, the last of them, if wanted, those of a
        `Trace`; None if the plan drops what cannot be replayed."""
        ...


class Simulator:
    """A graph flattened into lists, ready to try plans."""

    compiled: ClassVar[Callable[[], Callable[[Lists], Compiled] | None]] = staticmethod(
        lambda: None
    )
    """What simulates faster than this class, with the same results; None: nothing does."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nbytes = [v.nbytes for v in graph.values]
        self.producer = [v.producer for v in graph.values]
        self.free = [v.pinned or (v.producer < 0 and not v.owned) for v in graph.values]
        # Externals and pinned values are always in memory, so no walk needs to look at them.
        self.reads = [
            tuple(x for x in dict.fromkeys(op.inputs) if not self.free[x]) for op in graph.ops
        ]
        cut = frozenset(graph.cut)
        self.outputs = [
            tuple([w for w in op.outputs if w not in cut]) if cut else op.outputs
            for op in graph.ops
        ]
        self.work = [sum(self.nbytes[w] for w in op.outputs) + op.workspace for op in graph.ops]
        self.overwrites = [op.overwrites for op in graph.ops]
        self.cost = [op.seconds + REPLAY_OVERHEAD for op in graph.ops]
        self.replayable = [op.replayable for op in graph.ops]
        for value in (*graph.owned, *graph.cut):
            self._make_apart(value)
        if len(self.cost) in graph.stays:  # in memory until after the last operation: one more
            self._make_nothing()
        self.release = list(graph.release)
        self.last_use = list(graph.last_use)
        self.stays = list(graph.stays)
        self.event_value = [e.value for e in graph.events]
        self.event_other = [e.other for e in graph.events]
        self.event_peak = [e.peak_other for e in graph.events]
        self.event_after = [e.after for e in graph.events]
        self.event_end = list(graph.ends)
        self.forward_peak = [op.peak_other for op in graph.ops]
        if graph.turn:
            self.forward_peak.append(graph.turn)
        self.backwards = [
            (reads, outs) for reads, outs in zip(self.reads, self.outputs, strict=True)
        ][::-1]
        self.evaluations = 0
        self._compiled: Compiled | None = None

    def _make_apart(self, value: int) -> None:
        """Give a value that no replay makes and that counts bytes a producer of its own. It is one
        more entry after those of the operations, and is none of the forward."""
        self.producer[value] = len(self.cost)
        self._make_nothing((value,))

    def _make_nothing(self, outputs: tuple[int, ...] = ()) -> None:
        self.reads.append(())
        self.outputs.append(outputs)
        self.work.append(sum(self.nbytes[value] for value in outputs))
        self.overwrites.append(())
        self.cost.append(0.0)
        self.replayable.append(False)

    def output_of(self, op: int) -> str:
        """In words, for errors."""
        if op < len(self.graph.ops):
            return f"an output of operation {op} ({self.graph.ops[op].name})"
        value = self.outputs[op][0]
        external = self.graph.values[value].producer < 0
        return f"value {value}, {'an external' if external else 'cut off from its operation'}"

    def lists(self) -> Lists:
        """The lists, in the order in which `planning.h` reads them."""
        return (
            self.nbytes,
            self.producer,
            self.free,
            self.release,
            self.stays,
            self.reads,
            self.outputs,
            self.work,
            self.overwrites,
            self.cost,
            self.replayable,
            self.event_value,
            self.event_other,
            self.event_peak,
            self.event_after,
            self.event_end,
            self.forward_peak,
        )

    def lifetimes(self, retain: Sequence[int]) -> list[int]:
        """For each value, the last event of its life under a plan (rule 2)."""
        alive = self.release.copy()
        free = self.free
        for reads, outs in self.backwards:
            last = -1
            for w in outs:
                if alive[w] > last and retain[w] >= 0 and not free[w]:
                    last = alive[w]
            if last >= 0:
                for x in reads:
                    if alive[x] < last:
                        alive[x] = last
        return alive

    def run(
        self, retain: Sequence[int], *, trace: bool = False, seconds_limit: float = float("inf")
    ) -> Simulation:
        """Peak and replayed time of a plan.

        Stops, with `complete` false, once more than `seconds_limit` has been replayed.
        """
        self.evaluations += 1
        if self.evaluations == 2:  # copying the lists does not pay for a single plan
            make = Simulator.compiled()
            self._compiled = make(self.lists()) if make is not None else None
        if self._compiled is not None:
            found = self._compiled.run(retain, seconds_limit, trace)
            if found is not None:
                peak, at, seconds, count, held, complete, lists = found
                details = Trace(*lists) if trace else None
                return Simulation(peak, at, seconds, count, held, complete, details)
        return _Run(self, retain, seconds_limit).simulate(trace)


class _Run:
    """One simulation in progress."""

    def __init__(self, sim: Simulator, retain: Sequence[int], seconds_limit: float) -> None:
        self.sim = sim
        self.retain = retain
        self.seconds_limit = seconds_limit
        self.seconds = 0.0
        self.count = 0
        self.alive = sim.lifetimes(retain)
        self.start = [
            -1 if free or (h < 0 and last >= 0) else ABSENT
            for free, h, last in zip(sim.free, retain, self.alive, strict=True)
        ]
        self.expire = [0] * len(sim.event_value)
        self.bytes = 0
        self.replays = [0] * len(sim.cost)
        self.replay_peak = (0, -1, 0)
        self.missed: list[tuple[int, int]] = []

    def forward(self) -> list[int]:
        """Total bytes at each operation of the forward; also sets up `bytes` and `expire` for
        backward."""
        sim, alive, expire = self.sim, self.alive, self.expire
        steps = [0] * (len(sim.cost) + 1)
        nbytes, stays = sim.nbytes, sim.stays
        for value, (h, free) in enumerate(zip(self.retain, sim.free, strict=True)):
            if h < 0 and not free and alive[value] >= 0:
                steps[stays[value] + 1] += nbytes[value]
                expire[alive[value]] += nbytes[value]
        held = list(accumulate(steps))
        self.bytes = held[-1]
        self.held_forward = held
        return list(map(add, sim.forward_peak, held))

    def simulate(self, trace: bool) -> Simulation:
        sim, start, expire = self.sim, self.start, self.expire
        forward = self.forward()
        peak, at, held = 0, ("forward", 0), 0
        if forward:
            peak = max(forward)
            where = forward.index(peak)
            at, held = ("forward", where), self.held_forward[where]
        peak_op = -1
        backward: list[int] = []
        replay_peaks = [0] * len(expire)
        complete = True
        for event, value in enumerate(sim.event_value):
            top = 0
            if start[value] == ABSENT:
                self.replay(event, value)
                top, op, bytes_then = self.replay_peak
                replay_peaks[event] = top
                if top > peak:
                    peak, at, held, peak_op = top, ("replay", event), bytes_then, op
                if self.seconds > self.seconds_limit:
                    complete = False
                    break
            there = self.bytes
            total = sim.event_peak[event] + there
            self.bytes -= expire[event]
            after = sim.event_after[event] + self.bytes
            if after > total:
                total, there = after, self.bytes
            if total > peak:
                peak, at, held, peak_op = total, ("backward", event), there, -1
            backward.append(total if total > top else top)
        details = (
            Trace(
                forward,
                backward,
                replay_peaks,
                start,
                self.alive,
                self.replays,
                peak_op,
                self.missed,
            )
            if trace
            else None
        )
        return Simulation(peak, at, self.seconds, self.count, held, complete, details)

    def closure(self, value: int) -> tuple[list[int], dict[int, int]]:
        """Operations to run for a missing value, in order, and how many of them read each missing
        value."""
        sim, start = self.sim, self.start
        producer, reads = sim.producer, sim.reads
        first = producer[value]
        seen = {first}
        stack = [first]
        readers: dict[int, int] = {}
        while stack:
            op = stack.pop()
            if not sim.replayable[op]:
                raise UsageError(
                    f"the plan lets go of {sim.output_of(op)}, which cannot be replayed and is "
                    f"needed for value {value}; hold every value in graph.must_hold"
                )
            for x in reads[op]:
                if start[x] == ABSENT:
                    readers[x] = readers.get(x, 0) + 1
                    made = producer[x]
                    if made not in seen:
                        seen.add(made)
                        stack.append(made)
        return sorted(seen), readers

    def replay(self, event: int, value: int) -> None:
        """Replay the closure of a missing value."""
        sim, start, retain, expire = self.sim, self.start, self.retain, self.expire
        nbytes, outputs, reads, work = sim.nbytes, sim.outputs, sim.reads, sim.work
        release, cost, alive, overwrites = sim.release, sim.cost, self.alive, sim.overwrites
        order, readers = self.closure(value)
        other = sim.event_other[event]
        peak, peak_op, peak_held = -1, -1, 0
        bytes_, temporary, seconds = self.bytes, 0, 0.0
        for op in order:
            total = bytes_ + temporary + work[op]
            for x in overwrites[op]:
                if readers.get(x, 0) == 1 and start[x] == ABSENT:
                    total -= nbytes[x]
            if total > peak:
                peak, peak_op, peak_held = total, op, bytes_
            seconds += cost[op]
            self.replays[op] += 1
            for w in outputs[op]:
                if start[w] != ABSENT:
                    continue
                if retain[w] <= event <= release[w]:
                    start[w] = event
                    bytes_ += nbytes[w]
                    expire[alive[w]] += nbytes[w]
                    continue
                if w == value or w in readers:
                    temporary += nbytes[w]
                if event < release[w]:
                    self.missed.append((w, event))
            for x in reads[op]:
                left = readers.get(x, 0)
                if left == 1 and start[x] == ABSENT:
                    temporary -= nbytes[x]
                if left:
                    readers[x] = left - 1
        if start[value] == ABSENT:  # the node that asked for it has it, and nothing else
            bytes_ += nbytes[value]
            expire[sim.event_end[event]] += nbytes[value]
        self.bytes = bytes_
        self.seconds += seconds
        self.count += len(order)
        self.replay_peak = (peak + other, peak_op, peak_held)


def simulate(graph: Graph, retain: Sequence[int], *, trace: bool = False) -> Simulation:
    """Simulate one plan. To simulate many, build a `Simulator`."""
    if len(retain) != len(graph.values):
        raise UsageError(f"{len(retain)} decisions for a graph of {len(graph.values)} values")
    return Simulator(graph).run(retain, trace=trace)


def plain_peak(graph: Graph) -> int:
    """The peak of the plain step, in which nothing is recomputed."""
    return Simulator(graph.plain).run(keep_all(graph).retain).peak
