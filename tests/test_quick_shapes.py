"""Shapes that are computed here are those of the real kernels' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.backward import operation
from lowtide.kernels import quick, results
from lowtide.tape.operators import facts_of
from once import on_one_recorder

pytestmark = on_one_recorder

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]
SIZES = [(3, 4), (2, 4, 5), (2, 4, 5, 6), (2, 4, 3, 5, 2)]


def on_meta(argument: Any) -> Any:
    return argument.to("meta") if isinstance(argument, Tensor) else argument


def geometry(result: Any) -> list[Any]:
    found = [result] if isinstance(result, Tensor) else list(result)
    return [t if t is None else (t.shape, t.stride(), t.dtype) for t in found]


def in_format(x: Tensor, last: bool) -> Tensor:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x.contiguous(memory_format=form) if last and form is not None else x


def batch_norm(x: Tensor, affine: bool, training: bool, backward: bool) -> Call:
    rest = [torch.ones(x.shape[1], dtype=x.dtype) if affine else None for _ in range(4)]
    if not training and not affine:
        rest[2:] = [torch.ones(x.shape[1], dtype=x.dtype) for _ in range(2)]
    args = (x, *rest, training, 0.1, 1e-5)
    if not backward:
        return aten.native_batch_norm.default, args
    _, *saved = aten.native_batch_norm(*args)
    mask = [True, affine, affine]
    given = (x, x, rest[0], *rest[2:], *saved, training, 1e-5, mask)
    return aten.native_batch_norm_backward.default, given


def layer_norm(x: Tensor, affine: bool, training: bool, backward: bool) -> Call:
    shape = x.shape[1:] if training else x.shape[-1:]
    weight = torch.ones(shape, dtype=x.dtype) if affine else None
    args = (x, list(shape), weight, weight, 1e-5)
    if not backward:
        return aten.native_layer_norm.default, args
    _, *saved = aten.native_layer_norm(*args)
    mask = [training, affine, affine]
    return aten.native_layer_norm_backward.default, (
        x, x, list(shape), *saved, weight, weight, mask,
    )  # fmt: skip


def group_norm(x: Tensor, affine: bool, training: bool, backward: bool) -> Call:
    weight = torch.ones(x.shape[1], dtype=x.dtype) if affine else None
    sizes = (x.shape[0], x.shape[1], x.numel() // x.shape[0] // x.shape[1])
    args = (x, weight, weight, *sizes, 2, 1e-5)
    if not backward:
        return aten.native_group_norm.default, args
    _, *saved = aten.native_group_norm(*args)
    mask = [True, affine, affine and training]
    return aten.native_group_norm_backward.default, (x, x, *saved, weight, *sizes, 2, mask)


@pytest.mark.parametrize("norm", [batch_norm, layer_norm, group_norm])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_normalizations(
    norm: Callable[..., Call], backward: bool, training: bool, affine: bool, last: bool
) -> None:
    known = 0
    for size in SIZES:
        for dtype in (torch.float32, torch.float64):
            x = in_format(torch.randn(size, dtype=dtype), last)
            func, args = norm(x, affine, training, backward)
            real, made = func(*args), quick.made_by(func, tuple(map(on_meta, args)), {})
            if made is not None:
                assert geometry(made) == geometry(real), (size, dtype)
                known += 1
    # A layer norm makes its results contiguous, which is left to torch.
    assert known == (4 if last and norm is layer_norm else 8)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("name", "size", "more"),
    [
        ("upsample_linear1d", (2, 3, 7), ([11], True)),
        ("upsample_bilinear2d", (2, 3, 5, 7), ([11, 4], False)),
        ("upsample_bilinear2d", (2, 3, 5, 7), ([10, 14], False, 2.0, 2.0)),
        ("upsample_bicubic2d", (2, 3, 5, 7), ([11, 4], False)),
        ("upsample_trilinear3d", (2, 3, 5, 7, 3), ([3, 11, 4], True)),
        ("grid_sampler_2d", (2, 3, 5, 7), (torch.zeros(2, 4, 6, 2), 0, 0, False)),
        ("grid_sampler_3d", (2, 3, 5, 7, 2), (torch.zeros(2, 4, 6, 3, 3), 0, 0, False)),
    ],
)
def test_interpolations(
    name: str, size: tuple[int, ...], more: tuple[Any, ...], last: bool
) -> None:
    func = getattr(aten, name).default
    args = (in_format(torch.randn(size), last), *more)
    made = quick.made_by(func, tuple(map(on_meta, args)), {})
    if made is not None:
        assert geometry(made) == geometry(func(*args))
    assert (made is None) == (last and name.startswith("grid"))


def test_what_is_unusual_is_left_to_torch() -> None:
    def batch_norm_of(x: Tensor, *, weight: torch.dtype = torch.float32) -> Any:
        scale = torch.ones(x.shape[1], dtype=weight, device="meta")
        args = (x, scale, scale, scale, scale, True, 0.1, 1e-5)
        return quick.made_by(aten.native_batch_norm.default, args, {})

    x = torch.empty(2, 4, 6, 8, device="meta")
    assert batch_norm_of(x) is not None
    assert batch_norm_of(x.transpose(2, 3)) is None
    assert batch_norm_of(x[..., ::2]) is None
    assert batch_norm_of(x[:0]) is None
    assert batch_norm_of(x.bfloat16()) is None
    assert batch_norm_of(x.bfloat16(), weight=torch.bfloat16) is None
    assert quick.made_by(aten.native_batch_norm.default, (x,), {}) is None  # no such call
    assert quick.made_by(aten.upsample_bilinear2d.default, (x,), {"output_size": [3, 3]}) is None
    assert quick.made_by(aten.relu.default, (x,), {}) is None


def test_no_decomposition_runs_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step, and a dry run, ask for these shapes once for every size there is."""
    ran: list[Any] = []
    shapes = quick.made_by

    def noting(func: Any, args: Any, kwargs: Any) -> Any:
        made = shapes(func, args, kwargs)
        ran.append((facts_of(func).name, made is not None))
        return made

    monkeypatch.setattr(quick, "made_by", noting)
    x = torch.randn(2, 4, 37, 41)  # of a size that no other test has
    func, args = batch_norm(x, True, True, False)
    assert results.made_by(func, args, {}) == x.nbytes + 2 * 4 * x.element_size()
    assert ran == [("aten::native_batch_norm", True)]

    ran.clear()
    call = operation.describe(facts_of(func), (x.requires_grad_(), *args[1:]), {}, "cpu")
    assert call is not None
    cost = operation.costs([call])[call]
    assert cost is not None
    assert cost.left == x.nbytes
    assert cost.given == (False,)
    assert ("aten::native_batch_norm", True) in ran
    assert ("aten::native_batch_norm_backward", True) in ran
