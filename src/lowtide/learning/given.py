"""A plan that a budget was given, and a first step that is another one.

Problem: a plan from a file goes stale when the model, its settings or its batch change. Its steps
are then planned anew, as any unknown step, and nothing but a slower first step shows that the file
is of no use. Invariant: this is said once per budget, of its first step, with the first difference.
Imports `lowtide.errors`, `lowtide.limits` and prepared. Rejected: refusing such a step, which keeps
the limit all the same; saying it of later ones, as a plan may be for one kind of step of several.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from lowtide.errors import BudgetError, PlanWarning, users_frame
from lowtide.limits import format_bytes
from lowtide.running.prepared import covers

if TYPE_CHECKING:
    from lowtide.running.decide import StepDecisions
    from lowtide.running.prepared import Prepared, Signature


class Given:
    """The plan, until the first step is over."""

    def __init__(self) -> None:
        self.plan: Prepared | None = None

    def ended(self, decisions: StepDecisions, refusal: BudgetError | None) -> None:
        """A step is over whose backward has run: warn if it was the first, and left the plan.
        `refusal`: what the next step is refused with, if this one has shown that none like it
        fits; it is said there then."""
        if refusal is not None:
            self.refused(decisions, refusal)
        text = self._difference(decisions)
        self.plan = None
        if text is not None:
            warnings.warn(
                f"{text} The limit holds all the same, and the next steps are planned from what "
                f"was seen. {_WAY_OUT}",
                PlanWarning,
                stacklevel=users_frame(),
            )

    def refused(self, decisions: StepDecisions, error: BaseException | None) -> None:
        """Say it in the refusal of the first step."""
        text = self._difference(decisions) if isinstance(error, BudgetError) else None
        if text is not None and error is not None:
            self.plan = None
            error.add_note(f"{text} {_WAY_OUT}")

    def _difference(self, decisions: StepDecisions) -> str | None:
        """Where a step has left the plan, as a sentence; None: it has not."""
        if self.plan is None or decisions.parted is None or decisions.parted[0] is not self.plan:
            return None
        index, seen = decisions.parted[1], decisions.seen
        planned = self.plan.signatures
        if index >= len(planned):
            return None  # it was followed to its end, and a metric or a log came after the loss
        if index < len(seen) and covers(planned[index], seen[index]):
            return None  # a smaller batch than the plan's, for which torch has another kernel
        refused, nbytes = decisions.refused_for
        if index < len(seen):
            where = _compared(index, seen[index], planned[index])
        elif refused:
            _, sizes, reads, wanted = planned[index]
            if nbytes == sum(sizes) and refused == planned[index][0]:
                return None  # the program has memory that the plan takes for freed
            where = _compared(index, (refused, (nbytes,), reads, wanted), planned[index])
        else:
            where = (
                f"its forward ends after {len(seen)} operations, and the plan's has {len(planned)}"
            )
        return f"The first step of this budget is not the one that its plan was made for: {where}."


_WAY_OUT = (
    "Make a new plan, or check whether model, batch and settings are those of the one that this "
    "budget was given."
)


def _compared(index: int, mine: Signature, planned: Signature) -> str:
    """How two operations at the same place differ, in words."""
    (name, sizes, reads, wanted), (other, planned_sizes, planned_reads, _) = mine, planned
    what = f"operation {index} of its forward, {name},"
    if name != other:
        return f"operation {index} of its forward is {name}, and {other} in the plan"
    if sizes != planned_sizes:
        makes, planned_makes = format_bytes(sum(sizes)), format_bytes(sum(planned_sizes))
        return f"{what} makes {makes}, and {planned_makes} in the plan"
    if reads != planned_reads:
        return f"{what} reads other results of the step than in the plan"
    gradients, planned_gradients = format_bytes(wanted), format_bytes(planned[3])
    return f"{what} needs gradients of {gradients}, and of {planned_gradients} in the plan"
