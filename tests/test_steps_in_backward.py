"""Rule 13 where the optimizer's steps are hooks of the backward: its state is allocated once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

Hook = Callable[[nn.Parameter], None]


def network(hook: Callable[[nn.Parameter], Hook]) -> nn.Module:
    torch.manual_seed(0)
    blocks = [(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook(parameter))
    return model


def adam(parameter: nn.Parameter) -> Hook:
    optimizer = torch.optim.Adam([parameter])

    def step(_: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(model: nn.Module, budget: lowtide.Budget, steps: int) -> tuple[list[int], list[Tensor]]:
    peaks, made = [], []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(256, 64)

        def step(x: Tensor = x) -> None:
            with budget:
                loss = model(x).square().mean()
            loss.backward()
            made.append(loss.detach())

        peaks.append(lowtide.measure(step, device="cpu").peak_bytes)
    return peaks, [*made, *model.parameters()]


def test_a_step_is_not_refused_for_state_that_it_has_allocated_once(
    replayed: Callable[[], int],
) -> None:
    plain, expected = train(network(adam), lowtide.budget(1 << 40), 5)
    limit = int(0.75 * plain[-1])
    assert plain[0] > plain[-1]
    budget = lowtide.budget(limit)
    peaks, found = train(network(adam), budget, 5)
    assert max(peaks[1:]) <= limit < peaks[0]
    assert all(map(torch.equal, expected, found))
    assert replayed()
    assert budget.report().planned_peak == peaks[-1]


def test_one_that_leaves_more_each_time_is_refused_when_it_comes_again() -> None:
    kept = []

    def keeps(_: nn.Parameter) -> Hook:
        return lambda parameter: kept.append(torch.zeros(3, *parameter.shape))

    model = network(keeps)
    plain, _ = train(network(keeps), lowtide.budget(1 << 40), 1)
    budget = lowtide.budget(int(0.55 * plain[0]))
    train(model, budget, 1)
    model.zero_grad()
    train(model, budget, 1)
    model.zero_grad()
    with pytest.raises(lowtide.BudgetError, match="its peak is in the backward"):
        train(model, budget, 1)
