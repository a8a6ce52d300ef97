"""`Counting` on tensors without memory, against what the same calls allocate on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import lowtide
from lowtide import _compat
from lowtide.kernels.workspace import kernel_workspace
from lowtide.memory.counting import Counting
from once import on_one_recorder

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _apart(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Neither rows nor columns of its matrices are contiguous."""
    *batch, rows, columns = shape
    return torch.ones(*batch, 2 * rows, 2 * columns, dtype=dtype)[..., ::2, ::2]


def in_place() -> Iterator[Call]:
    x, half = torch.randn(64, 512), torch.randn(64, 512).bfloat16()
    index = torch.zeros(64, 512, dtype=torch.int64)
    yield aten.mul_.Tensor, (x, x > 0), {}
    yield aten.mul_.Tensor, (half, x), {}  # the result is converted back
    yield aten.add_.Tensor, (x, x), {}
    yield aten.addmm_.default, (torch.ones(64, 32), _apart(64, 16), torch.ones(16, 32)), {}
    yield aten.baddbmm_.default, (torch.ones(4, 64, 32), _apart(4, 64, 16), _apart(4, 16, 32)), {}
    yield aten.scatter_reduce_.two, (x, 0, index, x.clone(), "mean"), {}


def into_a_result() -> Iterator[Call]:
    x, square = torch.randn(64, 64), torch.empty(64, 64)
    yield aten.mul.out, (x, x > 0), {"out": square}
    yield aten.mm.out, (x, x.clone()), {"out": square}
    yield aten.mm.out, (_apart(64, 64), x), {"out": square}
    yield aten.bmm.out, (_apart(4, 64, 16), torch.ones(4, 16, 8)), {"out": torch.empty(4, 64, 8)}
    yield aten.sum.IntList_out, (x > 0, [1]), {"out": torch.empty(64, dtype=torch.int64)}


def batched_products() -> Iterator[Call]:
    ones, one = torch.ones(6, 32, 40), torch.ones(())
    for left in (
        torch.randn(6, 48, 32),
        torch.randn(48, 32).expand(6, 48, 32),  # one matrix for the whole batch is read as it is
        torch.randn(6, 32, 48).mT,
        torch.randn(6, 1, 32).expand(6, 48, 32),
        torch.randn(6, 48, 1).expand(6, 48, 32),
        one.expand(6, 48, 32),  # the gradient of a sum
        _apart(6, 48, 32),
    ):
        yield aten.bmm.default, (left, ones), {}
    yield aten.bmm.default, (_apart(6, 48, 32), _apart(6, 32, 40)), {}
    yield aten.baddbmm.default, (torch.ones(40), _apart(6, 48, 32), one.expand(6, 32, 40)), {}
    yield aten.bmm.default, (_apart(4, 8, 7), torch.ones(4, 7, 7)), {}  # too small for a copy
    yield aten.bmm.default, (_apart(4, 9, 7), torch.ones(4, 7, 7)), {}


CALLS = [*in_place(), *into_a_result(), *batched_products()]


@pytest.mark.parametrize("call", [pytest.param(c, id=f"{n}-{c[0]}") for n, c in enumerate(CALLS)])
def test_a_call_takes_what_is_counted(call: Call) -> None:
    function, args, kwargs = call
    function(*args, **kwargs)
    peak = lowtide.measure(lambda: function(*args, **kwargs), device="cpu").peak_bytes

    def hollow(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, hollow, (args, kwargs))
    with Counting("cpu") as counting:
        function(*args, **kwargs)
    assert counting.peak == pytest.approx(peak, abs=256)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_product_of_halves_is_not_counted_too_low(batched: bool, copied: bool) -> None:
    """oneDNN takes a whole batch at once, and packs what it multiplies or sums in float32."""
    batch = (4,) if batched else ()
    left, right = (*batch, 96, 64), (*batch, 64, 80)
    made = _apart(*left, dtype=torch.bfloat16) if copied else torch.ones(left).bfloat16()
    args = made, torch.ones(right, dtype=torch.bfloat16)
    function = aten.bmm.default if batched else aten.mm.default
    function(*args)
    peak = lowtide.measure(lambda: function(*args), device="cpu").peak_bytes
    hollow = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in args]
    with Counting("cpu") as counting:
        function(*hollow)
    assert counting.peak + (4 << 10) >= peak
    assert counting.peak <= peak + sum(t.nbytes for t in args) + (32 << 10)


@pytest.mark.skipif(
    not _compat.onednn_takes(torch.bfloat16), reason="oneDNN takes no bfloat16 here"
)
def test_a_batch_of_halves_that_is_one_matrix_expanded_is_copied() -> None:
    one, other = torch.ones(64, 48).bfloat16(), torch.ones(48, 80).bfloat16()
    args = one.expand(6, 64, 48), other.expand(6, 48, 80)
    copies = 6 * (one.nbytes + other.nbytes)
    aten.bmm.default(*args)
    peak = lowtide.measure(lambda: aten.bmm.default(*args), device="cpu").peak_bytes
    made = 6 * 64 * 80 * 2
    counted = made + kernel_workspace("aten::bmm", list(args), args, made)
    assert made + copies <= peak <= counted + (4 << 10)
    assert kernel_workspace("aten::bmm", list(args), args, made, "cuda") < copies  # oneDNN's alone
