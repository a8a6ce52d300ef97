"""What every plan has to keep between a few moments of backward, as rows of a linear program.

Problem: `moments` pays once for each operation, however often it is replayed. Where little fits,
the same value is asked for between several moments, and may not stay in memory from one to the
next: it is replayed once between each two of them, or held in the meantime.

Invariant: every plan gives a 0 or 1 to each column such that all rows are kept, and takes at least
the sum of the columns' costs. For moments m0 < m1 < .., span k is the events after m(k-1) up to and
with mk; the first span begins with backward, the last ends with it.

Columns: `there` is 1 if a value is held (place 0), or held or retained at the event mk (place
k + 1), but not if only a node has it; `runs` if an operation is replayed in a span; `later` if it
is in that span or after it, in all but the last.
Small values are left out, and so are operations that make nothing else.

Why plans keep the rows. A value that is in memory stays until the end of its life, and that is not
before its release, nor before the last replay of an operation that reads it (rule 2). So:
- `_life`: what is in memory at mk was so at m(k-1), or was made in span k, which is possible up to
  its release; and if its release is not before mk, what was in memory at m(k-1) still is.
- `_asked`: a value asked for in a span is in memory at its beginning or made in it; one asked for
  after mk is in memory then or made after that.
- `_inputs`: the same for what a replayed operation reads; it is in memory or made in that replay.
- `_counts`: an operation is replayed after m(k-1) just if it is in span k or after mk.
- `_memory`: what is in memory at an event, with what the plan does not hold, is within the limit,
  before the releases and, for what outlives them, after. No single value is larger than the room.
- `_forward`: the same for what is held, at a moment of the forward.

Imports: `lowtide.planner.cut`, `lowtide.planner.moments`, `lowtide.planner.repair`.

Rejected: rows for the memory that replays take. As integer programs with a span for each event,
those of the U-Nets proved nothing more with them that a solver's time limit does not explain. Many
moments: in fractions, a replay is spread over many short spans, each with a fraction of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.planner.cut import room_at
from lowtide.planner.moments import small_up_to
from lowtide.planner.repair import Problem

NEGLIGIBLE = 200
"""The smallest values, up to one part in this many of the limit in all, are left out."""
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
        self._add_columns(problem.gone)
        for value in self.values:
            self._life(value)
        self._asked()
        for op in self.runs:
            self._counts(op)
            self._inputs(op)
        for place, moment in enumerate(moments, 1):
            self._memory(place, moment)
        for step in forward:
            self._forward(step)

    def _column(self, cost: float = 0.0, top: float = 1.0) -> int:
        self.cost.append(cost)
        self.top.append(top)
        return len(self.cost) - 1

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
        none = [NOTHING] * (len(moments) + 1)
        self.runs: dict[int, list[int]] = {}
        self.later: dict[int, list[int]] = {}
        for op in sorted({sim.producer[value] for value in self.values}):
            self.runs[op] = self.later[op] = none
            if sim.replayable[op]:
                self.runs[op] = runs = [self._column(sim.cost[op]) for _ in none]
                # After the last moment is the last span.
                self.later[op] = [*(self._column() for _ in moments), runs[-1]]

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
        runs = self.runs[self.sim.producer[value]]
        begin = 0
        for place, moment in enumerate(self.moments):
            before, now = there[place], there[place + 1]
            made = runs[place] if release >= begin else NOTHING
            self._less([(now, 1.0), (before, -1.0), (made, -1.0)], 0.0)
            if release >= moment:
                self._less([(before, 1.0), (now, -1.0)], 0.0)
            begin = moment + 1

    def _asked(self) -> None:
        moments, producer = self.moments, self.sim.producer
        asked: dict[int, set[int]] = {value: set() for value in self.values}
        for event, value in enumerate(self.sim.event_value):
            if value in asked:
                asked[value].add(sum(moment < event for moment in moments))
        for value, spans in asked.items():
            there, op = self.there[value], producer[value]
            for span in sorted(spans):
                self._less([(there[span], -1.0), (self.runs[op][span], -1.0)], -1.0)
            for place in range(max(spans, default=0)):  # the last span has a row already
                self._less([(there[place], -1.0), (self.later[op][place], -1.0)], -1.0)

    def _counts(self, op: int) -> None:
        runs, later = self.runs[op], self.later[op]
        for place in range(len(self.moments)):
            here, rest, all_ = runs[place], later[place + 1], later[place]
            self._less([(all_, 1.0), (here, -1.0), (rest, -1.0)], 0.0)
            self._less([(here, 1.0), (all_, -1.0)], 0.0)
            self._less([(rest, 1.0), (all_, -1.0)], 0.0)

    def _inputs(self, op: int) -> None:
        for x in self.sim.reads[op]:
            if x not in self.there:
                continue
            made = self.sim.producer[x]
            for of in (self.runs, self.later):
                for place, column in enumerate(of[op]):
                    if column != NOTHING and (of is self.runs or place < len(self.moments)):
                        terms = [(column, 1.0), (self.there[x][place], -1.0)]
                        self._less([*terms, (of[made][place], -1.0)], 0.0)

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
