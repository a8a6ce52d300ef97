"""Norms of half-precision activations and float32 weights on the CPU, as autocast makes them: a dry
run has the dtypes that the kernels give, so that a real step follows its plan (rule 13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide._compat import fakes
from lowtide.dryrun.shapes import Shapes

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
NETS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, not affine": lambda: nn.BatchNorm2d(8, affine=False),
    "batch, frozen": lambda: nn.BatchNorm2d(8).eval(),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "group": lambda: nn.GroupNorm(2, 8),
    "layer": lambda: nn.LayerNorm(16),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NETS)
def test_a_step_in_mixed_precision_follows_its_plan(name: str, half: torch.dtype) -> None:
    layers = [(nn.Conv2d(8, 8, 1), NETS[name](), nn.GELU()) for _ in range(4)]
    net, x = nn.Sequential(*(layer for some in layers for layer in some)), torch.randn(8, 8, 16, 16)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", half):
            out: Tensor = net(x)
        return out.float().square().mean()

    budget = lowtide.budget(lowtide.plan(step, x, limit=0.95))
    with budget:
        loss = step(x)
    loss.backward()
    assert budget.report().left_plan_at is None
    assert budget.report().planned


def ones(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(size, dtype=dtype)


def calls(half: torch.dtype, other: torch.dtype) -> dict[str, Callable[[Any], Any]]:
    """Calls of norms and their backwards on inputs in `half` and everything else in `other`."""

    def of(*size: int) -> Tensor:
        return ones(*size, dtype=other)

    x, stats = (2, 4, 8), {"dtype": half}
    return {
        "layer": lambda c: c(aten.native_layer_norm.default, ones(4, 8, **stats), [8], of(8), None,
                             1e-5),
        "group": lambda c: c(aten.native_group_norm.default, ones(*x, **stats), of(4), of(4), 2, 4,
                             8, 2, 1e-5),
        "batch": lambda c: c(aten.native_batch_norm.default, ones(*x, **stats), of(4), of(4), of(4),
                             of(4), True, 0.1, 1e-5),
        "batch, no weight": lambda c: c(aten._native_batch_norm_legit.default, ones(*x, **stats),
                                        None, None, of(4), of(4), True, 0.1, 1e-5),
        "group, backward": lambda c: c(aten.native_group_norm_backward.default, ones(*x, **stats),
                                       ones(*x, **stats), of(2, 2), of(2, 2), of(4), 2, 4, 8, 2,
                                       [True, True, True]),
    }  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("name", calls(torch.float32, torch.float32))
def test_the_results_are_those_of_the_kernels(name: str, half: torch.dtype, mixed: bool) -> None:
    call = calls(half, torch.float32 if mixed else half)[name]

    def run(func: Any, *args: Any) -> Any:
        return func(*args)

    real = [(t.shape, t.dtype) for t in call(run)]
    mode = fakes.fake_mode()
    with mode:
        shapes = Shapes(mode)
        for _ in range(4):  # the first calls are checked, the others take the fast path
            found = call(lambda func, *args: shapes(func, args, {}))
            assert [(t.shape, t.dtype) for t in found] == real
