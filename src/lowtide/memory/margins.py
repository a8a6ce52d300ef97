"""Shares of a limit that are left free, and why.

Problem: a plan is exact for the step it was made from; the step that follows it differs, by little
if it was measured, by more if it was modelled. Invariant: all planning of eager steps takes its
share from here (`inductor.compiled` has that of compiled ones), and a limit that a dry run plans
for or names leaves the share that the budget running the plan needs. Imports nothing of the
package. Rejected: a share next to each caller, where two that depend on each other drift apart.
"""

from __future__ import annotations

import math

MEASURED = 0.005  # for what differs from step to step
MODELLED = 0.1  # while memory in backward is modelled and not measured
PREDICTED = {"fake": 0.02, "recorded": MEASURED}
"""For a dry run's prediction, by its kind: how wrong it may be."""

HAIR = 0.001
"""The least share, where more cannot be left free: steps differ by some bytes."""
PREDICTED_HAIR = 2 * HAIR
"""The least share for a prediction: it is off by some bytes itself, and once the step is measured,
the budget that runs the plan needs `HAIR` free at the same limit."""


def of_step(measured: bool) -> float:
    """The share of a limit that the plan of a step leaves free."""
    return MEASURED if measured else MODELLED


def limit_for(peak: int) -> int:
    """The smallest limit under which a predicted peak leaves `PREDICTED_HAIR` free."""
    return math.ceil(peak / (1 - PREDICTED_HAIR))
