"""Forwards of one budget that are under way at once: each is a step that may take all it allows.

Problem: with `lowtide.fit`, or one `with` for each forward, two forwards before one backward are
two steps, and together they may take twice the limit, though each stays within it. One that a
differentiable backward has gone through (a gradient penalty) counts as ended when the next begins,
and nobody has counted what that backward saved, for another one to come. Invariant: this
is said once per budget, and only where they do not fit into one limit together; outside of a
backward, so that the warning names a line of the program's. Imports `lowtide.errors`,
`lowtide.limits` and decide. Rejected: one limit for all of them, as the first has already kept what
it may.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.errors import UncountedWarning, users_frame
from lowtide.limits import format_bytes

if TYPE_CHECKING:
    from lowtide.running.decide import StepDecisions

_LITTLE = 0.01  # of the plain peak: what holds less is a loss whose graph was kept, not a step


class Waiting:
    """What other steps of a budget held while one's backward began."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._doubled = False
        self._said = False

    def backward_begins(self, active: Sequence[StepDecisions], doubled: int) -> None:
        """One of these steps, whose backwards have not finished, begins its own. Others have had a
        differentiable one, and about `doubled` bytes are in memory for the backward through it."""
        if (len(active) > 1 or doubled) and not self._said:
            self._nbytes = max(self._nbytes, doubled + sum(step.holds() for step in active))
            self._doubled = self._doubled or doubled > 0

    def say(self, limit: int | float, plain_peak: int) -> None:
        """Warn, once, if what waited does not fit into the limit beside a step."""
        waiting, self._nbytes = self._nbytes, 0
        fits = isinstance(limit, int) and waiting + plain_peak <= limit
        if fits or waiting <= _LITTLE * plain_peak:
            return
        self._said = True
        with_it = ", with what its own backward has saved (create_graph=True)," * self._doubled
        warnings.warn(
            f"while a backward ran, another forward under the same budget held{with_it} "
            f"{format_bytes(waiting)} for a backward still to come: each of them is a step that "
            "may take the whole limit. Put all forwards that come before one backward into one "
            "`with budget:`; for a model that lowtide.fit was given, leave lowtide.fit out and put "
            "`with lowtide.budget(limit):` around all of its calls and the loss.",
            UncountedWarning,
            stacklevel=users_frame(),
        )
