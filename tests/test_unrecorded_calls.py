"""Rule 13: what the body of a custom operator takes while it runs is measured, also in the first
step, whatever follows the call: a draw, an operation that something is dropped for, or nothing.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

_LIBRARY = "lowtide_tests_unrecorded_calls"


@torch.library.custom_op(f"{_LIBRARY}::wide_inside", mutates_args=())
def _wide_inside(x: Tensor) -> Tensor:
    return x.repeat(1, 40).view(len(x), 40, -1).mean(1)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient.clone()


_wide_inside.register_autograd(_backward, setup_context=lambda ctx, inputs, output: None)


class _Net(nn.Module):
    def __init__(self, then: str) -> None:
        super().__init__()
        self.then = then
        self.wide = nn.ModuleList(nn.Linear(32, 128) for _ in range(6))
        self.thin = nn.ModuleList(nn.Linear(128, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index, (wide, thin) in enumerate(zip(self.wide, self.thin, strict=True)):
            x = x + thin(torch.nn.functional.gelu(wide(x)))
            if index == 3 and self.then != "nothing":
                x = _wide_inside(x)
                if self.then == "a draw":
                    x = torch.nn.functional.dropout(x, 0.1)
        return _wide_inside(x).sum() if self.then == "nothing" else x.square().mean()


def _run(model: nn.Module, x: Tensor, limit: lowtide.Budget | None) -> int:
    model.zero_grad()
    x.grad = None

    def go() -> None:
        with limit or contextlib.nullcontext():
            loss = model(x)
        loss.backward()

    return lowtide.measure(go, device="cpu").peak_bytes


@pytest.mark.parametrize("share", [0.9, 0.7])
@pytest.mark.parametrize("then", ["an operation", "a draw", "nothing"])
def test_what_a_custom_operator_takes_inside_is_known_after_one_step(
    then: str, share: float
) -> None:
    model, x = _Net(then), torch.randn(1024, 32, requires_grad=True)
    limit = int(share * _run(model, x, None))
    budget = lowtide.budget(limit)
    _run(model, x, budget)  # what its body takes is not known yet
    assert all(_run(model, x, budget) <= limit for _ in range(4))
