"""The events of a backward that has not been measured, from what the forward showed.

Problem: before a step has been measured, and where it cannot be, its backward must be planned
nevertheless. Invariant: autograd visits the nodes in the reverse order of their operations and
unpacks what a node saved, inputs first, right before it runs; gradients live as `gradients` says,
and each backward takes what it took when run on shapes alone. Where that failed, estimates from
sizes are used, which are too high rather than too low. Imports accumulation, operation, deadgraphs,
functions, gradients, places, planner. Rejected: spreading every operation's temporaries over its
neighbours, which refuses limits that can be met.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lowtide.backward import deadgraphs, functions, reads
from lowtide.backward.accumulation import accumulation
from lowtide.backward.gradients import lifetimes, of_unmade
from lowtide.backward.operation import Call, costs
from lowtide.backward.places import Place, places_of
from lowtide.planner.graph import UNKNOWN, Event

if TYPE_CHECKING:
    from lowtide.observing.logs import OpLog
    from lowtide.observing.observer import Observer
    from lowtide.observing.reached import Numbers

_CONVOLUTION = "aten::convolution"
# On the CPU these give a gradient in the format of what they read, whichever they are given.
_AS_READ = frozenset(
    f"aten::{name}"
    for name in ("native_batch_norm", "native_group_norm", "relu", "leaky_relu", "avg_pool2d",
                 "max_pool2d_with_indices")
)  # fmt: skip


def look_closer(ops: Iterable[OpLog], carries_grad: Container[int]) -> None:
    """Find out what the backward of each operation costs by running it on shapes alone.

    A result that no operation reads (statistics that a normalization also returns) gets no
    gradient.
    """
    ops = tuple(ops)
    asked = [(log, _with_use(log, log.call, carries_grad)) for log in ops if log.call is not None]
    as_made = _as_made(ops) if any(log.name == _CONVOLUTION for log, _ in asked) else set()
    asked = [
        (log, call._replace(last=True) if as_made.intersection(log.outputs) else call)
        for log, call in asked
    ]
    found = costs(call for _, call in asked)
    for log, call in asked:
        log.call, cost = None, found[call]
        if cost is None:
            log.lent, log.athwart = True, log.turned
            continue
        log.temporaries, log.left = cost.peak + log.pad, cost.left
        returned = bool(cost.given) and cost.given[0] is False
        reads.add_through(log, not returned)
        if len(cost.saved) == len(log.outputs):
            log.saved = tuple(itertools.compress(log.outputs, cost.saved))
        log.astray = dict(cost.astray)
        if len(cost.given) == len(log.receivers):
            log.unmade = tuple(read for read in log.unmade if cost.given[read[2]] is False)
            pairs = list(zip(log.receivers, cost.given, strict=True))
            log.lent = any(
                n < 0 and given is not None and not fresh
                for (n, given), fresh in zip(pairs, cost.fresh, strict=True)
            )
            log.receivers = tuple(n for n, given in pairs if given is not None)
            if log.through is None:  # a write through a view is given a copy of its own
                log.viewing = tuple(n for n, given in pairs if given and n in log.whole)
            own = [
                n
                for (n, given), straight in zip(pairs, cost.contiguous, strict=True)
                if given is False and straight
            ]
            log.athwart = tuple(n for n in own if n in log.turned)
            log.perhaps = tuple(
                n
                for (n, given), straight in zip(pairs, cost.in_order, strict=False)
                if given is False and straight and n in log.turned
            )
            log.remade = tuple(n for n in log.remade if n in own or n in log.viewing)


def _with_use(log: OpLog, call: Call, carries_grad: Container[int]) -> Call:
    used = tuple([number in carries_grad for number in log.outputs])
    return call._replace(used=used) if any(used) and not all(used) else call


def _as_made(ops: Sequence[OpLog]) -> set[int]:
    """The results of convolutions that get one gradient, in the format that they are in."""
    readers: dict[int, list[OpLog]] = {}
    for log in ops:
        for number in {*log.receivers}:
            readers.setdefault(number, []).append(log)
    found = set()
    for log in ops:
        if log.name == _CONVOLUTION and log.call is not None and log.call.device == "cpu":
            for number in log.outputs:
                by = readers.get(number, [])
                if len(by) == 1 and by[0].name in _AS_READ:
                    found.update({number} - {*by[0].pieces})
    return found


class Asked(NamedTuple):
    """A request of backward's."""

    value: int
    low: int
    """The lowest operation that may have saved the value."""
    high: int
    """The highest one."""
    nodes: Numbers = (0, -1)
    """The first and the last node of autograd's graph that it may have been saved for; none: it is
    not known."""
    custom: bool = False
    """Whether a custom Function may have saved it, whose backward may run another one."""

    def may_be_with(self, other: Asked) -> bool:
        """Whether one node may ask for both."""
        (first, last), (begin, end) = self.nodes, other.nodes
        unknown = first > last or begin > end
        return unknown or (first <= end and begin <= last)


class Modelled(NamedTuple):
    """A backward that has not been measured."""

    events: tuple[Event, ...]
    """What it requests, and the memory that is not the tape's at each request."""
    before: int
    """The most of that memory before the first request."""
    order: list[Asked]
    """The requests."""


def modelled_events(
    seen: Observer, sizes: list[int], requests: list[tuple[int, int]] | None
) -> Modelled:
    """Model the backward of a forward that was watched.

    Args:
        seen: the forward.
        sizes: of each value, in bytes.
        requests: (value, operations recorded when it was saved) as requested by the backward that
            ran; None: it has not run yet.
    """
    look_closer(seen.ops, seen.carries_grad)
    ended = functions.ends(seen)
    places = places_of(seen, seen.last_save, ended)
    dead = deadgraphs.dead_operations(seen, places) | functions.outside(seen, ended)
    ops = deadgraphs.without(seen.ops, dead) if dead else seen.ops
    memory = _memory(seen, sizes, ops, dead, ended)
    if requests is None:
        order = _to_come(seen, places, ended)
        # A retained graph keeps the handles that it has unpacked.
        released = {} if seen.retains else {asked.value: i for i, asked in enumerate(order)}
    else:
        order = _as_asked(seen, requests, ended)
        released = seen.released
    events = _events(order, ops, memory, _freed(order, released), _not_asked(seen, order, released))
    first = order[0].high + 1 if order else 0  # the backward of this and later ones comes before
    most = max([0, *(event.other for event in events[:1]), *memory.takes[first:]])
    return Modelled(events, most, order)


class _Memory(NamedTuple):
    """Bytes that are not the tape's around the backward of each operation."""

    begins: list[int]
    """When it begins."""
    runs: list[int]
    """The most while its node runs."""
    adds: list[int]
    """The most when it is over and has released what it saved: gradients are added up."""
    takes: list[int]
    """The most of all."""


def _memory(
    seen: Observer, sizes: list[int], ops: Sequence[OpLog], dead: set[int], ended: set[int]
) -> _Memory:
    """`ops`: the operations, without the backwards of the `dead` ones. `ended`: the last operations
    of custom Functions."""
    given = frozenset[int]() if seen.sparing else seen.names.outside
    gradients = lifetimes(ops, sizes, seen.carries_grad, given)
    leaves = accumulation(seen.leaves, ops, dead, watched=not seen.common)
    unmade = of_unmade(ops, seen.leaves.nodes)
    crossing = list(
        itertools.accumulate(map(sum, zip(gradients.change, leaves.change, unmade, strict=True)))
    )
    done = list(itertools.accumulate(reversed(leaves.made)))[::-1]
    fixed = sum(sizes[number] for number in seen.pinned) + seen.elsewhere
    fixed += seen.names.of_losses(sizes) + (0 if seen.sparing else seen.turnover)
    begins = [fixed + crossing[k] + done[k + 1] for k in range(len(ops))]
    runs = [begins[k] + log.temporaries + gradients.copies[k] for k, log in enumerate(ops)]
    for k, nbytes in functions.extra(seen, sizes, ended - dead).items():
        runs[k] = max(runs[k], begins[k] + nbytes)
    adds = [
        begins[k] + log.left + log.besides + gradients.sums[k] + leaves.extra[k]
        for k, log in enumerate(ops)
    ]
    for k, nbytes in enumerate(leaves.copied):
        if nbytes:  # what the operation was given is gone by now
            adds[k] = max(adds[k], (begins[k - 1] if k else fixed + done[0]) + nbytes)
    return _Memory(begins, runs, adds, list(map(max, runs, adds)))


def _events(
    order: list[Asked],
    ops: Sequence[OpLog],
    memory: _Memory,
    freed: dict[int, tuple[int, ...]],
    lasting: dict[int, list[int]],
) -> tuple[Event, ...]:
    """The events of backward's requests. `freed`, `lasting`: the values that autograd releases
    after each, having asked for them or not."""
    begins, runs, adds, takes = memory
    events = []
    for index, (number, low, high, *_) in enumerate(order):
        following = order[index + 1].high if index + 1 < len(order) else -1
        # A write through a view copies gradients before it asks for what it saved.
        base = max(begins[low], begins[high] + sum(ops[high].through or ()))
        over = high + 1 if following < high else high
        peak = max([base, *takes[low:high], *runs[high:over]])
        after = max([0, *adds[high:over], *takes[following + 1 : low]])
        releases = (*freed.get(index, ()), *lasting.get(index, ()))
        if index not in freed:
            peak, after = max(peak, after), 0
        events.append(Event(number, base, peak, releases, after, _following(order, index)))
    return tuple(events)


def _following(order: list[Asked], index: int) -> int:
    """`Event.more`: how many requests it takes from one to the last that may be of its node."""
    asked, last, next_ = order[index], index, index + 1
    if asked.custom:
        return UNKNOWN
    while next_ < len(order) and order[next_].high >= asked.low:
        if asked.may_be_with(order[next_]):
            last = next_
        next_ += 1
    return last - index


def _to_come(seen: Observer, places: Sequence[Place], ended: set[int]) -> list[Asked]:
    """The requests for what is saved by now, in the order in which backward will make them."""
    alive = deadgraphs.alive(seen)
    keys = [(-high, -low, result, i) for i, (low, high, result) in enumerate(places) if alive[i]]
    order = [key[-1] for key in sorted(keys)]
    return [
        Asked(value, places[i].low, places[i].high, seen.nodes[i], saved - 1 in ended)
        for i in order
        for value, saved in [seen.last_save[i]]
    ]


def _as_asked(seen: Observer, requests: list[tuple[int, int]], ended: set[int]) -> list[Asked]:
    """The requests of a backward that ran, in its order, which is last saved first."""
    places = places_of(seen, requests[::-1], ended)[::-1]
    return [
        Asked(value, place.low, place.high)
        for (value, _), place in zip(requests, places, strict=True)
    ]


def _not_asked(
    seen: Observer, order: list[Asked], released: dict[int, int]
) -> dict[int, list[int]]:
    """For each event, the values that autograd releases without having asked for them: those of a
    graph that this backward does not reach, which may well outlive it."""
    if not order:
        return {}
    asked, end = {each.value for each in order}, len(order) - 1
    found: dict[int, list[int]] = {}
    for number, index in released.items():
        if 0 <= index <= end and number not in asked:
            found.setdefault(index, []).append(number)
    found.setdefault(end, []).extend(n for n in seen.lasting() if n not in asked)
    return found


def _freed(order: list[Asked], released: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """For each event, the values that nothing requests after it.

    A node releases all that it saved at once, after it has run.
    """
    last: dict[int, int] = {}
    over, node = -1, -1
    for index in range(len(order) - 1, -1, -1):
        value, high = order[index].value, order[index].high
        if high != node:
            over, node = index, high
        last.setdefault(value, over)
    freed: dict[int, list[int]] = {}
    for number, index in released.items():
        if index >= 0 and number in last:
            freed.setdefault(max(index, last[number]), []).append(number)
    return {index: tuple(sorted(numbers)) for index, numbers in freed.items()}
