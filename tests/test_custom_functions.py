"""Custom autograd Functions: the model of a first step includes what their backward takes.

Their forward runs without grad, so autograd's nodes do not describe it.
"""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import lowtide
from by_hand import same
from one_step import gradients, peak_of


class _Formula(torch.autograd.Function):
    """GELU as a formula of basic operations, as in some language models."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)
        return slope * gradient


class _Again(torch.autograd.Function):
    """A residual block that runs again in backward, as in reversible nets and checkpoints."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x, *parameters)
        return x + block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + ctx.block(x)
        first, *others = torch.autograd.grad(y, [x, *parameters], gradient)
        return (first, None, *others)


class _Settles(torch.autograd.Function):
    """An equilibrium: many iterations forward, of which one is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *parameters: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(15):
            z = torch.tanh(layer(z) * 0.3 + x)
        ctx.layer = layer
        ctx.save_for_backward(z, x, *parameters)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        z, x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            z, x = z.detach().requires_grad_(), x.detach().requires_grad_()
            y = torch.tanh(ctx.layer(z) * 0.3 + x)
        u = gradient
        for _ in range(15):
            u = gradient + torch.autograd.grad(y, z, u, retain_graph=True)[0]
        first, *others = torch.autograd.grad(y, [x, *parameters], u)
        return (first, None, *others)


class _Reversible(torch.autograd.Function):
    """Many blocks, of which the backward runs one after the other, from their results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList, *parameters: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            one = one + first(two)
            two = two + second(one)
        ctx.blocks, ctx.count = list(blocks), len(parameters)
        ctx.save_for_backward(one, two)
        return torch.cat([one, two], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        one, two = ctx.saved_tensors
        ones, twos = gradient.chunk(2, -1)
        while ctx.blocks:
            second, first = ctx.blocks.pop(), ctx.blocks.pop()
            two, ones = _undone(second, one, two, ones, twos)
            one, twos = _undone(first, two, one, twos, ones)
        return torch.cat([ones, twos], -1), None, *[None] * ctx.count


def _undone(block: nn.Module, read: Tensor, out: Tensor, sums: Tensor, given: Tensor) -> Any:
    """Of `out = before + block(read)`: before, and the gradient of `read`."""
    with torch.enable_grad():
        read = read.detach().requires_grad_()
        made = block(read)
        made.backward(given)
    return out - made.detach(), sums + read.grad


class _Loss(torch.autograd.Function):
    """A mean of squares that nothing reads: it is the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(x, target)
        return ((x - target) * (x - target)).exp().log1p().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, target = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            loss = ((x - target) * (x - target)).exp().log1p().mean()
        return torch.autograd.grad(loss, x, gradient)[0], None


class _Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.wide = nn.ModuleList(nn.Linear(32, 256) for _ in range(4))
        self.thin = nn.ModuleList(nn.Linear(256, 32) for _ in range(4))
        self.blocks = nn.ModuleList(_block() for _ in range(4))
        self.teacher = _block(6)

    def forward(self, x: Tensor) -> Tensor:
        for wide, thin, block in zip(self.wide, self.thin, self.blocks, strict=True):
            x = x + thin(self.inner(wide(x)))
            if self.how == "again":
                x = _Again.apply(x, block, *block.parameters())
            elif self.how == "reentrant":
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        if self.how in ("loss", "taught"):
            target = torch.zeros_like(x)
            if self.how == "taught":
                with torch.no_grad():
                    target = self.teacher(x)
            loss: Tensor = _Loss.apply(x.repeat(1, 8), target.repeat(1, 8))
            return loss
        return x.square().mean()

    def inner(self, x: Tensor) -> Tensor:
        if self.how == "formula":
            return _Formula.apply(x)  # type: ignore[no-any-return]
        return torch.nn.functional.gelu(x)


def _block(layers: int = 1) -> nn.Sequential:
    inner = [part for _ in range(layers) for part in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), *inner, nn.Linear(128, 32))


class _Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(32, 256), nn.Linear(256, 256)
        self.last = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10))

    def forward(self, x: Tensor) -> Tensor:
        z = _Settles.apply(self.first(x), self.layer, *self.layer.parameters())
        loss: Tensor = self.last(z).square().mean()
        return loss


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ("formula", 0.8),
        ("formula", 0.65),
        ("again", 0.9),
        ("again", 0.75),
        ("reentrant", 0.9),
        ("reentrant", 0.75),
        ("loss", 0.9),
        ("loss", 0.75),
        ("taught", 0.9),
        ("taught", 0.75),
    ],
)
def test_the_first_step_keeps_the_limit(how: str, share: float) -> None:
    torch.manual_seed(0)
    model, x = _Net(how), torch.randn(1024, 32, requires_grad=True)
    plain = peak_of(model, x, None)
    wanted = gradients(model)
    limit = int(share * plain)
    budget = lowtide.budget(limit)
    for _ in range(3):
        assert peak_of(model, x, budget) <= limit
        found = gradients(model)
        assert len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_iterations_are_counted_once() -> None:
    """Counting all fifteen would give several times the step's memory."""
    torch.manual_seed(0)
    model, x = _Equilibrium(), torch.randn(512, 32)
    plain = peak_of(model, x, None)
    budget = lowtide.budget(int(0.8 * plain))
    with pytest.raises(lowtide.BudgetError, match="taken to run its forward again") as refused:
        peak_of(model, x, budget)
    least = refused.value.minimum
    assert least is not None
    assert least <= 1.25 * plain
    budget = lowtide.budget(least)
    assert max(peak_of(model, x, budget) for _ in range(3)) <= least


class _Revertible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 256), nn.GELU())
        self.blocks = nn.ModuleList(_block() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        parameters = self.blocks.parameters()
        loss: Tensor = self.last(_Reversible.apply(self.first(x), self.blocks, *parameters))
        return loss.square().mean()


@pytest.mark.parametrize("share", [0.98, 1.0, 2.0])
def test_no_step_is_refused_for_a_guess(share: float) -> None:
    """Running all blocks at once would take several times the step's memory (rule 13)."""
    torch.manual_seed(0)
    model, x = _Revertible(), torch.randn(512, 16)
    plain = peak_of(model, x, None)
    wanted = gradients(model)
    budget = lowtide.budget(int(share * plain))
    for _ in range(3):
        assert peak_of(model, x, budget) <= share * plain
        assert same(gradients(model), wanted)


def test_what_fits_by_no_guess_is_refused() -> None:
    """The refusal of a first step says what was guessed, and the limit that would tell."""
    torch.manual_seed(0)
    model, x = _Revertible(), torch.randn(512, 16)
    plain = peak_of(model, x, None)
    with pytest.raises(lowtide.BudgetError, match=r"the least that it may, .* may do") as refused:
        peak_of(model, x, lowtide.budget(int(0.5 * plain)))
    assert refused.value.minimum is not None
    assert refused.value.minimum > 2 * plain


def test_a_refusal_speaks_of_functions_only_where_there_are_some() -> None:
    """A target net of the same parameters, without grad, is none (double Q-learning)."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    with lowtide.budget("330 KiB"):
        with torch.no_grad():
            target = net(x)
        loss = (net(x) - target).square().mean()
    with pytest.raises(lowtide.BudgetError, match="from sizes") as refused:
        loss.backward()
    assert "Function" not in str(refused.value)
