"""What every solver returns.

Problem: reports, errors and tests want one answer with its evidence, whatever found it.
Invariant: `peak` and `seconds` are the simulator's for exactly this plan; `status` is "fits" only
if that peak is under the limit that was asked for, margin included.
Imports: `lowtide.planner.retention`. Rejected: raising when nothing fits. The caller needs the peak
that would do.
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
    """Replayed time, the constant for each operation included."""
    plain_peak: int
    """Peak of the same step with every saved value held."""
    lower_bound: float | None
    """No plan under the limit, margin taken off, replays for less; None: nothing was proved."""
    evaluations: int
    solve_seconds: float
    method: str = ""
    """Which way of searching found the plan."""
