"""A forward that runs in a budget without grad, and again with grad where no budget is."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import UncountedWarning
from lowtide.models import uncalled

Step = Callable[[nn.Module, nn.Module, lowtide.Budget], None]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def cached(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    """As sentence-transformers has it: the gradients of what it returns first, then the model."""
    x = torch.randn(4, 8)
    with budget:
        with torch.no_grad():
            y = net(x)
        y.requires_grad_()
        loss = y.square().mean().exp()
        loss.backward()
        loss = loss.detach().requires_grad_()

        def again(gradient: Tensor) -> None:
            with torch.enable_grad():
                (net(x) * y.grad * gradient).sum().backward()

        loss.register_hook(again)
    loss.backward()


def cached_by_hand(net: nn.Module, other: nn.Module, budget: lowtide.Budget) -> None:
    """As GradCache has it: a loop after the loss. A small part of the model is in the loss."""
    x, scale = torch.randn(4, 8), nn.Parameter(torch.ones(()))
    with budget:
        with torch.no_grad():
            y = net(x)
        (scale * y.requires_grad_()).square().mean().backward()
    (net(x) * y.grad).sum().backward()


def usual(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    with budget:
        loss = net(torch.randn(4, 8)).square().mean()
    loss.backward()


def checkpointed(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    """The forward of a custom Function runs without grad; what it runs again is counted."""
    x = torch.randn(4, 8, requires_grad=True)
    with budget:
        loss = checkpoint(net, x, use_reentrant=True).square().mean()
    loss.backward()


def rollout(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    x = torch.randn(4, 8)
    with budget, torch.no_grad():
        y = net(x)
    with budget:
        loss = (net(x) - y - 1).square().mean()
    loss.backward()


def discriminator(net: nn.Module, other: nn.Module, budget: lowtide.Budget) -> None:
    """Of a GAN whose generator is trained without a budget."""
    x = torch.randn(4, 8)
    with budget:
        with torch.no_grad():
            y = net(x)
        loss = other(y).square().mean()
    loss.backward()
    other(net(x)).mean().backward()


def teacher(net: nn.Module, other: nn.Module, budget: lowtide.Budget) -> None:
    with budget:
        with torch.no_grad():
            y = other(torch.randn(4, 8))
        loss = (net(torch.randn(4, 8)) - y).square().mean()
    loss.backward()


def function_alone(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    """Nothing in the context reads what the Function makes, so nothing shows that it is one."""
    with budget:
        y = checkpoint(net, torch.randn(4, 8, requires_grad=True), use_reentrant=True)
    y.square().mean().backward()


def generator(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    """Of a GAN with a budget for each of the two, and a small discriminator."""
    small = nn.Linear(8, 1)
    with budget:
        with torch.no_grad():
            y = net(torch.randn(4, 8))
        loss = small(y).mean()
    loss.backward()
    with lowtide.budget("1 MB"):
        loss = small(net(torch.randn(4, 8))).mean()
    loss.backward()


def actor(net: nn.Module, other: nn.Module, budget: lowtide.Budget) -> None:
    """Beside a critic as large, whose targets come from a third network."""
    x, target = torch.randn(4, 8), network()
    with budget:
        with torch.no_grad():
            y = target(net(x))
        loss = (other(x) - y).square().mean()
    loss.backward()
    other(net(x)).mean().backward()


def evaluated(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    x = torch.randn(4, 8)
    with budget, torch.no_grad():
        net(x).square().mean()
    net(x).square().mean().backward()


def not_trained_yet(net: nn.Module, _other: nn.Module, budget: lowtide.Budget) -> None:
    """An optimizer that has it already finds zeros there."""
    small = nn.Linear(8, 1)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with budget:
        with torch.no_grad():
            y = net(torch.randn(4, 8))
        loss = small(y).mean()
    loss.backward()


OTHERS = [usual, checkpointed, rollout, discriminator, teacher, function_alone, generator, actor,
          evaluated, not_trained_yet]  # fmt: skip


@pytest.mark.parametrize("step", [cached, cached_by_hand])
def test_what_is_run_again_outside_of_a_budget_is_told_once(step: Step) -> None:
    net, other = network(), network()
    optimizer, budget = torch.optim.SGD(net.parameters(), lr=0.1), lowtide.budget("1 MB")

    def steps() -> None:
        for _ in range(3):
            step(net, other, budget)
            optimizer.step()

    with pytest.warns(UncountedWarning, match="has read without grad alone") as told:
        steps()
    assert [warning.filename for warning in told] == [__file__]
    assert not uncalled._hook


@pytest.mark.parametrize("step", OTHERS)
def test_other_forwards_without_grad_are_not(step: Step) -> None:
    net, other = network(), network()
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    budget = lowtide.budget("1 MB")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedWarning)
        for _ in range(2):
            step(net, other, budget)
            optimizer.step()
    assert not uncalled._hook


def test_a_budget_that_is_gone_waits_for_nothing() -> None:
    net, budget = network(), lowtide.budget("1 MB")
    cached_by_hand(net, net, budget)
    assert uncalled._waiting
    del budget
    gc.collect()
    assert not uncalled._waiting
    usual(network(), network(), lowtide.budget("1 MB"))
    assert not uncalled._hook
