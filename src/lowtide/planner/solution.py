"""What every solver returns.

Problem: reports, errors and tests want one answer with its evidence, whichever method found it.
Invariant: `peak` and `seconds` are the simulator's results for exactly this plan; `status` is
"fits" only if that peak is at most the requested limit less its margin.
Imports: `lowtide.planner.retention`. Rejected: raising when nothing fits. The caller needs the
lowest peak that was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowtide.planner.retention import Retention


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan with what it costs and how it was found."""

    status: Literal["fits", "infeasible"]
    plan: Retention
    peak: int
    seconds: float
    """Replayed time, including `REPLAY_OVERHEAD` for each operation."""
    plain_peak: int
    """Peak of the same step with every saved value held."""
    lower_bound: float | None
    """Every plan within the limit (less the margin) replays for at least this long; None: nothing
    was proved."""
    evaluations: int
    """Plans simulated during the search."""
    solve_seconds: float
    method: str = ""
    """The search method that found the plan."""
