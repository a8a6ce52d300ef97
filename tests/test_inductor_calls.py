"""Compiled code under a limit, where its graphs call whole graphs (regions that are compiled once,
branches, loops) or operators of a library.

torch traces a call of a region on what it knows of an earlier one, and an operator with a function
that its author wrote, so their results tell nothing about memory; and what runs inside a graph
takes memory that no node of the outer one shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import lowtide
from by_hand import same
from compiling import compiles

pytestmark = compiles


X = torch.randn(512, 16, generator=torch.Generator().manual_seed(3))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))


def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    hidden = nn.functional.linear(x, weight, bias).tanh().exp()
    return hidden + nn.functional.dropout(x, 0.2)


region = torch.compiler.nested_compile_region(block)


class OnceCompiled(Layers):
    """Three calls of one region, which hands its input on to its backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = region(x, layer.weight, layer.bias)
        return x.square().mean()


class Branches(Layers):
    """Each branch makes several tensors, of which one is returned."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cond(
                x.sum() > 0,
                lambda h: torch.cat([h, h.sin(), h * 2], 1)[:, 8:24] * h,
                lambda h: torch.cat([h, h.cos(), h * 3], 1)[:, 8:24] * h,
                (layer(x).tanh(),),
            )
        return x.square().mean()


class Loop(Layers):
    """Each iteration's results are stacked, by the places of their elements."""

    def forward(self, x: Tensor) -> Tensor:
        first, weight, last = self.layers
        state, made = scan(
            lambda state, given: (
                (state @ weight.weight + weight.bias).tanh() + given,
                (state * given).sin().exp(),
            ),
            first(x[:64]).tanh(),
            last(x).view(8, 64, 16),
        )
        loss: Tensor = made.exp().mean() + state.square().mean()
        return loss


@torch.library.custom_op("test_inductor_calls::noisy", mutates_args=())
def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + torch.rand_like(x), x * torch.rand_like(x)


noisy.register_fake(lambda x: (x, x))
noisy.register_autograd(lambda ctx, *given: given[0] + given[1])


class TracedAsItsArgument(Layers):
    """An operator that draws, whose results stand for its argument while torch traces."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            one, two = noisy(layer(x).tanh())
            x = one.sigmoid() * two.exp()
        return x.square().mean()


@torch.library.custom_op("test_inductor_calls::writing", mutates_args={"sums"})
def writing(x: Tensor, sums: Tensor) -> Tensor:
    sums.add_(x)
    return sums.sin()


writing.register_fake(lambda x, sums: x)


class WritesAndReturns(Layers):
    """The same of an operator that writes to another argument."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(x).tanh()
            sums = hidden.detach().exp()
            x = (hidden + writing(hidden.detach(), sums)).sigmoid() * sums + x
        return x.square().mean()


def step(model: nn.Module, call: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(X)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 6
    return [loss.detach(), *gradients, torch.get_rng_state()]


def peak(model: nn.Module, call: Any) -> int:
    model.zero_grad()
    return lowtide.measure(lambda: call(X).backward(), device="cpu").peak_bytes


@pytest.mark.parametrize("share", [1.0, 0.92])
def test_a_region_that_is_compiled_once_has_storages_of_its_own_in_each_call(share: float) -> None:
    """All calls counted as one, and each backward got what the last of them had saved."""
    plain, model = OnceCompiled(), OnceCompiled()
    expected = step(plain, torch.compile(plain, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    backend = lowtide.CompileBudget(share, compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert same(expected, step(model, compiled))
    (graph,) = backend.report().graphs
    assert abs(peak(model, compiled) - graph.peak) <= 64
    assert graph.peak <= share * graph.plain_peak
    assert (graph.recomputed > 0) == (share < 1)


def counts_all(build: type[Layers]) -> None:
    plain, model = build(), build()
    usual = torch.compile(plain, backend="aot_eager")
    expected, most = step(plain, usual), peak(plain, usual)
    torch._dynamo.reset()
    backend = lowtide.CompileBudget(most, compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert same(expected, step(model, compiled))
    assert abs(peak(model, compiled) - (backend.report().planned_peak or 0)) <= 64


def test_what_a_branch_makes_counts() -> None:
    """As much as the branch that takes most."""
    counts_all(Branches)


def test_what_a_loop_makes_counts() -> None:
    """An iteration, with what the loop has of others meanwhile."""
    counts_all(Loop)


@pytest.mark.parametrize("build", [TracedAsItsArgument, WritesAndReturns])
def test_an_operator_that_is_traced_as_its_argument_does_not_run_again(
    build: type[Layers],
) -> None:
    """Its results counted as views of the argument, which cost nothing to make again: it ran a
    second time in the backward, and drew other numbers there."""
    plain, model = build(), build()
    usual = torch.compile(plain, backend="aot_eager")
    expected, most = step(plain, usual), peak(plain, usual)
    torch._dynamo.reset()
    backend = lowtide.CompileBudget(int(0.8 * most), compiler="aot_eager")
    compiled = torch.compile(model, backend=backend)
    assert same(expected, step(model, compiled))
    assert abs(peak(model, compiled) - (backend.report().planned_peak or 0)) <= 64
    (graph,) = backend.report().graphs
    assert graph.recomputed > 0
