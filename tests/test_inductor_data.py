"""Compiled code under a limit, where the sizes of some tensors are found in data."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import lowtide
from compiling import compiles
from lowtide._compat import partitioner, symbolic
from lowtide.errors import CompiledWarning

pytestmark = [*compiles, pytest.mark.usefixtures("sizes_from_data")]

X = torch.randn(10_000, 8, generator=torch.Generator().manual_seed(3))
WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)


@pytest.fixture
def sizes_from_data() -> Any:
    from torch._dynamo import config

    with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def selecting(x: Tensor, weight: Tensor, least: float) -> Tensor:
    """The loss of three layers that add up the rows which begin with more than `least`."""
    for _ in range(3):
        x = (x @ weight).tanh()
        x = x * (x[x[:, 0] > least].sin().exp().sum() * 1e-3).sin()
    return x.square().mean()


def gradient(call: Any, least: float) -> Tensor:
    weight = WEIGHT.clone().requires_grad_()
    call(X, weight, least).backward()
    assert weight.grad is not None
    return weight.grad


def test_a_size_that_is_found_in_data_counts_as_the_largest_it_can_have() -> None:
    """It counted as 4096 whatever the data, and the step took half as much again as its limit."""
    expected = gradient(torch.compile(selecting, backend="aot_eager"), -2.0)
    torch._dynamo.reset()
    backend = lowtide.CompileBudget(0.75, compiler="aot_eager")
    compiled = torch.compile(selecting, backend=backend)
    assert torch.equal(expected, gradient(compiled, -2.0))
    weight = WEIGHT.clone().requires_grad_()
    measured = lowtide.measure(lambda: compiled(X, weight, -2.0).backward(), device="cpu")
    report = backend.report()
    assert report.graphs[0].recomputed > 0
    assert report.limit is not None
    assert measured.peak_bytes <= report.limit


def adding(x: Tensor, weight: Tensor, least: float) -> Tensor:
    """As `selecting`, with single elements: torch estimates what it takes to find these again."""
    for _ in range(2):
        x = torch.addmm(weight[0], x, weight).tanh()
        x = x + x[x > least].sin().exp().sum() * 1e-3
    return x.square().mean()


def test_what_finds_a_size_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch's estimates of times leave no sizes behind, over which Inductor fell."""
    found: list[Any] = []
    split = partitioner.JointGraph.split

    def watched(graph: Any, saved: list[Any]) -> Any:
        finding = [n for n in graph.nodes if symbolic.sizes_from_data(n)]
        shapes = next(s for n in finding for s in n.meta["val"].shape).node.shape_env
        found.append((finding, list(shapes.pending_fresh_unbacked_symbols)))
        forward, backward = split(graph, saved)
        found.append({node.name for node in backward.graph.nodes if node.op == "call_function"})
        return forward, backward

    monkeypatch.setattr(partitioner.JointGraph, "split", watched)
    backend = lowtide.CompileBudget(0.7, compiler="aot_eager")
    gradient(torch.compile(adding, backend=backend), 0.0)
    (finding, pending), again = found
    assert finding
    assert again.isdisjoint(node.name for node in finding)
    assert not pending


def test_a_size_of_which_nothing_is_known_is_said() -> None:
    def loss(x: Tensor, count: Tensor) -> Tensor:
        return x.exp().sum() + torch.zeros(int(count.item())).sum()

    x = X.clone().requires_grad_()
    backend = lowtide.CompileBudget("1 GB", compiler="aot_eager")
    with pytest.warns(CompiledWarning, match="found in its data"):
        torch.compile(loss, backend=backend)(x, torch.tensor(5)).backward()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompiledWarning)
        backend = lowtide.CompileBudget("1 GB", compiler="aot_eager")
        torch.compile(lambda x: x.exp().sum(), backend=backend, dynamic=True)(x).backward()


def test_the_largest_size_is_that_of_the_whole_expression() -> None:
    """Twice the largest value is not where a difference has its largest, nor a half no size."""
    shapes = ShapeEnv()
    bounded, free = shapes.create_unbacked_symint(), shapes.create_unbacked_symint()
    torch._check(bounded >= 0)
    torch._check(bounded <= 100)
    sizes = bounded, 100 - bounded, bounded // 2, 7
    assert [symbolic.size_hint(size) for size in sizes] == [100, 100, 50, 7]
    assert all(map(symbolic.is_bounded, sizes))
    for size in (free, free // 2, 100 - free, free + bounded):
        assert not symbolic.is_bounded(size)
        assert 0 <= symbolic.size_hint(size) < 1 << 20
