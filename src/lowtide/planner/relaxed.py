"""A lower bound from linear programs over what is in memory, and replayed, between moments.

Problem: branches over cuts (`branch`) count two replays of an operation at most, and only where a
value was decided to be dropped. Where little fits, that misses a tenth of the overhead.

Invariant: valid for every plan. A program's rows hold for each plan (`rows`), so any prices prove a
bound, which is computed here. Each branch fixes one more column to 0 or to 1, which no plan leaves
undecided; the bound is the lowest of any open branch. Deterministic: work is counted.

Imports: `lowtide.planner.rows`, `lowtide.planner.repair`.

Rejected: doing this without the compiled core. Python takes as long for a hundred steps of the
prices as C++ for ten thousand, and proves less by them than by cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from lowtide.planner.repair import Problem
from lowtide.planner.rows import Rows

WORK = 900_000_000
"""Entries of rows that may be walked through, twice in a step of the prices: over a second."""
BUILD = 300
"""To make a row's entry takes as long as to walk through it this many times."""
TRY, CLIMB, BRANCH = 700, 2000, 300
"""Steps of the prices: for all candidates of moments, before branches, and in each of them."""
SIZE = 40_000
"""How many ranges of spans, times what operations read, the first program may have."""
SHARE = 0.4
"""The part of the work that the choice of moments may take."""
LEAST = 2
"""Moments of the second program, if there are so many."""
IDLE = 0.03
"""A moment whose bytes cost less than this part of the most expensive ones' is left out."""
SCALE = 20.0
"""What the target's time is for the prices, whose steps suit costs of this size."""
UNDECIDED = 1e-4
"""Columns nearer than this to 0 or 1 are not branched on."""

Lists = tuple[list[float], list[int], list[int], list[float], list[float]]


class PriceWith(Protocol):
    """Finds prices of rows; `prices.h` says how."""

    def __call__(
        self,
        rows: Lists,
        low: list[float],
        top: list[float],
        x: list[float],
        prices: list[float],
        weight: float,
        steps: int,
        enough: float,
        /,
    ) -> tuple[list[float], list[float], float]:
        """The best prices found, the columns found with them, and a weight to continue with."""
        ...


@dataclass(order=True, slots=True)
class Leaf:
    """An open branch: its bound, and where the search for its prices ended."""

    bound: float
    number: int
    fixed: dict[int, float] = field(compare=False)
    x: list[float] = field(compare=False)
    prices: list[float] = field(compare=False)
    weight: float = field(compare=False)


class Relaxed:
    """Branches over the program of some moments. Times are divided by the target's."""

    def __init__(
        self,
        problem: Problem,
        moments: list[int],
        forward: list[int],
        limit: int,
        target: float,
        price_with: PriceWith,
        work: int,
    ) -> None:
        self.rows = rows = Rows(problem, moments, forward, limit)
        self.moments, self.target, self.price_with = moments, target, price_with
        rows.cost = [cost * SCALE / target for cost in rows.cost]
        self.lists = rows.cost, rows.begin, rows.columns, rows.coefficients, rows.right
        self.size = len(rows.columns)
        self.work, self.most = BUILD * self.size, work
        start = Leaf(0.0, 0, {}, [0.0] * len(rows.cost), [0.0] * len(rows.right), 1.0)
        self.leaves = [start]

    @property
    def bound(self) -> float:
        """The bound proved so far, as a part of the target."""
        return min(self.leaves[0].bound, 1.0) if self.leaves else 1.0

    def climb(self, steps: int) -> None:
        """Raise the bound as far as prices do without branches, with the work there is."""
        steps = min(steps, max(self.most - self.work, 0) // (2 * max(self.size, 1)))
        self.leaves = [self._climbed(self.leaves[0], {}, steps)]

    def priced(self) -> list[int]:
        """The moments at which a byte has a price, in order; at least one."""
        prices = self.leaves[0].prices
        dear = [max((prices[row] for row in rows), default=0.0) for rows in self.rows.memory]
        return [m for m, price in zip(self.moments, dear, strict=True) if price >= IDLE * max(dear)]

    def grow(self) -> None:
        """Branch until the work is done, the target is proved or nothing is undecided."""
        number = 0
        while self.leaves and self.bound < 1.0:
            column = self._undecided(self.leaves[0])
            if column is None or self.work + 4 * BRANCH * self.size > self.most:
                break
            leaf = heappop(self.leaves)
            for choice in (1.0, 0.0):
                number += 1
                found = self._climbed(leaf, {**leaf.fixed, column: choice}, BRANCH)
                found.number = number
                if found.bound < 1.0:
                    heappush(self.leaves, found)

    def _climbed(self, leaf: Leaf, fixed: dict[int, float], steps: int) -> Leaf:
        rows = self.rows
        low, top = [0.0] * len(rows.cost), rows.top.copy()
        for column, choice in fixed.items():
            low[column], top[column] = choice, choice
        prices, x, weight = self.price_with(
            self.lists, low, top, leaf.x, leaf.prices, leaf.weight, steps, SCALE
        )
        self.work += 2 * steps * self.size
        bound = rows.proved(prices, low, top) / SCALE
        # Not `max`: what is no number proves nothing.
        return Leaf(bound if bound > leaf.bound else leaf.bound, 0, fixed, x, prices, weight)

    def _undecided(self, leaf: Leaf) -> int | None:
        """The column to branch on: far from 0 and 1, and in rows with high prices."""
        rows, best, chosen = self.rows, 0.0, None
        weighs = [0.0] * len(rows.cost)
        for row, price in enumerate(leaf.prices):
            if price > 0.0:
                for at in range(rows.begin[row], rows.begin[row + 1]):
                    weighs[rows.columns[at]] += price * abs(rows.coefficients[at])
        for column, (x, weight) in enumerate(zip(leaf.x, weighs, strict=True)):
            open_ = min(x, rows.top[column] - x)
            if open_ > UNDECIDED and open_ * weight > best and column not in leaf.fixed:
                best, chosen = open_ * weight, column
        return chosen


def relaxed(
    problem: Problem,
    limit: int,
    target: float,
    candidates: list[int],
    forward: list[int],
    price_with: PriceWith,
    work: int = WORK,
) -> float:
    """The best bound found with this much work.

    The first program has all candidates, or as many as it has room for. The second has those whose
    bytes have a price, and is branched on.
    """

    def made(moments: list[int], most: int) -> Relaxed:
        return Relaxed(problem, sorted(moments), forward, limit, target, price_with, most)

    each = sum(map(len, problem.sim.reads)) + len(problem.sim.nbytes)
    while len(candidates) > 2 and (len(candidates) + 1) * (len(candidates) + 2) // 2 * each > SIZE:
        candidates = candidates[:-1]
    first = made(candidates, int(SHARE * work))
    first.climb(TRY)
    moments = first.priced()
    more = [moment for moment in candidates if moment not in moments]
    moments += more[: max(LEAST - len(moments), 0)]
    best = made(moments, work - first.work)
    best.climb(CLIMB)
    best.grow()
    return max(first.bound, best.bound) * target
