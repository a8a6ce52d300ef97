"""Steps that never recur, under a limit of many times what they take, are mostly not recorded
(rule 13, "Room to spare"). The recorder in Python records every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import counted
from lowtide import engine

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 60
GENEROUS = 200_000_000


class Loop(nn.Module):
    """As many calls of a cell, in an order, as a generator of its own says."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.drawn = random.Random(0)
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times or self.drawn.randint(20, 60)):
            kind = self.drawn.randrange(4)
            if kind == 0:
                x = torch.tanh(self.cell(x))
            elif kind == 1:
                x = self.norm(x)
            elif kind == 2:
                x = nn.functional.dropout(x, 0.1).add_(0.01)
            else:
                x = torch.sin(torch.cat([x[:, 1:], x[:, :1]], dim=1)) * x.sigmoid()
        return x


def idle_steps(budget: Any) -> int:
    return budget.report().idle_steps if isinstance(budget, lowtide.Budget) else 0


def trained(limit: int | None, *, region: bool = False) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    net, found = Loop(), []
    budget = nullcontext() if limit is None else lowtide.budget(limit)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        x = torch.randn(32, 16)
        with budget:
            if region and limit is not None:
                x = lowtide.checkpoint(torch.sin, x)
            elif region:
                x = torch.sin(x)
            loss = net(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(b.clone() for b in net.buffers()), torch.get_rng_state()]
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found, budget


def test_most_are_not_recorded_and_all_have_the_same_bits() -> None:
    plain, _ = trained(None)
    found, budget = trained(GENEROUS)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert not budget.report().planned
    if engine.name() == "compiled":
        assert 40 <= idle_steps(budget) < STEPS - 8
    else:
        assert idle_steps(budget) == 0


@pytest.mark.parametrize("limit", [2_000_000, 400_000])
def test_with_less_room_each_is_recorded(limit: int) -> None:
    plain, _ = trained(None)
    found, budget = trained(limit)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert idle_steps(budget) == 0


def test_steps_with_regions_are_recorded_and_soon_no_longer_tried() -> None:
    plain, _ = trained(None, region=True)
    found, budget = trained(GENEROUS, region=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert idle_steps(budget) == 0


def learned(limit: int) -> tuple[Loop, lowtide.Budget, Callable[[Tensor], None]]:
    torch.manual_seed(0)
    net, budget = Loop(), lowtide.budget(limit)

    def step(x: Tensor) -> None:
        with budget:
            loss = net(x).square().mean()
        loss.backward()

    for _ in range(20):
        step(torch.randn(32, 16))
    return net, budget, step


compiled = pytest.mark.skipif(
    "engine.name() != 'compiled'", reason="the recorder in Python records every step"
)


@compiled
def test_a_step_that_grows_keeps_the_limit() -> None:
    """Of eighty times the rows, and five times as long: recorded once it has made a little."""
    limit = 16_000_000
    net, budget, step = learned(limit)
    before = idle_steps(budget)
    step(torch.randn(32, 16))
    assert idle_steps(budget) == before + 1
    net.times = 300
    large = torch.randn(2560, 16)
    plain = lowtide.measure(lambda: net(large).square().mean().backward()).peak_bytes
    assert plain > 2 * limit
    with counted() as replayed:
        peak = lowtide.measure(lambda: step(large)).peak_bytes
    assert replayed.operations > 0
    assert peak <= limit
    net.times = 0
    count = idle_steps(budget)
    for _ in range(12):
        step(torch.randn(32, 16))
    assert idle_steps(budget) == count  # it is careful afterwards


@compiled
def test_a_step_too_large_for_any_plan_is_refused_in_the_middle() -> None:
    _, _, step = learned(16_000_000)
    with pytest.raises(lowtide.BudgetError, match=r"At operation \d+ of the forward"):
        step(torch.randn(100_000, 16))
    step(torch.randn(32, 16))


@compiled
@pytest.mark.parametrize("what", ["input", "gradient", "gradients"])
def test_a_step_that_reads_something_large_is_recorded_from_there(what: str) -> None:
    """What its first calls make is small, but not what a later one, or backward, will."""
    net, budget, _ = learned(16_000_000)
    before = idle_steps(budget)
    large = torch.randn(1_000_000 if what == "input" else 2_000_000, requires_grad=what != "input")
    layers = [nn.Linear(200, 200) for _ in range(30 if what == "gradients" else 0)]
    with budget:
        loss = net(torch.randn(32, 16)).square().mean()
        if layers:
            loss = loss + nn.Sequential(*layers)(torch.randn(2, 200)).mean()
        else:
            loss = loss + large.sum()
    loss.backward()
    assert idle_steps(budget) == before
    assert net.cell.weight.grad is not None


@compiled
def test_an_unseen_step_leaves_what_is_sparse_alone() -> None:
    """Sparse tensors do not say how many bytes they have."""
    net, budget, _ = learned(GENEROUS)
    before = idle_steps(budget)
    eye = torch.eye(16).to_sparse()
    with budget:
        loss = torch.sparse.mm(eye, net(torch.randn(32, 16)).t()).square().mean()
        with torch.no_grad():
            (eye * 2).coalesce().sum()
    loss.backward()
    assert net.cell.weight.grad is not None
    assert idle_steps(budget) in (before, before + 1)


@compiled
def test_fewer_and_fewer_are_recorded() -> None:
    net, budget, step = learned(GENEROUS)
    recorded = []
    for number in range(120):
        before = idle_steps(budget)
        step(torch.randn(32, 16))
        if idle_steps(budget) == before:
            recorded.append(number)
    gaps = [later - one for one, later in itertools.pairwise(recorded)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 32
    assert net.training
