"""What every plan has to keep between a few moments of backward, as rows of a linear program.

Problem: `moments` pays once for each operation, however often it is replayed. Where little fits,
the same value is asked for between several moments, and may not stay in memory from one to the
next: it is replayed once between each two of them, or held in the meantime.

Invariant: every plan gives a 0 or 1 to each column such that all rows are kept, and takes at least
the sum of the columns' costs. For moments m0 < m1 < .., span k is the events after m(k-1) up to and
with mk; the first span begins with backward, the last ends with it.

Columns: `there` is 1 if a value is held (place 0), or held or retained at the event mk (place
k + 1), but not if only a node has it; `ranges` if an operation is replayed in any of the spans from
one to another. A range of one span costs the operation's time. With ranges, more moments never
prove less: the rows of some of them are implied by those of all.
Small values are left out, and so are operations that make nothing else.

Why plans keep the rows. A value that is in memory stays until the end of its life, and that is not
before its release, nor before the last replay of an operation that reads it (rule 2). So:
- `_life`: what is in memory at mj was so at m(i-1), or was made in the spans from i to j, which is
  possible up to its release; and if its release is not before mk, what was in memory at m(k-1) is.
- `_asked`: a value asked for in span s is in memory at m(i-1) or made in the spans from i to s.
- `_inputs`: the same for what a replayed operation reads; it is in memory or made in that replay.
- `_counts`: an operation is replayed in a range just if it is in one of its parts.
- `_causes`: it is so only if its result is asked for there, or what reads it is replayed there.
- `_events`: this is so at one event, which has to have room for it and all that lead from it to the
  value that is asked for: with each of them, what it reads and makes is in memory.
- `_beside`: what is in memory for a whole span is so beside an operation that is replayed in it.
- `_memory`: what is in memory at an event, with what the plan does not hold, is within the limit,
  before the releases and, for what outlives them, after. No single value is larger than the room.
- `_forward`: the same for what is held, at a moment of the forward.

Imports: `lowtide.planner.cut`, `lowtide.planner.moments`, `lowtide.planner.repair`.

Rejected: what else is in memory beside a replay because later operations of the same replay read
it: on the U-Nets it proved nothing more, and takes seconds to find.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import or_

from lowtide.planner.cut import room_at
from lowtide.planner.moments import small_up_to
from lowtide.planner.repair import Problem

NEGLIGIBLE = 200
"""The smallest values, up to one part in this many of the limit in all, are left out."""
SMALL = 8
"""Replays that take no more than one part in this many of what there would be room for have no row
in `_beside`."""
NOTHING = -1
"""In place of a column that is 0 in every plan."""

Terms = Iterable[tuple[int, float]]


class Rows:
    """Rows `sum of coefficient * column <= right`, for columns from 0 to `top`.

    `moments` are events in increasing order; `forward` operations of the forward, or its end.
    """

    def __init__(
        self, problem: Problem, moments: list[int], forward: list[int], limit: int
    ) -> None:
        self.sim, self.moments, self.limit = problem.sim, moments, limit
        self.cost: list[float] = []
        self.top: list[float] = []
        self.begin = [0]
        self.columns: list[int] = []
        self.coefficients: list[float] = []
        self.right: list[float] = []
        sim = self.sim
        small = small_up_to(sim.nbytes, limit // NEGLIGIBLE)
        self.values = [
            value
            for value, (size, free) in enumerate(zip(sim.nbytes, sim.free, strict=True))
            if size > small and not free
        ]
        self.spans = range(len(moments) + 1)
        self.begins = [0, *(moment + 1 for moment in moments), len(sim.event_value)]
        self.needs = self._needs()
        self.events = self._events()
        self._add_columns(problem.gone)
        for value in self.values:
            self._life(value)
        self._asked()
        for op in self.ranges:
            self._counts(op)
            self._inputs(op)
            self._beside(op)
        self._causes()
        # For each moment, its rows of what is in memory.
        self.memory: list[range] = []
        for place, moment in enumerate(moments, 1):
            before = len(self.right)
            self._memory(place, moment)
            self.memory.append(range(before, len(self.right)))
        for step in forward:
            self._forward(step)

    def _column(self, cost: float = 0.0, top: float = 1.0) -> int:
        self.cost.append(cost)
        self.top.append(top)
        return len(self.cost) - 1

    def _needs(self) -> list[int]:
        """For each operation, what it reads and makes; it may write in place of what it reads."""
        sim = self.sim
        return [
            work + sum(sim.nbytes[x] for x in reads if x not in over)
            for work, reads, over in zip(sim.work, sim.reads, sim.overwrites, strict=True)
        ]

    def _events(self) -> list[int]:
        """For each operation, the events at which it may be replayed, as a set of bits."""
        sim = self.sim
        order = sorted(range(len(sim.event_value)), key=sim.event_other.__getitem__)
        levels = [sim.event_other[event] for event in order]
        low = list(accumulate((1 << event for event in order), initial=0, func=or_))
        found = [0] * len(sim.cost)
        for event, value in enumerate(sim.event_value):
            if not sim.free[value]:
                found[sim.producer[value]] |= 1 << event
        for op in reversed(range(len(sim.cost))):  # what no replay makes is last, see `Simulator`
            fits = low[bisect_right(levels, self.limit - self.needs[op])]
            found[op] &= fits if sim.replayable[op] else 0
            for x in sim.reads[op]:
                if sim.replayable[sim.producer[x]]:
                    found[sim.producer[x]] |= found[op]
        return found

    def _in(self, events: int, span: int) -> int:
        """Those of a set of events that are in a span."""
        begin, stop = self.begins[span], self.begins[span + 1]
        return events >> begin & (1 << stop - begin) - 1

    def _add_columns(self, gone: frozenset[int]) -> None:
        sim, moments = self.sim, self.moments
        longest = sim.lifetimes([0] * len(sim.nbytes))
        self.there = {
            value: [
                self._column(top=0.0 if value in gone else 1.0),
                *(self._column() if longest[value] >= m else NOTHING for m in moments),
            ]
            for value in self.values
        }
        self.ranges: dict[int, dict[tuple[int, int], int]] = {}
        # The same without those that have the column of a smaller range, or none.
        self.least: dict[int, dict[tuple[int, int], int]] = {}
        for op in sorted({sim.producer[value] for value in self.values}):
            can = [span for span in self.spans if self._in(self.events[op], span)]
            self.least[op] = columns = {
                (first, last): self._column(sim.cost[op] if first == last else 0.0)
                for first in can
                for last in can
                if first <= last
            }
            self.ranges[op] = ranges = {}
            for first in self.spans:
                for last in range(first, len(self.spans)):
                    inside = [span for span in can if first <= span <= last]
                    ranges[first, last] = columns[inside[0], inside[-1]] if inside else NOTHING

    def _less(self, terms: Terms, right: float) -> None:
        """Add a row. All of its coefficients are divided by the largest, so that rows are alike."""
        kept = [(column, factor) for column, factor in terms if column != NOTHING]
        most = max((abs(factor) for _, factor in kept), default=1.0)
        for column, factor in kept:
            self.columns.append(column)
            self.coefficients.append(factor / most)
        self.begin.append(len(self.columns))
        self.right.append(right / most)

    def _life(self, value: int) -> None:
        there, release = self.there[value], self.sim.release[value]
        ranges = self.ranges[self.sim.producer[value]]
        for place, moment in enumerate(self.moments):
            now = there[place + 1]
            last = min(place, bisect_right(self.begins, release) - 1)
            for first in range(place + 1 if now != NOTHING else 0):
                made = ranges[first, last] if first <= last else NOTHING
                self._less([(now, 1.0), (there[first], -1.0), (made, -1.0)], 0.0)
            if release >= moment:
                self._less([(there[place], 1.0), (now, -1.0)], 0.0)

    def _asked(self) -> None:
        asked: dict[int, set[int]] = {value: set() for value in self.values}
        for event, value in enumerate(self.sim.event_value):
            if value in asked:
                asked[value].add(bisect_left(self.moments, event))
        for value, spans in asked.items():
            there, ranges = self.there[value], self.ranges[self.sim.producer[value]]
            for first in range(max(spans, default=-1) + 1):
                next_ = min(span for span in spans if span >= first)
                self._less([(there[first], -1.0), (ranges[first, next_], -1.0)], -1.0)

    def _counts(self, op: int) -> None:
        ranges = self.ranges[op]
        for (first, last), all_ in self.least[op].items():
            if first == last:
                continue
            begin, rest = ranges[first, first], ranges[first + 1, last]
            most, end = ranges[first, last - 1], ranges[last, last]
            for parts in dict.fromkeys(((begin, rest), (most, end))):
                self._less([(all_, 1.0), *((part, -1.0) for part in parts)], 0.0)
            for part in dict.fromkeys((rest, most)):
                self._less([(part, 1.0), (all_, -1.0)], 0.0)

    def _inputs(self, op: int) -> None:
        rows: dict[tuple[int, int, int], None] = {}
        for x in self.sim.reads[op]:
            if x in self.there:
                there, made = self.there[x], self.ranges[self.sim.producer[x]]
                for (first, last), column in self.ranges[op].items():
                    if column != NOTHING:
                        rows[column, there[first], made[first, last]] = None
        for column, before, inside in rows:
            self._less([(column, 1.0), (before, -1.0), (inside, -1.0)], 0.0)

    def _causes(self) -> None:
        sim = self.sim
        asked = [0] * len(sim.cost)
        for event, value in enumerate(sim.event_value):
            asked[sim.producer[value]] |= 1 << event
        readers: list[set[int]] = [set() for _ in sim.cost]
        for op in range(len(sim.cost)):
            if self.events[op]:
                for x in sim.reads[op]:
                    readers[sim.producer[x]].add(op)
        for op in self.ranges:
            if not readers[op] <= self.ranges.keys():
                continue  # a reader that makes nothing but small values has no columns
            spans = [span for span in self.spans if self._in(asked[op], span)]
            for (first, last), column in self.least[op].items():
                if not any(first <= span <= last for span in spans):
                    terms = [(self.ranges[c][first, last], -1.0) for c in sorted(readers[op])]
                    self._less([(column, 1.0), *terms], 0.0)

    def _beside(self, op: int) -> None:
        sim, limit = self.sim, self.limit
        for span in self.spans:
            column = self.ranges[op][span, span]
            if column == NOTHING:
                continue
            events = [e for e in range(*self.begins[span : span + 2]) if self.events[op] >> e & 1]
            without = limit - max(sim.event_peak[event] for event in events)
            with_ = limit - self.needs[op] - min(sim.event_other[event] for event in events)
            if without - with_ <= without // SMALL:
                continue
            terms = [(column, float(without - with_))]
            for value in self.values:
                there, release = self.there[value], sim.release[value]
                if value in sim.reads[op]:
                    continue
                if release >= events[-1]:
                    terms.append((there[span], float(sim.nbytes[value])))
                elif release < events[0] and span < len(self.moments):
                    terms.append((there[span + 1], float(sim.nbytes[value])))
            self._less(terms, float(without))

    def _memory(self, place: int, moment: int) -> None:
        sim = self.sim
        there = [(v, self.there[v][place]) for v in self.values if v != sim.event_value[moment]]
        self._fit(there, room_at(sim, ("backward", moment), self.limit))
        there = [(v, self.there[v][place]) for v in self.values if sim.release[v] > moment]
        self._fit(there, self.limit - sim.event_after[moment])

    def _forward(self, step: int) -> None:
        there = [(v, self.there[v][0]) for v in self.values if self.sim.stays[v] < step]
        self._fit(there, self.limit - self.sim.forward_peak[step])

    def _fit(self, there: list[tuple[int, int]], room: int) -> None:
        sizes = self.sim.nbytes
        for value, column in there:
            if column != NOTHING and sizes[value] > room:
                self.top[column] = 0.0
        if room >= 0:
            self._less([(column, float(sizes[value])) for value, column in there], float(room))

    def proved(self, prices: list[float], low: list[float], top: list[float]) -> float:
        """What a price of zero or more for each row proves about every plan whose columns are
        within these bounds: none costs less.

        That is the least of the cost plus the priced excess of each row, which in a plan is none.
        """
        begin, columns, coefficients = self.begin, self.columns, self.coefficients
        reduced = self.cost.copy()
        total = 0.0
        for row, price in enumerate(prices):
            if price > 0.0:
                total -= price * self.right[row]
                for at in range(begin[row], begin[row + 1]):
                    reduced[columns[at]] += price * coefficients[at]
        for cost, least, most in zip(reduced, low, top, strict=True):
            total += cost * (least if cost > 0.0 else most)
        return total
