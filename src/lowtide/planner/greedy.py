"""Start from keeping everything; at the peak, drop the most bytes for the least time.

Problem: a first plan is wanted within milliseconds, also to check the cuts against. On graphs of
similar operations with evenly spread bytes it is as good as any.

Invariant: as in `repair`: estimates choose among moves, the simulator decides.

Imports: `lowtide.planner.repair`.

Rejected: recomputing whole blocks. A block is a unit of source code, not of memory.
"""

from __future__ import annotations

from lowtide.planner.repair import Candidate, Problem, grow, shrink


def greedy(problem: Problem, limit: int) -> Candidate:
    """The greedy plan for a limit. It may exceed the limit, where this finds no way under it."""
    return grow(problem, shrink(problem, problem.keep_all(), limit, rounds=80), limit)
