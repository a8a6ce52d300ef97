"""`lowtide.fit` with an example: planned, or refused, before any step runs (rule 13)."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from by_hand import same
from once import on_one_recorder

pytestmark = on_one_recorder

CALLS: list[type] = []  # not restored after a dry run, as what a net caches itself would be


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        CALLS.append(type(x))
        for layer in self.layers:
            x = torch.sigmoid(layer(x)) * scale
        return x.square().mean()


def step(net: nn.Module, x: Any, **more: Any) -> None:
    net.zero_grad()
    net(x, **more).backward()


def plain_peak(net: nn.Module, x: Tensor) -> int:
    step(net, x)
    return lowtide.measure(lambda: step(net, x), device="cpu").peak_bytes


def batch() -> Tensor:
    return torch.randn(512, 64)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x,), lambda x: {"x": x}])
def test_the_first_step_is_planned(
    pack: Callable[[Tensor], Any], replayed: Callable[[], int]
) -> None:
    net, x = Net(), batch()
    limit = int(0.6 * plain_peak(net, x))
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    CALLS.clear()
    budget = lowtide.fit(net, limit, example=pack(x))
    assert len(CALLS) == 1
    assert CALLS[0] is not Tensor  # nothing was computed
    peak = lowtide.measure(lambda: step(net, x), device="cpu").peak_bytes
    assert peak <= limit
    assert budget.report().planned
    assert replayed() > 0
    assert same(gradients, [p.grad for p in net.parameters() if p.grad is not None])


def test_refused_before_any_step_runs() -> None:
    net, x = Net(), batch()
    with pytest.raises(lowtide.BudgetError, match="smallest limit known to suffice is") as caught:
        lowtide.fit(net, "64 KB", example=x)
    assert caught.value.minimum is not None
    assert all(p.grad is None for p in net.parameters())
    budget = lowtide.fit(net, caught.value.minimum, example=x)  # nothing was left behind
    step(net, x)
    budget.remove()


def test_a_plan_is_a_limit() -> None:
    net, x = Net(), batch()
    plan = lowtide.plan(net, x, limit=0.6)
    budget = lowtide.fit(net, plan)
    step(net, x)
    report = budget.report()
    assert report.planned
    assert report.limit == plan.limit


def test_a_plan_needs_no_example() -> None:
    model = nn.Linear(4, 4)
    plan = lowtide.plan(model, torch.ones(2, 4))
    with pytest.raises(lowtide.UsageError, match="is for the step that it was made from"):
        lowtide.fit(model, plan, example=torch.ones(2, 4))


def test_no_limit_is_not_one_with_an_example_either() -> None:
    with pytest.raises(lowtide.UsageError, match="got None of type NoneType"):
        lowtide.fit(Net(), None, example=batch())  # type: ignore[arg-type]


def test_an_example_may_be_what_a_collator_returns() -> None:
    model = nn.Linear(4, 4)
    lowtide.fit(model, "1 GiB", example=UserDict(input=torch.ones(2, 4))).remove()


def test_another_batch_than_the_example_is_planned_anew() -> None:
    net, x = Net(), batch()
    budget = lowtide.fit(net, 0.6, example=x)
    other = torch.randn(256, 64)
    for _ in range(2):
        step(net, other, scale=0.5)
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    budget.remove()
    step(net, other, scale=0.5)
    assert same(expected, [p.grad for p in net.parameters() if p.grad is not None])


def test_an_example_is_one_of_training() -> None:
    with pytest.raises(lowtide.UsageError, match=r"in eval mode\. Call its train"):
        lowtide.fit(Net().eval(), "1 MB", example=batch())


class Classifier(nn.Module):
    """Like transformers' models: returns the loss, and what it was made from."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
        self.head = nn.Linear(64, 400)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.body(x))
        return nn.functional.cross_entropy(out, labels), out


@pytest.mark.usefixtures("one_thread")
def test_an_output_that_has_a_name_until_the_step_is_over() -> None:
    """User code holds it, so it is in memory while backward runs."""
    net, x, labels = Classifier(), torch.randn(512, 64), torch.randint(400, (512,))

    def step() -> None:
        out = net(x, labels)
        out[0].backward()

    def peak() -> int:
        net.zero_grad()
        return lowtide.measure(step, device="cpu").peak_bytes

    peak()
    limit = peak() * 9 // 10
    budget = lowtide.fit(net, limit, example=(x, labels))
    assert peak() <= limit
    assert budget.report().planned


def wide() -> nn.Module:
    """What it returns is wider than what it makes on the way."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(32, 64))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda y: y.square().mean(),
    "classes": lambda y: F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long)),
    "l1_loss": lambda y: F.l1_loss(y, torch.zeros(y.shape)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_step_has_room_for_a_loss_outside(loss: str, share: float) -> None:
    net, x = wide(), torch.randn(512, 32)

    def step() -> None:
        net.zero_grad()
        LOSSES[loss](net(x)).backward()

    step()
    limit = int(share * lowtide.measure(step, device="cpu").peak_bytes)
    lowtide.fit(net, limit, example=x)
    assert max(lowtide.measure(step, device="cpu").peak_bytes for _ in range(3)) <= limit


@pytest.mark.usefixtures("one_thread")
def test_no_limit_is_refused_for_the_room_for_a_loss() -> None:
    """It may take less, as a sum does."""
    net, x = wide(), torch.randn(512, 32)

    def step() -> None:
        net.zero_grad()
        net(x).sum().backward()

    step()
    limit = int(0.9 * lowtide.measure(step, device="cpu").peak_bytes)
    lowtide.fit(net, limit, example=x)
    assert max(lowtide.measure(step, device="cpu").peak_bytes for _ in range(3)) <= limit
