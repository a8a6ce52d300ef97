"""The simulator's rules, implemented literally: reachability from pending handles at each event.

Slow and short on purpose; it shares no code with `lowtide.planner.simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.planner import Graph


def reachable(graph: Graph, retain: Sequence[int], event: int) -> set[int]:
    """Values reachable by references while the handles of this event are pending."""
    stack = [v for v, release in enumerate(graph.release) if release >= event]
    found = set(stack)
    while stack:
        value = stack.pop()
        node = graph.values[value]
        if node.producer < 0 or node.pinned or retain[value] == -1:
            continue
        for x in graph.ops[node.producer].inputs:
            if x not in found:
                found.add(x)
                stack.append(x)
    return found


def peak_and_replays(graph: Graph, retain: Sequence[int]) -> tuple[int, list[int]]:
    """The peak of the whole step and the operations replayed, in order."""
    size = [v.nbytes for v in graph.values]
    free = {
        v
        for v, node in enumerate(graph.values)
        if node.pinned or (node.producer < 0 and not node.owned)
    }
    stored = {v for v, h in enumerate(retain) if h == -1 and v not in free}
    stored &= reachable(graph, retain, 0)
    peak = 0
    for index, op in enumerate(graph.ops):
        ended = (v for v in stored if max(graph.last_use[v], graph.values[v].named) < index)
        peak = max(peak, op.peak_other + sum(size[v] for v in ended))
    replayed: list[int] = []
    given: list[tuple[int, int]] = []  # (event, bytes): what a node has until then
    for index, event in enumerate(graph.events):
        stored &= reachable(graph, retain, index)
        given = [(end, nbytes) for end, nbytes in given if end >= index]
        if event.value not in stored | free:
            order = _closure(graph, stored | free, event.value)
            there = sum(nbytes for _, nbytes in given)
            peak = max(peak, there + _replay(graph, retain, index, order, stored, free))
            replayed += order
            if event.value not in stored:
                end = graph.release[event.value] if event.more < 0 else index + event.more
                given.append((end, size[event.value]))
        there = sum(nbytes for _, nbytes in given)
        peak = max(peak, event.peak_other + sum(size[v] for v in stored) + there)
        left = stored & reachable(graph, retain, index + 1)
        there = sum(nbytes for end, nbytes in given if end > index)
        peak = max(peak, event.after + sum(size[v] for v in left) + there)
    return peak, replayed


def _closure(graph: Graph, available: set[int], value: int) -> list[int]:
    needed, missing = set(), [value]
    while missing:
        op = graph.values[missing.pop()].producer
        needed.add(op)
        missing += [
            x
            for x in graph.ops[op].inputs
            if x not in available and graph.values[x].producer not in needed
        ]
    return sorted(needed)


def _replay(
    graph: Graph,
    retain: Sequence[int],
    index: int,
    order: list[int],
    stored: set[int],
    free: set[int],
) -> int:
    """Replay operations, adding what the plan retains to `stored`; returns the peak."""
    size = [v.nbytes for v in graph.values]
    event = graph.events[index]
    temporary: set[int] = set()
    peak = 0
    for place, number in enumerate(order):
        op = graph.ops[number]
        standing = sum(size[v] for v in stored | temporary)
        making = sum(size[w] for w in op.outputs) + op.workspace
        wanted = {event.value}.union(*(graph.ops[later].inputs for later in order[place + 1 :]))
        making -= sum(size[x] for x in op.overwrites if x in temporary - wanted)
        peak = max(peak, event.other + standing + making)
        for w in op.outputs:
            if w in stored or w in free:
                continue
            if retain[w] <= index <= graph.release[w]:
                stored.add(w)
            else:
                temporary.add(w)
        temporary &= wanted
    return peak
