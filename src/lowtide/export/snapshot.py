"""A step as a memory snapshot for torch's memory viewer, without running it.

Problem: https://pytorch.org/memory_viz shows block by block what CUDA's allocator did, but a step
that was only planned, or ran on the CPU, did not use that allocator. Invariant: the blocks that are
live at a moment of the timeline add up to that moment's bytes, so the highest sum is its peak; no
two live blocks overlap. Imports timeline, study. Rejected: the dry run's own allocations, which are
those of the plain step.

Addresses are invented: a block goes into the first gap that is large enough, while a real allocator
rounds sizes and splits segments. Bytes of a moment without a known origin are a block of their own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.analysis.study import Study
from lowtide.analysis.timeline import Item, Moment, Reader
from lowtide.dryrun.found import OUTSIDE
from lowtide.dryrun.ledger import FOREVER
from lowtide.planner import HOLD
from lowtide.planner.simulate import ABSENT
from lowtide.plans import Plan

PICKLE_PROTOCOL = 4
"""The newest protocol that the viewer reads."""

_BASE = 1 << 32  # the lowest address; the viewer would read zero as none
_TICK = 1000  # microseconds of the snapshot's clock per moment


def snapshot(subject: Study, plan: Plan) -> dict[str, Any]:
    """A step under a plan, as plain data in the format of `torch.cuda.memory._snapshot`.

    There is one device with one segment, as large as the memory that the blocks take up. Each block
    has its operator, source line, module, shape and dtype as frames, and its kind as `category`.
    The clock is a position in the step. What was in memory before the step is not included;
    gradients and others that outlive the step are still allocated at its end.
    """
    reader = Reader(replace(subject.step, graph=plan.graph), subject.ledger, plan.retention)
    arena = _Arena()
    events: list[dict[str, Any]] = []
    live: dict[int, _Life] = {}
    for moment, born, life in _changes(reader):
        if born:
            life.address = arena.take(life.item.nbytes)
            live[life.address] = life
        else:
            arena.give(life.address, life.item.nbytes)
            del live[life.address]
        events += _events(moment * _TICK, born, life)
    if not events:
        return {"segments": [], "device_traces": [[]]}
    # The viewer fails if there are categories but none is "unknown".
    made = _event("segment_alloc", 0, _BASE, arena.top - _BASE, []) | {"category": "unknown"}
    return {"segments": [_segment(arena.top, live)], "device_traces": [[made, *events]]}


# ---------------------------------------------------------------------------- lifetimes


@dataclass(slots=True, eq=False)
class _Life:
    """A block that lives from one moment to another, both inclusive.

    In the dry run it was live from step `born` of the ledger (inclusive) to `gone` (exclusive).
    """

    item: Item
    first: int
    last: int
    born: int = 0
    gone: int = FOREVER
    stays: bool = False
    address: int = -1


def _changes(reader: Reader) -> Iterator[tuple[int, bool, _Life]]:
    """What is allocated (True) and freed (False), in order, each with the index of its moment."""
    moments = reader.read().moments
    instants = _instants(reader, moments)
    begins: dict[int, list[_Life]] = {}
    for life in _lives(reader, moments, instants):
        begins.setdefault(life.first, []).append(life)
    standing: list[_Life] = []
    live: list[_Life] = []
    for place, moment in enumerate(moments):
        standing = [life for life in standing if life.last >= place] + begins.get(place, [])
        there = _within(standing, moment.total, place, instants[place])
        there += _unnamed(there, moment, place, known=instants[place] >= 0)
        now, before = set(there), set(live)
        yield from ((place, False, life) for life in live if life not in now)
        yield from ((place, True, life) for life in there if life not in before)
        live = there
    yield from ((len(moments), False, life) for life in live if not life.stays)
    yield from ((len(moments), True, life) for life in begins.get(len(moments), []))


def _instants(reader: Reader, moments: Sequence[Moment]) -> list[int]:
    """For each moment, its step of the ledger; if nothing ran, that of the moment before."""
    found, last = [], -1
    for moment in moments:
        last = max(last, reader.instant(moment))
        found.append(last)
    return found


def _lives(reader: Reader, moments: Sequence[Moment], instants: Sequence[int]) -> list[_Life]:
    """Everything of known origin; a storage has one life at a time."""
    by_storage: dict[tuple[str, int], list[_Life]] = {}
    for value, life in _of_values(reader, moments):
        block = reader.names.get(value)
        if block is not None:
            life.born = block.born
            if reader.trace.alive[value] == reader.graph.release[value]:
                life.gone = block.died  # else replays under this plan need it for longer
        key = ("value", value) if block is None else ("block", block.place)
        by_storage.setdefault(key, []).append(life)
    for number, life in _of_blocks(reader, instants):
        by_storage.setdefault(("block", number), []).append(life)
    found = [life for lives in by_storage.values() for life in _joined(lives)]
    if not reader.ledger.blocks:
        found += _gradients(reader, moments)
    return [life for life in found if life.item.nbytes and life.first <= life.last]


def _of_values(reader: Reader, moments: Sequence[Moment]) -> Iterator[tuple[int, _Life]]:
    """Values that the plan keeps, recomputes and retains, or recomputes for one event only."""
    graph, trace = reader.graph, reader.trace
    backward = [place for place, moment in enumerate(moments) if moment.phase == "backward"]
    for value, node in enumerate(graph.values):
        start, end = trace.start[value], trace.alive[value]
        if reader.sim.free[value] or end < 0:
            continue
        if reader.retain[value] == HOLD:
            first = graph.consumers[value][0] if node.owned else node.producer
            yield value, _Life(reader.item(value, "kept"), first, backward[end])
        elif start != ABSENT:
            yield value, _Life(reader.item(value, "recomputed"), backward[start], backward[end])
    for number, event in enumerate(graph.events):
        if not reader.there(event.value, number):
            place = backward[number]
            yield event.value, _Life(reader.item(event.value, "recomputed"), place, place)


def _of_blocks(reader: Reader, instants: Sequence[int]) -> Iterator[tuple[int, _Life]]:
    """Storages that are live whatever the plan says, and, until their last use, dropped ones."""
    after = len(instants)
    for block in reader.ledger.blocks:
        first = bisect_left(instants, block.born)
        last = bisect_left(instants, block.died) - 1
        if reader.ledger.held.intersection(block.values):
            last = min(last, max(reader.graph.stays[v] for v in block.values if v >= 0))
        stays = block.died >= len(reader.ledger.steps) and last == after - 1
        if stays and first == after:
            last = after  # a gradient that was made after the last moment
        yield block.place, _Life(reader.block(block), first, last, block.born, block.died, stays)


def _gradients(reader: Reader, moments: Sequence[Moment]) -> Iterator[_Life]:
    """If a real step was recorded: each gradient lives from the first event past the leaf's last
    reader."""
    makers = [
        reader.graph.values[reader.graph.events[moment.place].value].producer
        if moment.phase == "backward"
        else FOREVER
        for moment in moments
    ]
    for item, last_reader in reader.recorded_gradients():
        first = next((k for k, maker in enumerate(makers) if maker < last_reader), len(moments))
        yield _Life(item, first, max(first, len(moments) - 1), stays=True)


def _joined(lives: list[_Life]) -> list[_Life]:
    """Join lives of one storage that follow on each other: they are contents of one block."""
    lives = sorted((life for life in lives if life.first <= life.last), key=lambda x: x.first)
    found = lives[:1]
    for life in lives[1:]:
        before = found[-1]
        if life.first > before.last + 1:
            found.append(life)
            continue
        if before.item.kind == "temporary":
            before.item = life.item
        before.last = max(before.last, life.last)
        before.gone = max(before.gone, life.gone)
        before.stays = before.stays or life.stays
    return found


def _within(standing: list[_Life], total: int, place: int, instant: int) -> list[_Life]:
    """The lives that fit into the bytes of a moment. At the instant of its peak, some may not have
    begun, and others may be over; the latter end here."""
    over = sum(life.item.nbytes for life in standing) - total
    if over <= 0:
        return standing.copy()
    away = set()
    for life in sorted(
        standing,
        key=lambda x: (x.born <= instant < x.gone, x.item.kind == "kept", -x.first),
    ):
        if over <= 0:
            break
        if life.gone <= instant:
            life.last = place - 1
        away.add(life)
        over -= life.item.nbytes
    return [life for life in standing if life not in away]


def _unnamed(there: list[_Life], moment: Moment, place: int, *, known: bool) -> list[_Life]:
    """The rest of a moment's bytes: temporaries of replays, and workspace."""
    rest = moment.total - sum(life.item.nbytes for life in there)
    passing = 0
    if moment.phase == "replay":
        named = sum(life.item.nbytes for life in there if life.item.kind == "recomputed")
        passing = max(0, min(rest, moment.recomputed - named))
    parts = (("recomputed", passing), ("workspace" if known else "temporary", rest - passing))
    return [
        _Life(Item(nbytes, kind, moment.site, (), "", "", -1), place, place)
        for kind, nbytes in parts
        if nbytes
    ]


# ---------------------------------------------------------------------------- addresses


class _Arena:
    """Memory from `_BASE` to `top`, and its gaps: (address, size), in order, none adjacent."""

    def __init__(self) -> None:
        self.top = _BASE
        self._gaps: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        """The address of the first gap that is large enough, else one at the top."""
        for place, (address, size) in enumerate(self._gaps):
            if size >= nbytes:
                self._gaps[place : place + 1] = (
                    [(address + nbytes, size - nbytes)] if size > nbytes else []
                )
                return address
        address = self.top
        if self._gaps and sum(self._gaps[-1]) == self.top:
            address, _ = self._gaps.pop()
        self.top = address + nbytes
        return address

    def give(self, address: int, nbytes: int) -> None:
        place = bisect_right(self._gaps, (address, 0))
        if place < len(self._gaps) and self._gaps[place][0] == address + nbytes:
            nbytes += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == address:
            address, before = self._gaps.pop(place - 1)
            nbytes += before
        insort(self._gaps, (address, nbytes))


# ---------------------------------------------------------------------------- the format


def _event(
    action: str, clock: int, address: int, nbytes: int, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": nbytes,
        "stream": 0,
        "time_us": clock,
        "frames": frames,
    }


def _events(clock: int, born: bool, life: _Life) -> list[dict[str, Any]]:
    item, frames = life.item, _frames(life.item)
    actions = ("alloc",) if born else ("free_requested", "free_completed")
    made = [_event(action, clock, life.address, item.nbytes, frames) for action in actions]
    if born:
        made[0]["category"] = item.kind
    return made


def _frames(item: Item) -> list[dict[str, Any]]:
    """Innermost first, as in a stack: the tensor, its operator and line, its module."""
    made = f"{item.dtype}{list(item.shape)}" if item.dtype else ""
    if item.name:
        made = " ".join(filter(None, (made, "gradient of", item.name)))
    file, _, line = item.site.line.rpartition(":")
    frames = [
        ("tensor", 0, made or "(not told apart)"),
        (file or "??", int(line or 0), item.site.operator or "(unknown)"),
        ("module", 0, item.site.module or OUTSIDE),
    ]
    return [{"filename": name, "line": number, "name": text} for name, number, text in frames]


def _segment(top: int, live: dict[int, _Life]) -> dict[str, Any]:
    """The segment and its blocks at the end of the step."""
    blocks: list[dict[str, Any]] = []
    end = _BASE
    for address, life in sorted(live.items()):
        if address > end:
            blocks.append(_block(end, address - end, "inactive", []))
        blocks.append(_block(address, life.item.nbytes, "active_allocated", _frames(life.item)))
        end = address + life.item.nbytes
    if top > end:
        blocks.append(_block(end, top - end, "inactive", []))
    used = sum(life.item.nbytes for life in live.values())
    return {
        "device": 0,
        "address": _BASE,
        "total_size": top - _BASE,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_pool_id": (0, 0),
        "segment_type": "large",
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, nbytes: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": address,
        "size": nbytes,
        "requested_size": nbytes,
        "state": state,
        "frames": frames,
    }
