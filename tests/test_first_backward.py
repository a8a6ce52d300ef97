"""Rule 13: a first step keeps its limit, or is refused, whatever its backward begins with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from against_plain import budgeted
from lowtide.kernels.workspace import kernel_workspace
from test_modelled import compare_memory, modelled_and_measured

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


class Normalized(nn.Module):
    """As in a medical U-Net: an instance norm, whose result is a view, and an activation that is
    written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(n, 16, 3, padding=1),
                    nn.InstanceNorm2d(16, affine=True),
                    nn.LeakyReLU(0.1, inplace=True),
                    nn.MaxPool2d(2),
                )
                for n in (3, 16, 16)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Views(nn.Module):
    """Every layer writes through views, twice, once of a transposed copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).view(-1, 8, 8)
            x += 1
            x = x.transpose(1, 2).contiguous().view(-1, 64)
            x.relu_()
        return x.mean()


class Slices(nn.Module):
    """Writes into a part of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x[:, :32].mul_(x[:, 32:].sigmoid())
        return x.square().mean()


WRITTEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "normalized": (Normalized, (2, 3, 96, 96)),
    "views": (Views, (1024, 64)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_write_through_a_view_copies_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd copies that of the base and that of the view, before it asks for what it saved."""
    torch.manual_seed(0)
    make, shape = WRITTEN[name]
    model, x = make(), torch.randn(shape)

    def step(budget: lowtide.Budget) -> None:
        with budget:
            loss = model(x)
        loss.backward()

    modelled, measured = modelled_and_measured(monkeypatch, step)
    compare_memory(modelled, measured, 0.02, 32 << 10)
    for guess, real in zip(modelled.events, measured.events, strict=True):
        assert guess.other <= real.other + (32 << 10)


class Turned(nn.Module):
    """The gradient of a GELU is transposed, and copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).t().contiguous().add(1).mean()


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.5])
@pytest.mark.parametrize("make", [Turned, Views, Slices])
def test_what_backward_begins_with_counts(make: Callable[[], nn.Module], share: float) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(1024, 64)
    budget, step = budgeted(model, x, share)
    refused = None
    for number in range(1, 4):
        try:
            peak = step()
        except lowtide.BudgetError as error:
            refused = error
            break
        assert peak <= budget.limit, f"step {number}"
    assert refused is None or (share == 0.5 and (refused.minimum or 0) > budget.limit)


LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "soft margin": F.soft_margin_loss,
    "cross entropy": lambda y, x: F.binary_cross_entropy(y.sigmoid(), x.sigmoid()),
    "of elements": lambda y, x: F.mse_loss(y, x, reduction="none").mean(),
    "broadcast": lambda y, x: F.mse_loss(y[:, None], x[:4]),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES)
def test_a_plan_from_fake_tensors_is_followed_through_its_loss(name: str) -> None:
    """The kernels of some losses leave their scalar in the memory of all elements: the dry run has
    to know, as a step that makes more than was planned leaves its plan."""
    torch.manual_seed(0)
    layers = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU()))
    model, x = nn.Sequential(*layers), torch.randn(256, 64)

    def forward() -> Tensor:
        return LOSSES[name](model(x), x)

    plan = lowtide.plan(forward, limit=lowtide.plan(forward).minimum_peak)
    assert plan.source == "fake"
    budget = lowtide.budget(plan)

    def step() -> None:
        model.zero_grad()
        with budget:
            loss = forward()
        loss.backward()

    for _ in range(2):
        assert plan.limit is not None
        assert lowtide.measure(step, device="cpu").peak_bytes <= plan.limit
        report = budget.report()
        assert report.planned
        assert report.left_plan_at is None


def turned(*shape: int) -> Tensor:
    return torch.randn(*shape[::-1]).t()


GRADIENTS = {
    "contiguous": lambda: torch.randn(256, 128),
    "transposed": lambda: turned(256, 128),
    "sliced": lambda: torch.randn(256, 256)[:, :128],
    "expanded": lambda: torch.randn(()).expand(256, 128),
    "of rows": lambda: torch.randn(256, 1).expand(256, 128),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("source", [torch.randn(256, 128), turned(256, 128)])
def test_what_gelu_copies(name: str, source: Tensor) -> None:
    given, gelu = GRADIENTS[name](), torch.ops.aten.gelu_backward.default
    peak = lowtide.measure(gelu, given, source, device="cpu").peak_bytes
    made = given.numel() * given.element_size()
    workspace = kernel_workspace("aten::gelu_backward", [given, source], (given, source), made)
    assert workspace == peak - made


def test_the_size_of_complex_numbers() -> None:
    numbers = torch.randn(256, 128, dtype=torch.complex64)
    peak = lowtide.measure(torch.abs, numbers, device="cpu").peak_bytes
    workspace = kernel_workspace("aten::abs", [numbers], (numbers,), numbers.nbytes // 2)
    assert workspace == peak - numbers.nbytes // 2


class Kept(nn.Module):
    """The program keeps the results of all layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU()))
        self.layers = nn.ModuleList(layers)
        self.results: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.results = []
        for layer in self.layers:
            x = layer(x)
            self.results.append(x)
        return x.square().mean()


def test_a_first_step_that_is_refused_is_told_its_plain_peak() -> None:
    """Values that the tape has dropped and the program still has are counted once."""
    torch.manual_seed(0)
    model, x = Kept(), torch.randn(1024, 64)

    def step(budget: lowtide.Budget | None = None) -> None:
        model.zero_grad()
        with budget or contextlib.nullcontext():
            loss = model(x)
        loss.backward()

    step()
    model.results = []
    plain = lowtide.measure(step, device="cpu").peak_bytes
    with pytest.raises(lowtide.BudgetError) as caught:
        step(lowtide.budget(int(0.9 * plain)))
    said = re.search(r"Its plain peak is (\d+\.\d) MiB", str(caught.value))
    assert said is not None
    assert abs(float(said[1]) * (1 << 20) / plain - 1) <= 0.05


def test_a_step_that_saves_only_externals_is_planned_with_its_backward() -> None:
    """Backward asks for nothing on the tape, and copies the expanded gradient of the sum."""
    model, x = nn.Linear(256, 256), torch.randn(1024, 256)

    def forward() -> Tensor:
        return model(x).sum()

    def step() -> None:
        model.zero_grad()
        forward().backward()

    step()
    peak = lowtide.measure(step, device="cpu").peak_bytes
    plan = lowtide.plan(forward)
    assert abs(plan.plain_peak - peak) <= 64
    assert plan.minimum_peak == plan.plain_peak
    with pytest.raises(lowtide.BudgetError):
        lowtide.plan(forward, limit=0.9)


def slices(y: Tensor) -> Tensor:
    return torch.stack([y[:, 32 * i : 32 * i + 32].cos().sum() for i in range(8)]).sum()


def rows(y: Tensor) -> Tensor:
    return torch.stack([y[64 * i].cos().sum() for i in range(8)]).sum()


def branches(y: Tensor) -> Tensor:
    return ((y + WEIGHT.exp()) + y.cos()).square().sum()  # the gradient has two owners at the sum


def twice(y: Tensor) -> Tensor:
    return (y * y).sum() + (2 * y).sum()


WEIGHT = torch.randn(512, 256, requires_grad=True)


@pytest.mark.parametrize("read", [slices, rows, branches, twice])
def test_a_dry_run_adds_gradients_up_in_place_where_autograd_does(
    read: Callable[[Tensor], Tensor],
) -> None:
    """On fake tensors autograd makes a new tensor for each sum: a third as large as the whole."""
    x = torch.randn(512, 256, requires_grad=True)

    def step() -> None:
        x.grad = WEIGHT.grad = None
        read(x.sin()).backward()

    step()
    x.grad = WEIGHT.grad = None
    peak = lowtide.measure(step, device="cpu").peak_bytes
    x.grad = WEIGHT.grad = None
    assert abs(lowtide.plan(lambda: read(x.sin())).plain_peak - peak) <= 256
