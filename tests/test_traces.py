"""Regions and budgets where torch traces or computes on shapes alone: `make_fx`, `torch.jit.trace`,
fakes, export.

What a replay makes is no part of a traced graph: a trace that took it for a constant would go on
with the values of the one call that was traced. So nothing is recorded around which torch traces,
and what a function that is traced inside saves is given back as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from against_plain import Way, bits, check, counted, gradients, half_the_peak, leaf, plainly

MODES = ["real", "fake", "symbolic"]
WAYS = [lowtide.checkpoint, half_the_peak]


def slope(way: Way) -> Callable[[Tensor], Tensor]:
    """A function with a backward inside, which a trace of it contains."""

    def function(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = way(lambda y: (y.sin() * 2.0).exp(), x)
        return torch.autograd.grad(out.sum(), x)[0]

    return function


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_traced_region_computes_with_what_the_graph_is_given(way: Way, mode: str) -> None:
    """On other numbers than those it was traced with."""
    torch.manual_seed(0)
    first, second = torch.randn(4, 4), torch.randn(4, 4)
    with counted() as replayed:
        traced = make_fx(slope(way), tracing_mode=mode)(first)
    plain = make_fx(slope(plainly), tracing_mode=mode)(first)
    assert traced.code == plain.code
    assert bits(traced(second)) == bits(slope(plainly)(second))
    assert not replayed.operations


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_trace_inside_computes_with_what_the_graph_is_given(way: Way, mode: str) -> None:
    def scenario(way: Way) -> Any:
        x, first, second = leaf(8, 8), torch.randn(8, 8), torch.randn(8, 8)
        graphs = []

        def function(y: Tensor) -> Tensor:
            graphs.append(make_fx(slope(plainly), tracing_mode=mode)(first))
            return y.sin().exp().cos()

        loss = way(function, x).sum()
        return [graphs[0](second), *gradients(loss, x)]

    replayed = check(scenario, way)
    assert max(replayed.names().values()) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("apply", "steps"),
    [
        (lambda model: lowtide.fit(model, 0.7), 0),
        (lambda model: lowtide.fit(model, 2**30), 3),
        (lambda model: lowtide.checkpoint_modules(model, "0"), 1),
        (lambda model: lowtide.checkpoint_levels(model, 3), 1),
    ],
)
def test_a_model_that_torch_jit_traces_in_training(
    apply: Callable[[nn.Module], object], steps: int
) -> None:
    """As TensorBoard's `add_graph` does. A size is a tensor meanwhile, of which a recorder would
    make operations in the graph, and a convolution has other operations."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    model, first, second = nn.Sequential(nn.Sequential(*layers)), *torch.randn(2, 2, 1, 8, 8)

    def kinds(traced: Any) -> list[str]:
        return [node.kind() for node in traced.inlined_graph.nodes()]

    plain = torch.jit.trace(model, first, check_trace=False)
    apply(model)
    for _ in range(steps):
        model(first).sum().backward()
    traced = torch.jit.trace(model, first, check_trace=False)
    assert kinds(traced) == kinds(plain)
    assert bits(traced(second)) == bits(plain(second))


@pytest.mark.parametrize("limit", [None, 0.7, 2**30])
def test_a_step_on_fake_tensors(limit: float | None) -> None:
    """Shapes, dtypes and whether there is a gradient, without memory."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        x = torch.randn(4, 8, requires_grad=True)
        if limit is None:
            (lowtide.checkpoint(model, x) * 2.0).sum().backward()
        else:
            budget = lowtide.budget(limit)
            for _ in range(3):
                with budget:
                    loss = (model(x) * 2.0).sum()
                loss.backward()
        found = [x.grad, *(p.grad for p in model.parameters())]
    for one, of in zip(found, [x, *model.parameters()], strict=True):
        assert one is not None
        assert (type(one), one.shape) == (type(x), of.shape)


@pytest.mark.parametrize("way", WAYS)
def test_fake_tensors_inside(way: Way) -> None:
    """A forward that asks for the shape of something, with a number among the arguments."""

    def scenario(way: Way) -> Any:
        x, w = leaf(8, 8), leaf(8, 8)

        def function(y: Tensor) -> Tensor:
            FakeTensorMode.cache_clear()  # else the plain run's answers are given
            with FakeTensorMode():
                shape = (torch.empty(8, 8) * 2.0 + 1).sum(0, keepdim=True).shape
            return (y @ w).sin().exp().expand(8, 8) * torch.ones(shape)

        return gradients(way(function, x).sum(), x, w)

    assert check(scenario, way)["sin"] == 1


def _made_on_meta() -> None:
    assert (torch.empty(1 << 22, device="meta") * 2).add_(1).device.type == "meta"
    torch.tensor(2.0) * torch.empty(1 << 22, device="meta")  # the number's device is the CPU


def _made_of_fakes() -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(1 << 22)
    fake * 2  # outside of its mode
    mode.from_tensor(torch.empty(4)).repeat(1 << 22)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("make", [_made_on_meta, _made_of_fakes])
def test_what_has_only_a_shape_takes_no_room(make: Callable[[], None], first: bool) -> None:
    """16 MiB or more of them, under a limit of 1 MB: in a first step and in planned ones."""
    x = leaf(64, 64)

    def step() -> list[Tensor]:
        if first:
            make()
        y = x.sin()
        make()
        return gradients(y.exp().sin().sum(), x)

    plain = step()
    budget = lowtide.budget("1 MB")
    for _ in range(3):
        with budget:
            found = step()
        assert [*map(bits, found)] == [*map(bits, plain)]
    assert budget.report().planned


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_region_is_the_plain_function(strict: bool) -> None:
    """torch's own checkpoint ends a strict export in a KeyError."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model, x = nn.Sequential(plain, nn.Tanh()), leaf(3, 4)
    wanted = torch.export.export(model, (x,), strict=strict).graph_module.code
    with lowtide.checkpoint_modules(model, "0", policy=lowtide.policies.KeepProducts()):
        found = torch.export.export(model, (x,), strict=strict)
    assert found.graph_module.code == wanted
    assert bits(found.module()(x)) == bits(model(x))


def test_an_exported_region_whose_function_has_a_keyword_of_torchs_checkpoint() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def part(self, x: Tensor, *, fn: float) -> Tensor:
            return self.line(x).sin() * fn

        def forward(self, x: Tensor) -> Tensor:
            return lowtide.checkpoint(self.part, x, fn=2.0)

    model, x = Model(), torch.randn(4, 8)
    assert bits(torch.export.export(model, (x,)).module()(x)) == bits(model(x))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert bits(compiled(x)) == bits(model(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", WAYS)
def test_compiled_autograd_calls_the_hooks_as_they_are(way: Way) -> None:
    """It neither warns of what it cannot trace nor compiles what a request calls."""

    def scenario(way: Way) -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        found: list[Tensor | None] = []
        for _ in range(2):
            loss = way(model, torch.randn(16, 8)).square().sum()
            with torch._dynamo.compiled_autograd._enable(
                lambda graph: torch.compile(graph, backend="eager")
            ):
                found += gradients(loss, *model.parameters())
        return [None if t is None else t.clone() for t in found]

    replayed = check(scenario, way)
    assert replayed["tanh"] == 2 or way is not lowtide.checkpoint
