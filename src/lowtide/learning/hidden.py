"""Steps of which saved-tensor hooks of the program's own take all that is saved.

Problem: hooks that are open inside a recording own what they take (`save_on_cpu` around a whole
forward). If autograd has no handle of ours, no request shows that the backward runs: such a step
is neither planned nor measured nor refused. Invariant: this is said once per budget, when its
context ends, so that the warning names a line of the program's. Imports `lowtide.errors`.
Rejected: hooks of our own on the program's parameters to notice such a backward: it would see them.
"""

from __future__ import annotations

import warnings

from lowtide.errors import UncountedWarning, users_frame


class Hidden:
    """Whether it was said."""

    def __init__(self) -> None:
        self._said = False

    def say(self) -> None:
        """A forward has ended, of which other hooks have taken everything."""
        if self._said:
            return
        self._said = True
        warnings.warn(
            "saved-tensor hooks that were opened inside of the budget (by "
            "torch.autograd.graph.save_on_cpu, say) have taken all that the step saves for "
            "backward: nothing of it can be recomputed, and the limit holds for its forward alone. "
            "Leave the hooks out, or open them around a part of the forward only.",
            UncountedWarning,
            stacklevel=users_frame(),
        )
