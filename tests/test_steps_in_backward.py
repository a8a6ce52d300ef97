"""Rule 13 where steps run inside of a backward: those of the optimizer in its hooks, whose state is
allocated once, and those of a budget that is entered there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from by_hand import same

pytestmark = pytest.mark.usefixtures("one_thread")

Hook = Callable[[nn.Parameter], None]
WIDE = 2048


def network(hook: Callable[[nn.Parameter], Hook], inside: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    if inside != 64:
        model.insert(0, nn.Linear(inside, 64))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook(parameter))
    return model


def adam(parameter: nn.Parameter) -> Hook:
    optimizer = torch.optim.Adam([parameter])

    def step(_: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(
    model: nn.Sequential, budget: lowtide.Budget, steps: int
) -> tuple[list[int], list[Tensor]]:
    peaks, made = [], []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(256, model[0].in_features)

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
    assert same(expected, found)
    assert replayed()
    assert budget.report().planned_peak == peaks[-1]


def test_gradients_that_hooks_have_used_up_are_not_taken_for_what_is_left(
    replayed: Callable[[], int],
) -> None:
    """The largest parameter is read first, so its state is allocated last, beside all others."""
    plain, expected = train(network(adam, WIDE), lowtide.budget(1 << 40), 3)
    limit = int(0.75 * plain[-1])
    budget = lowtide.budget(limit)
    peaks, found = train(network(adam, WIDE), budget, 3)
    assert max(peaks[1:]) <= limit < peaks[0]
    assert same(expected, found)
    assert replayed()


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


@pytest.mark.parametrize("fraction", [0.6, 0.7, 0.9])
def test_a_budget_inside_of_a_backward_is_planned_from_sizes(
    fraction: float, replayed: Callable[[], int], capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's reentrant checkpoint calls its function in the backward, whose end takes away a
    profiler that was started there; torch then says on the terminal that it misses it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(256, 64, requires_grad=True)

    def step(budget: lowtide.Budget | None) -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            with budget or contextlib.nullcontext():
                return model(x).square().mean()

        model.zero_grad()
        checkpoint(loss, x, use_reentrant=True, preserve_rng_state=False).backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = lowtide.measure(lambda: step(None), device="cpu").peak_bytes
    expected = [gradient.clone() for gradient in step(None)]
    budget = lowtide.budget(int(fraction * plain))
    for _ in range(3):
        assert same(expected, step(budget))
    report = budget.report()
    assert report.planned
    assert report.measured_peak is None
    assert report.planned_peak is not None
    assert report.planned_peak <= budget.limit
    assert replayed()
    assert capfd.readouterr().err == ""
    peak = lowtide.measure(lambda: step(budget), device="cpu").peak_bytes
    assert peak <= budget.limit
