"""One training step, measured, and the gradients that it leaves.

Shared by tests of what the steps of a loop take, whose models return a loss, or something whose
mean square is one. Imports torch and lowtide; knows no test.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

import lowtide


def peak_of(
    model: nn.Module,
    x: Any,
    limit: lowtide.Budget | None = None,
    *,
    adds_up: bool = False,
    seed: int | None = None,
) -> int:
    """The most bytes that a step takes, plain or under a limit.

    Args:
        adds_up: whether gradients that are there stay, and this step's are added to them.
        seed: for what it draws.
    """
    if not adds_up:
        model.zero_grad()
        if isinstance(x, Tensor):
            x.grad = None

    def run() -> None:
        if seed is not None:
            torch.manual_seed(seed)
        with limit or contextlib.nullcontext():
            loss = _loss(model(x))
        loss.backward()

    return lowtide.measure(run, device="cpu").peak_bytes


def _loss(made: Tensor) -> Tensor:
    """In a function of its own, as what the model has made is not held while backward runs."""
    return made if made.dim() == 0 else made.square().mean()


def gradients(model: nn.Module, *leaves: Tensor) -> list[Tensor]:
    """Copies of the gradients that these leaves and the model's parameters have."""
    found = [leaf.grad for leaf in (*leaves, *model.parameters())]
    return [gradient.clone() for gradient in found if gradient is not None]


def rows(count: int) -> Tensor:
    """So many rows of 32 numbers, the same each time."""
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(count))
