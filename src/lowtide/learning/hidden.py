"""Steps whose limit holds for nothing, as autograd has nothing of ours that it could ask for.

Problem: hooks that are open inside a recording own what they take (`save_on_cpu` around a whole
forward), a context around a backward alone has no forward, and some forwards save nothing (the sum
of a parameter). No request shows that the backward runs: such a step is neither planned nor
measured nor refused. Invariant: this is said once per budget, when its context ends, so that the
warning names a line of the program's; of a forward that saves nothing, only if the gradients alone
exceed what it may take. Imports `lowtide.errors`, limits, allowance and decide. Rejected: hooks of
our own on the program's parameters to notice such a backward: it would see them; refusing a forward
that saves nothing, as no backward may come.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from lowtide.errors import UncountedWarning, users_frame
from lowtide.limits import exact_bytes

if TYPE_CHECKING:
    from lowtide.learning.allowance import Allowance
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
_NOTHING = (
    "the forward has saved nothing for backward, so nothing of the step can be recomputed and "
    "nothing shows that its backward runs: it is not measured, and not refused. The gradients of "
    "what it has read take {need}; the limit allows {allowed}. Use a larger limit, or freeze "
    "parameters."
)


class Hidden:
    """Whether it was said.

    Args:
        allowance: what a step may take.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._said = False

    def look(self, decisions: StepDecisions, steps: int) -> None:
        """A context has ended, which was the `steps`-th of its budget."""
        # The forward of a later one may have run in an earlier context, and not been recorded.
        alone = steps == 1 and decisions.backward_alone
        if not self._said and (alone or decisions.hides_all):
            self._said = True
            told = _BACKWARD if alone else _HOOKS
            warnings.warn(told, UncountedWarning, stacklevel=users_frame())

    def look_at_size(self, decisions: StepDecisions) -> None:
        """The same, of a forward that a budget was put around and that has saved nothing."""
        observer = None if self._said else decisions.nothing_to_ask_for
        if observer is None:
            return
        ops, reads = observer.ops, observer.leaves.reads
        need = sum(
            nbytes
            for leaf, (_, nbytes) in observer.leaves.gradients.items()
            if any(ops[read.op].node for read in reads.get(leaf, ()))  # not under `no_grad`
        )
        allowed = self._allowance.of(need, self._allowance.before)
        if need > allowed:
            self._said = True
            told = _NOTHING.format(need=exact_bytes(need), allowed=exact_bytes(max(0, allowed)))
            warnings.warn(told, UncountedWarning, stacklevel=users_frame())
