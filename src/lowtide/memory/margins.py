"""Shares of a limit that are left free, and why.

Problem: a plan is exact about what it was made from, and the step that runs it differs from that
by more or less, as it was measured or modelled. Invariant: whoever plans an eager step takes its
share from here (`inductor.compiled` has that of compiled ones), and what a dry run plans or names
leaves the budget that runs it the share that it wants. Imports nothing of the package. Rejected: a
share beside each caller, where two that hang together drift apart.
"""

from __future__ import annotations

import math

MEASURED = 0.005  # for what differs from step to step
MODELLED = 0.1  # while memory in backward is modelled and not measured
PREDICTED = {"fake": 0.02, "recorded": MEASURED}
"""By a dry run: what it is allowed to be wrong by."""

HAIR = 0.001
"""Where more cannot be left free: steps differ by some bytes."""
PREDICTED_HAIR = 2 * HAIR
"""The same of a prediction: it is exact to some bytes only, and once the step has been measured the
budget that runs the plan wants its own hair free at the same limit."""


def limit_for(peak: int) -> int:
    """The smallest limit under which a predicted peak leaves that hair free."""
    return math.ceil(peak / (1 - PREDICTED_HAIR))
