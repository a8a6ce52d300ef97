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

WORK = 300_000_000
"""Entries of rows that may be walked through, twice in a step of the prices: half a second."""
BUILD = 300
"""To make a row's entry takes as long as to walk through it this many times."""
TRY, CLIMB, BRANCH = 300, 2000, 600
"""Steps of the prices: for each candidate of a moment, before branches, and in each of them."""
MOST = 4
"""Moments of one program."""
SHARE = 0.4
"""The part of the work that the choice of moments may take."""
GAIN = 0.005
"""What a moment has to add, as a part of the target: more moments take more time."""
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
    ) -> None:
        self.rows = rows = Rows(problem, moments, forward, limit)
        self.moments, self.target, self.price_with = moments, target, price_with
        rows.cost = [cost * SCALE / target for cost in rows.cost]
        self.lists = rows.cost, rows.begin, rows.columns, rows.coefficients, rows.right
        self.weighs = [0.0] * len(rows.cost)
        for column, factor in zip(rows.columns, rows.coefficients, strict=True):
            self.weighs[column] += abs(factor)
        self.size = len(rows.columns)
        self.work = BUILD * self.size
        self.leaves: list[Leaf] = []
        start = Leaf(0.0, 0, {}, [0.0] * len(rows.cost), [0.0] * len(rows.right), 1.0)
        self.leaves.append(self._climbed(start, {}, TRY))

    @property
    def bound(self) -> float:
        """The bound proved so far, as a part of the target."""
        return min(self.leaves[0].bound, 1.0) if self.leaves else 1.0

    def climb(self) -> None:
        """Raise the bound as far as prices do without branches."""
        self.leaves = [self._climbed(self.leaves[0], {}, CLIMB)]

    def grow(self, work: int) -> None:
        """Branch until this much work is done, the target is proved or nothing is undecided."""
        number = 0
        while self.leaves and self.bound < 1.0:
            column = self._undecided(self.leaves[0])
            if column is None or self.work + 4 * BRANCH * self.size > work:
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
        """The column to branch on: far from 0 and 1, and in many rows."""
        best, chosen = 0.0, None
        for column, (x, weighs) in enumerate(zip(leaf.x, self.weighs, strict=True)):
            open_ = min(x, self.rows.top[column] - x)
            if open_ > UNDECIDED and open_ * weighs > best and column not in leaf.fixed:
                best, chosen = open_ * weighs, column
        return chosen


def relaxed(
    problem: Problem,
    limit: int,
    target: float,
    candidates: list[int],
    forward: list[int],
    price_with: PriceWith,
) -> float:
    """The best bound found with the work there is. The first candidate is taken; then, one by one,
    the one that adds most to what is proved with those chosen so far."""

    def made(moments: list[int]) -> Relaxed:
        return Relaxed(problem, sorted(moments), forward, limit, target, price_with)

    best = made(candidates[:1])
    spent = best.work
    for _ in range(MOST - 1):
        round_ = best
        for moment in candidates:
            if moment in best.moments or spent > SHARE * WORK:
                continue
            found = made([*best.moments, moment])
            spent += found.work
            if found.bound > max(round_.bound, best.bound + GAIN):
                round_ = found
        if round_ is best:
            break
        best = round_
    best.work = spent
    best.climb()
    best.grow(WORK)
    return best.bound * target
