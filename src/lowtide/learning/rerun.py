"""A forward that ran in the context without grad, and is run again with grad where no budget is.

Problem: a loss that caches gradients (GradCache) runs the model without grad, and the backward of
what it returns runs it again, in parts, in a hook. A budget around that loss sees no graph of the
model's, so its limit holds for nothing. Invariant: this is said once per budget, and only if an
optimizer steps on gradients of what the first context has read without grad alone before the next
context, of whichever budget, begins; nothing stays registered from then on. Imports errors and
models. Rejected: to look for the hook, as the context does not see what it returns, and GradCache's
own loop has none.
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
        self._read: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}  # whether with grad

    @staticmethod
    def begins() -> None:
        """A context begins, of whichever budget: what it reads with grad is not outside of all."""
        for key in _waiting:
            wait_no_more(key)
        _waiting.clear()

    def look(self, observer: Observer | None) -> None:
        """A step of the context is over."""
        if self._over or observer is None:
            return
        # What nothing has read yet may be a Function's, whose backward is counted.
        without = observer.ran_without_grad()
        for key, (_, leaf) in observer.leaves.known.items():
            with_grad = any(read.op not in without for read in observer.leaves.reads.get(key, ()))
            self._read[key] = leaf, with_grad or self._read.get(key, (leaf, False))[1]

    def ends(self) -> None:
        """The context ends, without an error."""
        read, self._read = self._read, {}
        if self._over:
            return
        self._over = True
        alive = [
            (leaf, with_grad) for weak, with_grad in read.values() if (leaf := weak()) is not None
        ]
        # One that has a gradient already may be stepped on with that, which may be zeros.
        without = [leaf for leaf, with_grad in alive if not with_grad and leaf.grad is None]
        if without:
            waits = _Waits(without, sum(t.numel() for t, with_grad in alive if with_grad))
            _waiting.append(waits.key)
            weakref.finalize(self, wait_no_more, waits.key, stepping=True).atexit = False


_waiting: list[int] = []  # the keys of `_Waits` since the last context has ended


class _Waits:
    """For an optimizer that steps on gradients of these. `trained`: numbers in what the context has
    read with grad."""

    def __init__(self, leaves: list[torch.Tensor], trained: int) -> None:
        self._leaves = weakref.WeakValueDictionary({id(leaf): leaf for leaf in leaves})
        self._trained = trained
        self.key = wait(self)

    def looks_at(self, optimizer: torch.optim.Optimizer) -> None:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        own = [leaf for p in given if (leaf := self._leaves.get(id(p))) is p]
        counts = [leaf.numel() for leaf in own if leaf is not None and leaf.grad is not None]
        # Most of what is trained is trained elsewhere: not the actor beside its critics.
        if sum(counts) <= self._trained:
            return
        wait_no_more(self.key, stepping=True)
        warnings.warn(
            "an optimizer steps on gradients of parameters that the forward inside of the budget "
            "has read without grad alone. What gave them these gradients ran outside of it, or in "
            "a hook of a backward, as with a loss that caches gradients: the limit holds for "
            "nothing there. If the forward is a module's, call lowtide.fit with "
            "that module instead, and leave out what is around the loss.",
            UncountedWarning,
            stacklevel=users_frame(),
        )
