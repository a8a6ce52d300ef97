"""Steps whose limit holds for nothing, as autograd has nothing of ours that it could ask for.

Problem: hooks that are open inside a recording own what they take (`save_on_cpu` around a whole
forward), and a context around a backward alone has no forward. No request shows that the backward
runs: such a step is neither planned nor measured nor refused. Invariant: this is said once per
budget, when its context ends, so that the warning names a line of the program's. Imports
`lowtide.errors`. Rejected: hooks of our own on the program's parameters to notice such a backward:
it would see them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from lowtide.errors import UncountedWarning, users_frame

if TYPE_CHECKING:
    from lowtide.running.decide import StepDecisions

_HOOKS = (
    "saved-tensor hooks that were opened inside of the budget (by "
    "torch.autograd.graph.save_on_cpu, say) have taken all that the step saves for "
    "backward: nothing of it can be recomputed, and the limit holds for its forward alone. "
    "Leave the hooks out, or open them around a part of the forward only."
)
_BACKWARD = (
    "the budget was entered around a backward alone: what its forward has saved outside of the "
    "budget is neither recomputed nor counted. Put `with budget:` around forward and loss; "
    "backward() may come after it closes."
)


class Hidden:
    """Whether it was said."""

    def __init__(self) -> None:
        self._said = False

    def look(self, decisions: StepDecisions, steps: int) -> None:
        """A context has ended, which was the `steps`-th of its budget."""
        # The forward of a later one may have run in an earlier context, and not been recorded.
        alone = steps == 1 and decisions.backward_alone
        if not self._said and (alone or decisions.hides_all):
            self._said = True
            told = _BACKWARD if alone else _HOOKS
            warnings.warn(told, UncountedWarning, stacklevel=users_frame())
