"""From what an observer saw of a step to its graph.

Problem: what was measured belongs to the plan that ran, and the planner asks about others.
Invariant: "other" memory is what was measured minus what that plan held at that moment, so that the
simulator returns the measured peak for the plan that ran; without a measurement it is modelled from
sizes, too high rather than too low. Imports modelled, externals, logs, planner. Rejected: modelling
where there is a measurement.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.backward.modelled import modelled_events
from lowtide.backward.operation import Call
from lowtide.observing.externals import External, externals_of, with_externals
from lowtide.observing.logs import OpLog
from lowtide.observing.measured import measured_events
from lowtide.observing.reached import UNKNOWN
from lowtide.observing.requests import following
from lowtide.planner.graph import Graph, OpNode, ValueNode

if TYPE_CHECKING:
    from lowtide.memory.timeline import Timeline
    from lowtide.observing.observer import Observer

_SCALARS = 256  # bytes, by which a loss made of numbers and its backward may rise


def rebuild(seen: Observer) -> Graph:
    """The step as a graph. Before backward, its events are predicted from the saves."""
    values, stays = _value_nodes(seen)
    sizes = [value.nbytes for value in values]
    ops = _op_nodes(seen, sizes, stays)
    externals = found_externals(seen)
    if seen.requests and seen.timeline:
        events = measured_events(seen, sizes, externals)
        turn = _turn(seen, sizes, stays, sum(each.nbytes for each in externals if each.cut))
        return with_externals(Graph(values, ops, events, turn), externals)
    if seen.timeline:
        return Graph(values, ops, (), _turn(seen, sizes, stays))
    asked = [(request.value, request.operation) for request in seen.requests] or None
    backward = modelled_events(seen, sizes, asked)
    if asked is None:
        seen.to_come = [(a.value, UNKNOWN if a.custom else a.nodes) for a in backward.order]
        reached = [asked.low for asked in backward.order]
        externals = [_released(each, reached) if each.pending else each for each in externals]
    events = backward.events
    if asked is not None:
        pairs = zip(events, following(seen.requests, seen.backwards), strict=True)
        events = tuple([replace(event, more=more) for event, more in pairs])
    return with_externals(Graph(values, ops, events), externals)


def _value_nodes(seen: Observer) -> tuple[tuple[ValueNode, ...], list[int]]:
    """The values, and the last operation of the forward during which each is in memory."""
    count = recorded(seen)
    sizes, producers = [0] * count, [-1] * count
    for index, log in enumerate(seen.ops):
        for number, nbytes in zip(log.outputs, log.sizes, strict=True):
            sizes[number], producers[number] = nbytes, index
    last_use = producers.copy()
    for index, log in enumerate(seen.ops):
        for number in log.inputs:
            last_use[number] = max(last_use[number], index)
    stays = last_use.copy()
    for number, until in seen.names.until.items():
        if number < count:
            stays[number] = max(stays[number], until)
    plain = stays.copy()
    for number in until_backward(seen):
        stays[number] = len(seen.ops)
    overwritten = {number for log in seen.ops for number in log.overwrites}
    values = tuple(
        ValueNode(
            nbytes,
            producer,
            number in seen.pinned,
            number in overwritten,
            stays[number] if stays[number] > last_use[number] else -1,
            min(seen.forgotten.get(number, 0), len(seen.ops)) - 1,
            cut=plain[number] if number in seen.cut and number not in seen.pinned else -1,
        )
        for number, (nbytes, producer) in enumerate(zip(sizes, producers, strict=True))
    )
    return values, stays


def _released(external: External, reached: list[int]) -> External:
    """An external that autograd releases once the backward of the first operation that has read it
    is over. `reached`: for each request, the lowest operation whose backward is over by its
    releases."""
    first, last = external.readers[0], len(reached) - 1
    return replace(external, release=next((i for i, op in enumerate(reached) if op <= first), last))


def until_backward(seen: Observer) -> set[int]:
    """Values that are in memory whatever a plan says until backward asks for something, and then
    may be no more.

    The program had some of them when the forward was over: what is between the two, such as a loss
    that saves its input and releases it in its backward, has them; until when is not known. The
    record has those that no replay makes, as links to them are not cut before.
    """
    return ((seen.names.returned | seen.cut) & seen.reached) - seen.pinned


def recorded(seen: Observer) -> int:
    """The number of values that the record has numbered; externals have the numbers from there
    on."""
    return 1 + max(itertools.chain([-1], *(log.outputs for log in seen.ops)))


def found_externals(seen: Observer) -> list[External]:
    """What only the record had in memory, in the order in which the graph has it."""
    return seen.externals.found(seen.timeline.known if seen.timeline else ())


def before_requests(seen: Observer) -> int:
    """Bytes that a backward which has not run is modelled to have in memory, besides the tape's,
    before it first asks for something; 0 if it asks for nothing."""
    sizes = [0] * recorded(seen)
    for log in seen.ops:
        for number, nbytes in zip(log.outputs, log.sizes, strict=True):
            sizes[number] = nbytes
    backward = modelled_events(seen, sizes, None)
    return backward.before if backward.events else 0


def _typical(ops: Sequence[OpLog], earlier: Iterable[OpLog]) -> list[float]:
    """Seconds of each operation: the median of all calls like it in this step and the one before.

    A single time is noise: a plan made from single times keeps what was slow by chance, and took up
    to 17 % more than one made from medians. Minima would favour what is called more often.
    """
    times: dict[Call, list[float]] = {}
    for log in itertools.chain(earlier, ops):
        if log.kind is not None and log.seconds:  # a step that was not watched is not timed
            times.setdefault(log.kind, []).append(log.seconds)
    medians = {kind: statistics.median_low(found) for kind, found in times.items()}
    return [log.seconds if log.kind is None else medians.get(log.kind, log.seconds) for log in ops]


def _op_nodes(seen: Observer, sizes: list[int], stays: list[int]) -> tuple[OpNode, ...]:
    nodes = _in_common(seen, sizes, stays)
    before = 0
    seconds, held = _typical(seen.ops, seen.earlier), _held(seen, sizes, stays)
    for log, took, bytes_held in itertools.islice(
        zip(seen.ops, seconds, held, strict=False), len(nodes), None
    ):
        if seen.timeline is not None:
            level = seen.timeline.levels[log.mark]
            # What was dropped before it allocated is not its workspace: it counts from `begin`.
            rises = _without(log.fell, seen.timeline.rises)
            peak = max(level, *rises[log.begin or before : log.mark])
            workspace = max(0, peak - level)
            if log.unseen is not None and log.begin is not None:
                peak = max(peak, _unseen(seen.timeline, before, log.unseen, log.begin))
            before = log.mark
            for first, last in log.inside:
                peak = max(peak, *seen.timeline.rises[first:last])
        else:
            level, workspace = log.live, log.workspace
            peak = level + workspace
        nodes.append(
            OpNode(
                log.name,
                took,
                log.inputs,
                log.outputs,
                workspace,
                not log.kept,
                max(0, level - bytes_held),
                max(0, peak - bytes_held),
                tuple(dict.fromkeys(log.overwrites)),
            )
        )
    return tuple(nodes)


def _held(seen: Observer, sizes: list[int], stays: list[int]) -> list[int]:
    """For each operation, bytes of values that were in memory longer than the forward uses them."""
    count = len(seen.ops)
    change = [0] * (count + 1)

    def add(number: int, end: int) -> None:
        start, end = min(stays[number] + 1, count), min(end, count)
        if end > start:
            change[start] += sizes[number]
            change[end] -= sizes[number]

    counted = {n for n in seen.held if seen.held[n][0] == -1 and n not in seen.pinned}
    for number in counted:
        add(number, seen.evicted.get(number, count))
    for number, end in seen.evicted.items():
        if number not in counted and number not in seen.pinned:
            add(number, end)
    for number, end in seen.outlived.items():
        if number not in seen.held and number not in seen.evicted:
            add(number, end)
    return list(itertools.accumulate(change))


def _without(fell: tuple[int, int] | None, figures: list[int]) -> list[int]:
    """Figures by mark, without the bytes that were dropped at a mark, up to there: what these bytes
    were is held no more, and so is not subtracted otherwise. `fell`: as `OpLog.fell`."""
    if fell is None:
        return figures
    mark, nbytes = fell
    return [max(0, figure - nbytes) for figure in figures[:mark]] + figures[mark:]


def _unseen(timeline: Timeline, first: int, last: int, begin: int) -> int:
    """The most memory of calls that are not recorded between two marks, less what was dropped from
    then until the mark `begin`; 0 if there were none that rose above what was there."""
    levels, rises = timeline.levels, timeline.rises
    return max(
        (
            rises[mark] - max(0, levels[mark + 1] - levels[begin])
            for mark in range(first, last)
            if rises[mark] > max(levels[mark : mark + 2])
        ),
        default=0,
    )


def _in_common(seen: Observer, sizes: list[int], stays: list[int]) -> list[OpNode]:
    """The first operations as they were measured in another step that had them in common.

    A value that this step reads later than that one was in memory all the time.
    """
    base = seen.base
    if base is None:
        return []
    base, _ = externals_of(base)
    longer = [0] * (seen.common + 1)
    for number, (value, last) in enumerate(zip(base.values, base.stays, strict=True)):
        if value.producer < seen.common and number < len(stays):
            end = min(stays[number], seen.common - 1)
            if end > last:
                longer[last + 1] += sizes[number]
                longer[end + 1] -= sizes[number]
    return [
        replace(op, other=op.other + more, peak_other=op.peak_other + more)
        for op, more in zip(base.ops[: seen.common], itertools.accumulate(longer), strict=False)
    ]


def with_gradients(graph: Graph, appeared: Iterable[tuple[int, int]]) -> Graph:
    """The step with more gradients allocated: (last reader in the forward, bytes) of each."""
    more = sorted(appeared)
    events, reached, extra = [], len(graph.ops), 0
    for event in graph.events:
        # the node that saved a value is its maker's, or a later one
        reached = min(reached, graph.values[event.value].producer)
        while more and more[-1][0] >= reached:
            extra += more.pop()[1]
        events.append(
            replace(
                event,
                other=event.other + extra,
                peak_other=event.peak_other + extra,
                after=event.after + extra,
            )
        )
    return replace(graph, events=tuple(events))


def released_last(graph: Graph, numbers: Iterable[int]) -> Graph:
    """The step if autograd keeps its handles on these values to the end of the backward."""
    kept = set(numbers)
    if not kept or not graph.events:
        return graph
    *before, last = graph.events
    events = [
        replace(event, releases=tuple(n for n in event.releases if n not in kept))
        if kept.intersection(event.releases)
        else event
        for event in before
    ]
    last = replace(last, releases=tuple(sorted(kept.union(last.releases))))
    return replace(graph, events=(*events, last))


def _turn(seen: Observer, sizes: list[int], stays: list[int], cut_off: int = 0) -> int:
    """The most other memory between the end of the forward and backward's first request.

    0 if memory does not rise above that at both ends, which are counted by themselves. What was
    dropped when the forward was over is no longer there at the first, nor is what its functions had
    until they returned. `cut_off`: bytes of externals that were cut off when backward began.
    """
    if seen.timeline is None:
        return 0
    # If backward asks for nothing, all of it comes before its first request.
    entry = seen.requests[0].entry if seen.requests else len(seen.timeline.levels)
    count = sum(log.mark < entry for log in seen.ops)
    last = max((log.mark for log in seen.ops if log.mark < entry), default=0)
    begin = max(last, seen.over or 0)
    levels = _without(seen.fell, seen.timeline.levels)
    rises = _without(seen.fell, seen.timeline.rises)
    lent = until_backward(seen)
    held = sum(sizes[number] for number in seen.reached - lent)
    began = entry if seen.began is None else min(entry, seen.began)
    peak = max([*rises[begin:began], *levels[begin + 1 : began]], default=0)
    if began < entry:
        # Nodes of which nothing was recorded run first. A step that follows a plan drops nothing
        # before it is asked for something, so what this one has dropped is there as well.
        dropped = sum(sizes[number] for number in seen.reached - lent - _outlasting(seen))
        peak = max(peak, max(rises[began:entry]) + dropped + cut_off)
    peak = max(peak, _unseen(seen.timeline, last, begin, begin))
    gone = seen.timeline.levels[last] - _gone_since(seen, sizes, stays, count)
    by_entry = sum(sizes[number] for number in lent)  # under a plan that does not hold them
    ends = [min(levels[begin], gone), *(level - by_entry for level in levels[entry : entry + 1])]
    if peak <= max([*ends, 0]) + (_SCALARS if seen.requests else 0):
        return 0
    return max(0, peak - held)


def _outlasting(seen: Observer) -> set[int]:
    """Values that were held from the forward until backward's first request."""
    lives = [(number, *life) for number, life in seen.held.items()]
    lives += [(number, start, end) for number, start, end, _ in seen.earlier_lives]
    return {number for number, start, end in lives if start < 0 <= end}


def _gone_since(seen: Observer, sizes: list[int], stays: list[int], count: int) -> int:
    """Bytes of values that were in memory right after the last of `count` operations, and that
    neither a plan nor the program had when the forward was over."""
    there = {number for number, until in enumerate(stays) if until >= count - 1}
    for ends in (seen.evicted, seen.outlived):
        there.update(number for number, end in ends.items() if end >= count)
    there.difference_update(seen.reached, seen.pinned, seen.names.returned)
    written = {number for log in seen.ops for number in log.overwrites}  # others have their memory
    return sum(sizes[number] for number in there - written)
