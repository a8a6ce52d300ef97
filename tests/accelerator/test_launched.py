"""What Triton launches runs, and runs again, on the stream that is current (rule 14)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
import ttir_texts as texts
from by_hand import counted_replays
from test_launches import Kernel

DEVICE = "emulated:0"


def _turn(x: Tensor, cos: Tensor, out: Tensor, n: int, INPLACE: bool) -> None:
    (x if INPLACE else out).copy_(x * cos)  # the recorder does not see what a kernel does


IN_PLACE = Kernel(_turn, "x cos out n INPLACE", texts.TURN_IN_PLACE)
ELSEWHERE = Kernel(_turn, "x cos out n INPLACE", texts.TURN)


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ELSEWHERE[1,](x, cos, out, 3, INPLACE=False)
        IN_PLACE[1,](out, cos, out, 3, INPLACE=True)
        ctx.save_for_backward(cos)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        (cos,) = ctx.saved_tensors
        return given * cos * cos, None


def program(x: Tensor, weight: Tensor, cos: Tensor, side: Any) -> Tensor:
    for turn in range(4):
        x = Rotary.apply((x @ weight).sin(), cos).cos()
        if turn % 2:
            here = torch.accelerator.current_stream()
            side.wait_stream(here)
            with side:
                y = Rotary.apply((x @ weight).sin(), cos).tanh()
            here.wait_stream(side)
            x = x + y
            y.record_stream(here)
    return x.sum()


@pytest.mark.parametrize("way", ["region", "budget"])
def test_launches_on_two_streams(way: str, core: ModuleType) -> None:
    side = torch.Stream(DEVICE)
    torch.manual_seed(0)
    cos, weight = torch.randn(2, 64, 64, device=DEVICE)
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    limit = lowtide.budget(0.7)

    def plain() -> Tensor:
        return program(x, weight, cos, side)

    def inside() -> Tensor:
        if way == "region":
            return lowtide.checkpoint(plain)
        with limit:
            return plain()

    def gradient(run: Any) -> Tensor:
        (found,) = torch.autograd.grad(run(), x)
        torch.accelerator.synchronize()
        return found.cpu()

    wanted = gradient(plain)
    assert core.races() == []
    with counted_replays() as replayed:
        for _ in range(3):
            assert torch.equal(gradient(inside), wanted)
            assert sorted(set(core.races())) == []
    assert replayed()
