"""What a batch gives to a step: its arguments, by place or by name.

Problem: data comes as a tensor, as a tuple or as a dictionary, and steps are called with all three.
Invariant: the command line and Python read a batch alike. Imports torch. Rejected: one form only,
which would have every program convert what its loader and its tokenizer return.
"""

from __future__ import annotations

from typing import Any

import torch


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The positional and the keyword arguments that a batch stands for; None if it is neither a
    tensor, a tuple or list, nor a dictionary."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    if hasattr(batch, "items"):  # also what tokenizers and collators return
        return (), dict(batch.items())
    return None
