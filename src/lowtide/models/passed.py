"""Notices a backward through a checkpointed module that ran in eval mode, as a plain one.

Problem: a module in eval mode is no region (rule 12), so a backbone that is kept in `.eval()` and
trained through stores all that it was to recompute; a validation that forgot `torch.no_grad()`
looks the same in the forward. Invariant: it is said once, and only where a backward comes; the
results are the module's own. Imports `_compat` and errors. Rejected: saying it in the forward,
which most programs in eval mode do not mean to follow with a backward; making it a region, whose
records a validation has no use for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.errors import UncountedWarning, users_frame

_DEPTH = 8  # of lists in lists, which may contain themselves


class PassedThrough:
    """One for all modules that one call has checkpointed, and for each call that has a level."""

    def __init__(self) -> None:
        self._told = False

    def watch(self, module: nn.Module, result: Any) -> Any:
        """Look out for a backward into what this module returned; returns that."""
        return self._watch(
            f"a {type(module).__name__} that lowtide checkpoints, but that is in eval mode, where "
            "it is a plain module",
            "checkpoint it with in_eval=True, call lowtide.checkpoint(module, x)",
            result,
        )

    def watch_call(self, result: Any) -> Any:
        """Look out for a backward into what a function returned that an `ActivationCheckpointing`
        in eval mode has called; returns that."""
        return self._watch(
            "an ActivationCheckpointing that is in eval mode, where it just calls its function",
            "put it in training mode (its .train()), call lowtide.checkpoint(function, x)",
            result,
        )

    def _watch(self, what: str, instead: str, result: Any) -> Any:
        if not self._told and not _not_plain():
            nodes = (tensor.grad_fn for tensor in with_a_graph(result))
            node = next((node for node in nodes if node is not None), None)
            if node is not None:
                node.register_prehook(self._teller(what, instead))
        return result

    def _teller(self, what: str, instead: str) -> Any:
        def tell(_: Any) -> None:
            if self._told:
                return
            self._told = True
            warnings.warn(
                f"a backward goes through {what}: all that its backward needs was stored. If that "
                f"is not what you mean, {instead}, or put lowtide.budget around the step.",
                UncountedWarning,
                stacklevel=users_frame(),
            )

        return tell


def _not_plain() -> bool:
    """Whether a graph is made of what runs now, a transform of `torch.func` runs it, or hooks take
    what is saved, of a budget or of torch's checkpoint, whose reentrant kind calls the module again
    in a backward."""
    if torch.compiler.is_compiling() or _compat.in_functorch():
        return True
    return _compat.other_hooks_than(None) or _compat.in_backward()


def with_a_graph(result: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """From where a backward may go into the forward that returned this, as far as one can see."""
    if isinstance(result, torch.Tensor):
        return [result] if result.requires_grad else []
    if not depth:
        return []
    if isinstance(result, Mapping):
        result = result.values()
    elif not isinstance(result, list | tuple):
        return []
    return [tensor for part in result for tensor in with_a_graph(part, depth - 1)]
