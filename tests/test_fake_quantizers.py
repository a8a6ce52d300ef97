"""Fake quantizers: their results are replayed, from copies of the ranges that they had observed.

A fake quantizer of torch's moves the range that it has observed and quantizes with it in one
operator, so its result depends on what it overwrites. Rules of docs/semantics.md are cited by
number.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import WAYS, Way, bits, check, counted, gradients, leaf
from lowtide import engine

HELPER = "_fused_moving_avg_obs_fq_helper"


class FakeQuantize(nn.Module):
    """What `torch.ao.quantization.FusedMovingAvgObsFakeQuantize` does, without its warnings."""

    def __init__(self, channels: int = 0) -> None:
        super().__init__()
        self.axis = 0 if channels else -1
        size = channels or 1
        for name, start in (("low", float("inf")), ("high", float("-inf"))):
            self.register_buffer(name, torch.full((size,), start))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("zero_point", torch.zeros(size, dtype=torch.int32))
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fused_moving_avg_obs_fake_quant(
            x, self.on, self.on, self.low, self.high, self.scale, self.zero_point,
            0.01, -128, 127, self.axis, self.axis == 0, self.axis == 0,
        )  # fmt: skip


class Layer(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, out)
        self.of_weight, self.of_result = FakeQuantize(out), FakeQuantize()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.of_weight(self.linear.weight)
        return self.of_result(nn.functional.linear(x, weight, self.linear.bias).relu())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(*wide) for _ in range(3) for wide in ((32, 128), (128, 32))))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("calls", [1, 2])
def test_what_a_fake_quantizer_makes_is_replayed_and_its_range_moves_once(
    way: Way, calls: int
) -> None:
    """Rules 1, 2 and 4; with the same quantizer twice, whose second call reads another range."""

    def scenario(way: Way) -> list[Tensor | None]:
        layers = net()
        seen: list[Tensor | None] = []
        for _ in range(2):
            x = leaf(16, 32)
            out = x
            for _ in range(calls):
                out = way(layers, 3 * out)
            seen += gradients(out.square().mean(), x, *layers.parameters())
            seen += [buffer.clone() for buffer in layers.buffers()]
            layers.zero_grad()
        return seen

    assert check(scenario, way)[HELPER] > 0


def test_ranges_that_move_before_backward_do_not_reach_a_replay() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        layers, x = net(), leaf(16, 32)
        loss = way(layers, x).square().mean()
        with torch.no_grad():
            layers(100 * x)
        return [*gradients(loss, x, *layers.parameters()), *layers.buffers()]

    assert check(scenario)[HELPER] > 0


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_a_budget_drops_what_fake_quantizers_have_made(share: float) -> None:
    """Kept, they were nearly all of the step, and a smallest limit of 1.7 plain peaks was named."""
    model, x, other = net(), torch.randn(256, 32), net()

    def step(of: nn.Module, context: contextlib.AbstractContextManager[object]) -> int:
        of.zero_grad()

        def go() -> None:
            with context:
                loss = of(x).square().mean()
            loss.backward()

        return lowtide.measure(go, device="cpu").peak_bytes

    limit = int(share * max(step(other, contextlib.nullcontext()) for _ in range(2)))
    step(model, contextlib.nullcontext())
    step(model, contextlib.nullcontext())
    budget = lowtide.budget(limit)
    for _ in range(4):
        assert step(model, budget) <= limit
        step(other, contextlib.nullcontext())
        for one, two in zip(
            (*(p.grad for p in model.parameters()), *model.buffers()),
            (*(p.grad for p in other.parameters()), *other.buffers()),
            strict=True,
        ):
            assert bits(one) == bits(two)
    assert budget.report().replayed_operations > 0


def test_a_state_that_is_large_beside_what_is_read_is_not_copied() -> None:
    """Each call would copy it, and a record would keep the copy."""
    quantize = FakeQuantize()
    with counted() as replayed, engine.use("python"):
        lowtide.checkpoint(lambda x: quantize(x * 2).sin(), leaf(4)).sum().backward()
    assert replayed["mul"] == 0
    assert replayed[HELPER] == 0
