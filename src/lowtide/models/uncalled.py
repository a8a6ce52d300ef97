"""Notices a fitted model that is trained without its forward being called.

Problem: a program may call parts of a model (``model.encoder(x)``), or another method of it, or
train it in eval mode, and then the budget around its forward sees no step. Invariant: the model is
not touched, and nothing is left registered once its forward was called, or it is gone. Imports
errors. Rejected: hooks on parameters, which copies and other libraries would meet.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide.errors import UncountedWarning, users_frame


class Uncalled:
    """Waits for a call of the model's forward, or else for an optimizer's step on its gradients.

    Attributes:
        compiled: whether some fitted forward was compiled, of which a warning tells more: calls of
            compiled code are not seen.
    """

    compiled = False

    def __init__(self, model: torch.nn.Module) -> None:
        reference, self._said = weakref.ref(model), False

        def steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            there = reference()
            if there is None or self._said or Uncalled.compiled:
                return
            if _has_gradients_of(there, optimizer):
                self._said = True  # not taken off here, while torch goes through its hooks
                _say(there)

        self._off = weakref.finalize(model, register_optimizer_step_pre_hook(steps).remove)
        self._off.atexit = False

    def over(self) -> None:
        """The forward was called, or the budget is off."""
        self._off()


def _has_gradients_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    own = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _say(model: torch.nn.Module) -> None:
    kind = type(model).__name__
    warnings.warn(
        f"lowtide.fit: an optimizer steps on gradients of a {kind} whose forward has not been "
        "called in training mode, so the limit holds for nothing. What a program calls by itself, "
        "a part of the model or another method than its forward, has no budget. Leave lowtide.fit "
        "out, and put `with lowtide.budget(limit):` around all of these calls and the loss. If the "
        "model is trained in eval mode, do the same.",
        UncountedWarning,
        stacklevel=users_frame(),
    )
