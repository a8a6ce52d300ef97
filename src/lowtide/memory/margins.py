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


def roomy(limit: int, free: float) -> int:
    """A peak: a limit at which a plan can go down to it is not near the smallest one."""
    return int(limit * (1 - free) ** 2 / (1 - PREDICTED_HAIR))


def room_near(limit: int, free: float, least: int) -> int:
    """What a predicted plan may take under a limit: all but the share `free`; near `least`, the
    lowest peak that any plan has, more, as only dear ones leave so much. Never less than under a
    smaller limit: else one byte more could be the limit at which the plan is a dear one."""
    room = limit - int(free * limit)
    if least <= roomy(limit, free):
        return room
    most = int(least * (1 - PREDICTED_HAIR) / (1 - free))
    return max(room, least, min(limit - int(PREDICTED_HAIR * limit), most))
