"""`torch.backends.cudnn.benchmark`: a thread's choice of kernels is not another's (rule 5).

The emulated device has no such kernels, so that a replay would not show other bits; what is tested
is that no convolution is replayed, and that all else is as it was.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from accelerator.test_limits import ZERO, ConvNet
from by_hand import same
from lowtide.errors import BudgetError, KeptWarning
from lowtide.tape import trials
from once import on_one_recorder

pytestmark = [
    pytest.mark.filterwarnings("ignore::lowtide.errors.KeptWarning"),
]


@pytest.fixture(autouse=True)
def trying(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what a refused step of another test left would be freed while a step is measured
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(trials, "seen", False)


@contextlib.contextmanager
def names() -> Iterator[Counter[str]]:
    """The operations that are replayed inside, by name."""
    found: Counter[str] = Counter()

    def note(operations: list[Any]) -> None:
        found.update(op.facts.name for op in operations)

    lowtide.replay.listeners.append(note)
    try:
        yield found
    finally:
        lowtide.replay.listeners.remove(note)


class Either(nn.Module):
    """Four values that cheap convolutions make, and four as large that dear products make."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 32, 1)
        self.scale = nn.Parameter(torch.ones(512))
        self.register_buffer("matrix", torch.randn(512, 2048) / 23)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for number in range(4):
            found.append(self.layer(x + number).sin().mean())
            rows = x.reshape(-1, 512)[:128] + number
            found.append(((rows * self.scale) @ self.matrix).sin().mean())
        return torch.stack(found)

    @staticmethod
    def example() -> Tensor:
        return torch.randn(16, 4, 32, 32, device=ZERO)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return ConvNet().to(ZERO)


def in_regions(model: nn.Sequential, x: Tensor) -> Tensor:
    for part in model:
        x = lowtide.checkpoint(part, x)
    return x


def step(model: nn.Module, x: Tensor, run: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = run(model, x).square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    return [t.detach().cpu().clone() for t in (loss, *gradients, *model.buffers())]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def peak(model: nn.Module, x: Tensor, run: Callable[[Any, Tensor], Tensor]) -> int:
    model.zero_grad()
    return lowtide.measure(lambda: run(model, x).square().mean().backward(), device=ZERO).peak_bytes


def test_a_region_keeps_what_convolutions_make() -> None:
    model, x = net(), ConvNet.example()
    other = copy.deepcopy(model)
    expected = step(model, x, plain)
    with names() as found:
        assert same(step(other, x, in_regions), expected)
    assert found["aten::convolution"] == 0
    assert found["aten::relu"] == 4  # what else is in the region is recomputed as ever
    torch.backends.cudnn.benchmark = False  # what a thread has chosen stays chosen
    with names() as found:
        step(other, x, in_regions)
    assert found["aten::convolution"] == 0


def test_where_nothing_was_tried_out_they_are_recomputed() -> None:
    torch.backends.cudnn.benchmark = False
    with names() as found:
        step(net(), ConvNet.example(), in_regions)
    assert found["aten::convolution"] == 4


def test_without_cudnn_nothing_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with names() as found:
        step(net(), ConvNet.example(), in_regions)
    assert found["aten::convolution"] == 4


def test_the_cpu_has_one_kernel() -> None:
    with names() as found:
        step(net().cpu(), ConvNet.example().cpu(), in_regions)
    assert found["aten::convolution"] == 4


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_a_limit_holds_with_convolutions_kept(share: float) -> None:
    """From the first step on, and with the bits of the plain step."""
    model, x = net(), ConvNet.example()
    most = max(peak(model, x, plain) for _ in range(2))
    limit = int(share * most)
    budget = lowtide.budget(limit)

    def under(model: nn.Module, x: Tensor) -> Tensor:
        with budget:
            return plain(model, x)

    def whole() -> None:
        under(model, x).square().mean().backward()

    with names() as found:
        for number in range(5):
            model.zero_grad()
            took = lowtide.measure(whole, device=ZERO).peak_bytes
            assert took <= limit, (number, budget.report())
    report = budget.report()
    assert report.planned
    assert found["aten::convolution"] == 0
    assert found.total() > 0
    other = copy.deepcopy(model)
    assert same(step(model, x, under), step(other, x, plain))


def test_a_refusal_counts_what_is_kept(tmp_path: Path) -> None:
    """What suffices is more than where convolutions can be recomputed, and does suffice."""
    model, x = net(), ConvNet.example()
    most = max(peak(model, x, plain) for _ in range(2))
    least = {}
    for on in (False, True):
        torch.backends.cudnn.benchmark = on
        least[on] = lowtide.plan(lambda: plain(model, x).square().mean()).minimum_peak
    assert least[False] < least[True] < most
    budget = lowtide.budget(int(0.9 * least[True]))

    def steps() -> None:
        for _ in range(3):
            with budget:
                loss = plain(model, x).square().mean()
            loss.backward()

    with pytest.raises(BudgetError) as refused:
        steps()
    assert refused.value.minimum > 0.9 * least[True]
    plan = lowtide.plan(lambda: plain(model, x).square().mean(), limit=refused.value.minimum)
    plan.save(tmp_path / "plan.json")
    assert lowtide.load_plan(tmp_path / "plan.json").peak == plan.peak


def test_the_setting_may_change_between_steps() -> None:
    """From then on another plan is followed, and no step of either exceeds the limit."""
    torch.manual_seed(0)
    model, x = Either().to(ZERO), Either.example()
    limit = int(0.75 * max(peak(model, x, plain) for _ in range(2)))
    budget = lowtide.budget(limit)
    replays = []
    for number in range(12):
        torch.backends.cudnn.benchmark = number == 4
        expected = step(copy.deepcopy(model), x, plain)
        left: list[Tensor] = []

        def under(model: nn.Module, x: Tensor) -> Tensor:
            with budget:
                return plain(model, x)

        def whole(left: list[Tensor] = left) -> None:
            left.extend(step(model, x, under))

        model.zero_grad()
        with names() as found:
            took = lowtide.measure(whole, device=ZERO).peak_bytes
            assert took <= limit, (number, budget.report())
        assert same(left, expected)
        replays.append((found["aten::convolution"], found["aten::mm"]))
    convolutions, products = replays[3]
    assert convolutions > products
    assert all(products and not convolutions for convolutions, products in replays[4:])


@on_one_recorder
def test_it_is_said_once() -> None:
    model, x = net(), ConvNet.example()
    with pytest.warns(KeptWarning, match=r"set torch\.backends\.cudnn\.benchmark = False") as said:
        in_regions(model, x)
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_regions(model, x)
