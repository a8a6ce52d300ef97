"""Rule 13 before an operation of a forward that no plan covers: room is made, or it is refused,
also where small tensors, or none, make a large one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lowtide

MADE = 1 << 22

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(MADE // 4),
    "new_zeros": lambda x: x.new_zeros(MADE // 4),
    "arange": lambda x: torch.arange(MADE // 8),
    "repeat": lambda x: x.view(-1).repeat(MADE // x.nbytes),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_large_result_is_refused_before_it_is_made(name: str) -> None:
    """One of the tile of a chunked loss was refused when it was there already, at the next call,
    and the limit that the refusal named was above the plain peak."""
    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64)
    caught: list[lowtide.BudgetError] = []

    def step() -> None:
        try:
            with lowtide.budget(1 << 20):
                hidden = (x @ weight).tanh()
                CALLS[name](x)
                hidden.square().mean().backward()
        except lowtide.BudgetError as error:
            caught.append(error)

    peak = lowtide.measure(step, device="cpu").peak_bytes
    assert peak < 1 << 20
    assert caught[0].minimum is not None
    assert MADE <= caught[0].minimum < MADE + (1 << 17)
