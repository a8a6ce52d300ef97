"""Notices a fitted model that is trained without its forward being called.

Problem: a program may call parts of a model (``model.encoder(x)``), or another method of it, or
train it in eval mode, and then the budget around its forward sees no step. Invariant: the model is
not touched, and nothing stays registered once nobody waits for a step of an optimizer. Imports
errors. Rejected: hooks on parameters, which copies and other libraries would meet.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lowtide.errors import UncountedWarning, users_frame


class Waits(Protocol):
    """One who waits for an optimizer's step."""

    def looks_at(self, optimizer: torch.optim.Optimizer) -> None: ...


_waiting: dict[int, Waits] = {}
_keys = itertools.count()  # no ids: a key may be named when another object has that memory
_hook: list[RemovableHandle] = []


def wait(one: Waits) -> int:
    """Show it each optimizer that is about to step; the key with which it waits."""
    # One hook for all: a garbage collection may end a model while torch goes through its hooks.
    key = next(_keys)
    _waiting[key] = one
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_steps))
    return key


def wait_no_more(key: int, *, stepping: bool = False) -> None:
    """`stepping`: torch may be going through its hooks, so ours stays."""
    _waiting.pop(key, None)
    if _hook and not _waiting and not stepping:
        _hook.pop().remove()


class Uncalled:
    """Waits for a call of the model's forward, or else for an optimizer's step on its gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._key = key = wait(self)
        self._model = weakref.ref(model, lambda _: wait_no_more(key, stepping=True))

    def over(self) -> None:
        """The forward was called, or the budget is off."""
        wait_no_more(self._key)

    def looks_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, once, if it steps on gradients of the model."""
        model = self._model()
        if model is not None and _has_gradients_of(model, optimizer):
            wait_no_more(self._key, stepping=True)
            _say(model)


def _steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in list(_waiting.values()):
        one.looks_at(optimizer)


def may_be_called_unseen() -> None:
    """A fitted forward is being compiled, of which another warning tells: its calls are not seen.
    Nothing tells whose it is, so that no model waits any longer."""
    _waiting.clear()


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
        "model is trained in eval mode, do the same. Nor has a model that runs code of "
        "torch.compile's: do not compile it, or compile it with "
        "backend=lowtide.CompileBudget(limit), from torch 2.13 on.",
        UncountedWarning,
        stacklevel=users_frame(),
    )
