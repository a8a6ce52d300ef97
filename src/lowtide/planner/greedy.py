"""Start from keeping everything; at the peak, let the most bytes go for the least time.

Problem: a first plan within milliseconds, and a check on the cut. Where operations are alike and
bytes are spread evenly it is as good as anything.

Invariant: as `repair`: estimates choose, the simulator decides.

Imports: `lowtide.planner.repair`.

Rejected: recomputing whole blocks. A block is a unit of source code, not of memory.
"""

from __future__ import annotations

from lowtide.planner.repair import Candidate, Problem, grow, shrink


def greedy(problem: Problem, limit: int) -> Candidate:
    """The greedy plan for a limit; it may exceed the limit when greed finds no way under it."""
    return grow(problem, shrink(problem, problem.keep_all(), limit, rounds=80), limit)
