"""The events of a backward that was measured.

Problem: what was live at a request is known to the byte, and part of it was there only because of
the plan that ran, or because of none. Invariant: that part is subtracted, whatever decided on it,
so that the events hold for every plan. Imports externals, logs, requests and the planner's graph.
Rejected: a step that holds everything for the measurement, which is what does not fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from lowtide.observing.externals import External
from lowtide.observing.logs import FOREVER
from lowtide.observing.requests import following
from lowtide.planner.graph import Event

if TYPE_CHECKING:
    from lowtide.observing.observer import Observer


class _Held(NamedTuple):
    """For each event, what was in memory because of the plan that ran."""

    bytes: list[int]
    """From the request on."""
    fresh: list[int]
    """Those of them that its replay has made: they were not there when it began."""
    ends: list[list[tuple[int, int]]]
    """(mark, bytes) of those that died after it, see `Lives.ended`."""


def measured_events(
    seen: Observer, sizes: list[int], externals: Iterable[External]
) -> tuple[Event, ...]:
    """One for each request of a step that was measured. `sizes`: of each value, in bytes."""
    assert seen.timeline is not None
    levels, rises = seen.timeline.levels, seen.timeline.rises
    requests, more = seen.requests, following(seen.requests, seen.backwards)
    held = _held(seen, sizes, more, externals)
    releases = _releases(seen, len(requests), len(rises))
    events = []
    for index, request in enumerate(requests):
        end = requests[index + 1].entry if index + 1 < len(requests) else len(rises)
        over = max((seen.freed.get(released, -1) for released in releases[index]), default=-1)
        if not request.answer < over < end:  # nothing is released before the next request
            over = end
        ends = held.ends[index]
        rose = [rises[mark] + _gone(ends, mark) for mark in range(request.answer, over)]
        peak = max([levels[request.answer], *rose])
        after = max(rises[over:end], default=0) + _gone(ends)
        there = held.bytes[index]
        events.append(
            Event(
                request.value,
                max(0, levels[request.entry] - there + held.fresh[index]),
                max(0, peak - there),
                releases[index],
                max(0, after - there) if over < end else 0,
                more[index],
            )
        )
    return tuple(events)


def _held(
    seen: Observer, sizes: list[int], more: list[int], externals: Iterable[External]
) -> _Held:
    count = len(seen.requests)
    change, fresh = [0] * (count + 1), [0] * count
    ends: list[list[tuple[int, int]]] = [[] for _ in range(count)]

    def lives(nbytes: int, start: int, end: int, died: int) -> None:
        """From the event `start`, -1 for the forward, to `end`, after which it died at a mark."""
        first, last = max(start, 0), min(end, count - 1)
        if start >= 0:
            fresh[start] += nbytes
        if last >= first:
            change[first] += nbytes
            change[last + 1] -= nbytes
        if 0 <= end < count:
            ends[end].append((died, nbytes))

    there: dict[int, list[tuple[int, int]]] = {}
    found = [(n, start, end, seen.ended.get(n, FOREVER)) for n, (start, end) in seen.held.items()]
    for number, start, end, died in (*found, *seen.earlier_lives):
        there.setdefault(number, []).append((start, end))
        if number not in seen.pinned:
            lives(sizes[number], start, end, died)
    for index, request in enumerate(seen.requests):
        number = request.value
        if number in seen.pinned or any(a <= index <= b for a, b in there.get(number, ())):
            continue
        # The node that asked for it has it, and nothing else.
        died = seen.given.get(index, FOREVER)
        lives(sizes[number], index, index + max(more[index], 0), died)
    for external in externals:
        if external.measured and external.last >= 0:
            lives(external.nbytes, -1, min(external.last, count - 1), FOREVER)
    return _Held(list(itertools.accumulate(change[:count])), fresh, ends)


def _gone(ends: Iterable[tuple[int, int]], mark: int = FOREVER) -> int:
    """Bytes of those that died by then."""
    return sum(nbytes for died, nbytes in ends if died <= mark)


def _releases(seen: Observer, count: int, end: int) -> list[tuple[int, ...]]:
    """For each event, the values of which autograd releases its last handle. `end`: the mark at
    which the step is over."""
    releases: list[list[int]] = [[] for _ in range(count)]
    last = {request.value: index for index, request in enumerate(seen.requests)}
    for number, index in seen.released.items():
        if seen.retains and number in last and seen.freed.get(number, FOREVER) >= end:
            continue  # after the backward, which may have dropped it since it asked for it
        if 0 <= index < count:
            releases[max(index, last.get(number, 0))].append(number)
    releases[-1].extend(number for number in seen.lasting() if number not in last)
    return [tuple(sorted(numbers)) for numbers in releases]
