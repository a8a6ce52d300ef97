"""A forward that ran in the context without grad, and is run again with grad where no budget is.

Problem: a loss that caches gradients (GradCache) runs the model without grad, and the backward of
what it returns runs it again, in parts, in a hook. A budget around that loss sees no graph of the
model's, so its limit holds for nothing. Invariant: this is said once per budget, and only if an
optimizer steps on gradients of what the first context has read without grad alone before the next
context begins; nothing stays registered from then on. Imports errors and models. Rejected: to look
for the hook: the context does not see what it returns, and GradCache's own loop has none.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from lowtide.errors import UncountedWarning, users_frame
from lowtide.models.uncalled import wait, wait_no_more

if TYPE_CHECKING:
    from lowtide.observing.observer import Observer


class Rerun:
    """Watches the first context of a budget."""

    def __init__(self) -> None:
        self._over = False
        self._key: int | None = None
        self._read: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}  # whether with grad

    def begins(self) -> None:
        """A context begins."""
        if self._key is not None:
            wait_no_more(self._key)
            self._over, self._key = True, None

    def look(self, observer: Observer | None) -> None:
        """A step of the context is over."""
        if self._over or observer is None:
            return
        ops, leaves = observer.ops, observer.leaves
        if any(log.function for log in ops):  # whose forward runs without grad, as torch has it
            self._over = True
            return
        for key, (_, leaf) in leaves.known.items():
            with_grad = any(ops[read.op].hidden is None for read in leaves.reads.get(key, ()))
            self._read[key] = leaf, with_grad or self._read.get(key, (leaf, False))[1]

    def ends(self) -> None:
        """The context ends, without an error."""
        read, self._read = self._read, {}
        if self._over or self._key is not None:
            return
        self._over = True
        alive = [
            (leaf, with_grad) for weak, with_grad in read.values() if (leaf := weak()) is not None
        ]
        without = [leaf for leaf, with_grad in alive if not with_grad]
        # Most of what it trains is trained elsewhere: not the generator beside a discriminator.
        if sum(t.numel() for t in without) > sum(t.numel() for t, with_grad in alive if with_grad):
            waits = _Waits(without)
            self._key = key = wait(waits)
            weakref.finalize(self, wait_no_more, key, stepping=True).atexit = False


class _Waits:
    """For an optimizer that steps on gradients of these."""

    def __init__(self, leaves: list[torch.Tensor]) -> None:
        self._leaves = weakref.WeakValueDictionary({id(leaf): leaf for leaf in leaves})

    def looks_at(self, optimizer: torch.optim.Optimizer) -> None:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.grad is not None and self._leaves.get(id(p)) is p for p in given):
            return
        wait_no_more(id(self), stepping=True)
        warnings.warn(
            "an optimizer steps on gradients of parameters that the forward inside of the budget "
            "has read without grad alone. What gave them these gradients ran outside of it, or in "
            "a hook of a backward, as with a loss that caches gradients: the limit holds for "
            "nothing there. If the forward is a module's, call lowtide.fit with "
            "that module instead, and leave out what is around the loss.",
            UncountedWarning,
            stacklevel=users_frame(),
        )
