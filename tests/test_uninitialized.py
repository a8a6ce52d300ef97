"""Uninitialized memory that a program fills piece by piece, and reads in between (rule 5).

What was written can be replayed; what something unseen may have filled is kept.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from against_plain import WAYS, Way, check, gradients, leaf
from lowtide.tape import pieces as pieces_module
from lowtide.tape.pieces import Pieces
from lowtide.tape.values import Ref

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
pytestmark = [
    pytest.mark.filterwarnings("ignore::lowtide.DryRunWarning"),
]


# ---------------------------------------------------------------------- which parts were written


def _some_view(chance: random.Random, base: Tensor) -> Tensor:
    view = base
    for _ in range(chance.randint(0, 3)):
        kind = chance.choice(["index", "narrow", "transpose", "flatten", "split", "expand", "step"])
        dims = view.dim()
        if not dims:
            break
        d = chance.randrange(dims)
        if kind == "index":
            view = view.select(d, chance.randrange(view.shape[d]))
        elif kind == "narrow":
            start = chance.randrange(view.shape[d])
            view = view.narrow(d, start, chance.randint(1, view.shape[d] - start))
        elif kind == "transpose":
            view = view.transpose(d, chance.randrange(dims))
        elif kind == "flatten" and view.is_contiguous():
            view = view.flatten()
        elif kind == "split" and view.shape[d] % 2 == 0:
            view = view.unflatten(d, (view.shape[d] // 2, 2))
        elif kind == "expand":
            view = view.unsqueeze(d).expand(*view.shape[:d], 2, *view.shape[d:])
        elif kind == "step":
            start = chance.randrange(min(2, view.shape[d]))
            view = view[(slice(None),) * d + (slice(start, None, chance.choice([2, 3])),)]
    return view


@pytest.mark.parametrize("seed", range(60))
def test_what_counts_as_written_was_written(seed: int) -> None:
    chance = random.Random(seed)
    shape = [chance.choice([1, 2, 3, 4, 6]) for _ in range(chance.randint(1, 4))]
    base = torch.zeros(shape)
    if chance.random() < 0.4:
        order = chance.sample(range(len(shape)), len(shape))
        base = torch.zeros([shape[d] for d in order]).permute(*map(order.index, range(len(shape))))
    pieces = Pieces.of(base)
    assert pieces is not None
    assert pieces.untouched
    for _ in range(12):
        view = _some_view(chance, base)
        if pieces.cover(view):
            assert bool((view != 0).all())
        view = _some_view(chance, base)
        view.fill_(1)
        after = pieces.after(Ref(None, view))
        if after is None:
            assert bool((base != 0).all())
            return
        pieces = after


def test_slices_in_any_order_fill_the_whole() -> None:
    base = torch.empty(3, 4, 5)
    for d, order in ((0, [2, 0, 1]), (1, [3, 1, 2, 0]), (2, [0, 1, 2, 3, 4])):
        pieces = Pieces.of(base)
        for place in order:
            assert pieces is not None
            assert not pieces.cover(base)
            pieces = pieces.after(Ref(None, base.select(d, place)))
        assert pieces is None


def test_slices_in_any_order_are_not_compared_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether all is written is looked at once there is enough for that, not after each slice."""
    compared = []
    without = pieces_module._without
    monkeypatch.setattr(
        pieces_module, "_without", lambda *boxes: compared.append(boxes) or without(*boxes)
    )
    base = torch.empty(100, 4)
    pieces = Pieces.of(base)
    for row in (*range(0, 100, 2), *range(1, 100, 2)):
        assert pieces is not None
        pieces = pieces.after(Ref(None, base[row]))
    assert pieces is None
    assert len(compared) < 100


def test_steps_fill_the_whole() -> None:
    base = torch.empty(4, 6, 3)
    pieces = Pieces.of(base)
    for part in (base[:, 1::3], base[::2, ::3], base[:, 2::3], base[1::2, ::3]):
        assert pieces is not None
        assert not pieces.cover(part)
        pieces = pieces.after(Ref(None, part))
        assert pieces is None or pieces.cover(part)
    assert pieces is None


def test_a_part_that_begins_between_two_steps_counts_for_no_more_than_it_is() -> None:
    base = torch.empty(6)
    pieces = Pieces.of(base)
    for part in (base[3:], base[1::2]):
        assert pieces is not None
        pieces = pieces.after(Ref(None, part))
    assert pieces is not None
    assert pieces.cover(base[3:])
    assert not pieces.cover(base[2:3])


# ---------------------------------------------------------------------- the same bits


class _Unchecked(torch.autograd.Function):
    """Writes without moving the version, as torchdiffeq does."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, value: Tensor, index: Any) -> Tensor:
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return gradient, gradient[ctx.index], None


def _columns(x: Tensor, weight: Tensor) -> Tensor:
    scratch = torch.empty(*x.shape, 4)
    scratch = _Unchecked.apply(scratch, (x @ weight).tanh(), (..., 0))
    for place in range(1, 4):
        now = x + torch.sum(scratch[..., :place] * torch.linspace(0.1, 0.3, place), dim=-1)
        scratch = _Unchecked.apply(scratch, (now @ weight).tanh(), (..., place))
    return x + torch.sum(scratch * 0.1, dim=-1).sin()


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    out, now = torch.empty(4, *x.shape), x
    for place in range(4):
        now = (now @ weight).tanh()
        out[place] = now
        now = now + out[: place + 1].mean(0)
    return out.sin()


def _partly(x: Tensor, weight: Tensor) -> Tensor:
    """The last row is never written, and never read."""
    out = torch.empty(3, *x.shape)
    out[0] = (x @ weight).tanh()
    out[1] = (out[0].clone() @ weight).exp()
    out[1] *= 2
    return out[:2].sin().sum(0)


def _fill_unseen(row: Tensor) -> None:
    """By address, so that no recorder and no version counter sees it."""
    values = (ctypes.c_float * row.numel()).from_address(row.data_ptr())
    for place in range(row.numel()):
        values[place] = place * 0.01


def _unseen(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape)
    out[0] = (x @ weight).tanh()
    _fill_unseen(out[1])
    return (out * out.flip(0)).sum(0)


def _unseen_first(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape)
    _fill_unseen(out[1])
    out[0] = (x @ weight).tanh()
    return (out[0] * out[1]).sin() * out[0].cos()


def _onto_itself(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape)
    out[0] = (x @ weight).tanh()
    _fill_unseen(out[1])
    out.copy_(out)
    return (out * out.flip(0)).sum(0)


def _onto_itself_through_a_view(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape)
    out[0] = (x @ weight).tanh()
    _fill_unseen(out[1])
    out.copy_(out.view(out.shape))
    return (out * out.flip(0)).sum(0)


def _indexed(x: Tensor, weight: Tensor) -> Tensor:
    """Which rows are written depends on data."""
    out = torch.empty(4, *x.shape)
    out[torch.tensor([2, 0])] = (x @ weight).tanh().expand(2, *x.shape)
    out[1:2] = (x @ weight).cos()
    out[torch.tensor([3])] = (x @ weight).sin()
    return out.sin().sum(0)


class _Tiles(torch.autograd.Function):
    """A head that computes its logits tile by tile in one scratch buffer, as TRL's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scratch = torch.empty(len(x), 3 * weight.shape[1])
        total = torch.zeros(len(x))
        for columns in weight.split(weight.shape[1] // 2, dim=1):
            tile = scratch[:, : columns.shape[1]]
            torch.mm(x, columns, out=tile)
            total = total + tile.exp().sum(1)
        ctx.save_for_backward(x, weight, total)
        return total.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, total = ctx.saved_tensors
        share = (x @ weight).exp() / total[:, None] * gradient[:, None]
        return share @ weight.t(), x.t() @ share


def _tiles(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = _Tiles.apply(x @ weight, weight)  # type: ignore[no-untyped-call]
    return found * x.sum(1)


def _rotary(x: Tensor, weight: Tensor) -> Tensor:
    """As rotary embeddings interleave."""
    y, out = x @ weight, torch.empty_like(x)
    out[..., ::2] = y[..., ::2].cos() - y[..., 1::2].sin()
    out[..., 1::2] = y[..., ::2].sin() + y[..., 1::2].cos()
    return out.sin() * x


def _into_what_it_reads(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty(2, *x.shape)
        _fill_unseen(out[1])
        torch.add(out[1], x @ weight, out=out[0])
        torch.mul(out[0], 2.0, out=out[0])
        kept = out.clone()
    return (x * kept.sum(0)).sin()


def _low_rank(x: Tensor, weight: Tensor) -> Tensor:
    """Factors found one by one without grad, in zeros, as Broyden's method has them."""
    with torch.no_grad():
        left, right = torch.zeros(len(x), 8, 4), torch.zeros(len(x), 4, 8)
        now = x @ weight
        for place in range(4):
            left[:, :, place] = now.sin()
            right[:, place] = now.cos()
            step = torch.einsum(
                "bij,bjk,bk->bi", left[..., : place + 1], right[:, : place + 1], now
            )
            now = now - 0.1 * step
        rest = left @ right
    return (x * now * rest.sum(1)).sin()


def _unseen_zeros(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.zeros(3, *x.shape)
        out[0] = x @ weight
        _fill_unseen(out[1])
        total = out.sum(0)
    return (x * total * out[2].add(1)).sin() * out[:2].mean()


PROGRAMS = [
    _rotary,
    _low_rank,
    _unseen_zeros,
    _tiles,
    _into_what_it_reads,
    _columns,
    _rows,
    _partly,
    _unseen,
    _unseen_first,
    _onto_itself,
    _onto_itself_through_a_view,
    _indexed,
]


@every_way
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__.strip("_"))
def test_the_same_bits(way: Way, program: Callable[[Tensor, Tensor], Tensor]) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, weight = leaf(6, 8), leaf(8, 8)
        out = way(program, x, weight)
        return [out, *gradients(out.square().sum(), x, weight)]

    check(scenario, way)


@every_way
@pytest.mark.parametrize("program", [_columns, _rotary])
def test_a_piece_is_replayed_and_nothing_is_copied(
    way: Way, program: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, weight = leaf(6, 8), leaf(8, 8)
        out = way(program, x, weight)
        return [out, *gradients(out.square().sum(), x, weight)]

    assert check(scenario, way)["copy_"] > 0


# ---------------------------------------------------------------------- memory


class _Solver(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor], steps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.how, self.steps = how, steps
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = self.how(x, self.weight)
        return x.square().mean()


def _peak(model: nn.Module, x: Tensor, budget: lowtide.Budget | None) -> int:
    model.zero_grad()

    def run() -> None:
        if budget is None:
            loss = model(x)
        else:
            with budget:
                loss = model(x)
        loss.backward()

    return lowtide.measure(run, device="cpu").peak_bytes


@pytest.mark.parametrize("kind", ["plan", "bytes", "fraction"])
def test_a_solver_keeps_its_limit(kind: str) -> None:
    """Its buffer was copied before each piece, as no plan knew: steps took twice the limit."""
    torch.manual_seed(0)
    model, x = _Solver(_columns, 3), torch.randn(64, 64)
    plain = _peak(model, x, None)
    limit = int(0.7 * plain)
    if kind == "plan":
        plan = lowtide.plan(model, x, limit=limit)
        assert abs(plan.plain_peak - plain) <= 0.002 * plain
        budget = lowtide.budget(plan)
    else:
        budget = lowtide.budget(limit if kind == "bytes" else 0.7)
    for _ in range(4):
        assert _peak(model, x, budget) <= 1.002 * limit
    report = budget.report()
    assert report.planned
    assert report.plain_peak is not None
    assert abs(report.plain_peak - plain) <= 0.002 * plain


def assert_no_more_than_plain(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A budget with room for everything takes what the plain step takes."""
    torch.manual_seed(0)
    model, x = _Solver(function, 2), torch.randn(64, 64)
    plain = _peak(model, x, None)
    budget = lowtide.budget("1 GiB")
    for _ in range(3):
        assert _peak(model, x, budget) <= 1.002 * plain


def test_tiles_of_a_scratch_buffer_are_not_copied() -> None:
    """Each tile was, as the result before it is saved: TRL's head took 1.8 times the plain peak."""
    assert_no_more_than_plain(_scaled_tiles)


def test_zeros_without_grad_are_not_copied() -> None:
    def factors(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            kept, now = torch.zeros(12, *x.shape), x
            for place in range(12):
                now = (now @ weight).tanh()
                kept[place] = now
                now = now + 0.1 * kept[: place + 1].mean(0)
        return (x @ weight * now).sin()

    assert_no_more_than_plain(factors)


def test_a_one_hot_made_with_grad_enabled_is_not_kept() -> None:
    """What users are told to write, see rule 5: under `no_grad` its zeros cannot be made again."""

    def codes(x: Tensor, weight: Tensor) -> Tensor:
        hot = F.one_hot((x @ weight).argmax(1), 256).float()
        with torch.no_grad():
            used = hot.sum(0)[:64]
        return (x @ weight * used).sin()

    assert_no_more_than_plain(codes)


def _scaled_tiles(x: Tensor, weight: Tensor) -> Tensor:
    return x * _tiles(x, weight)[:, None].tanh()


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_old_content_is_not_in_memory_because_the_program_has_the_storage(share: float) -> None:
    """A plan took what a buffer had contained for something that it may use: steps of torchdiffeq
    that followed it could not record the next piece, left the plan, and went past their limit."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = []
            for _ in range(4):
                x = (x @ self.weight).tanh()
                self.kept.append(x)
                y = x
                for _ in range(4):
                    y = (y @ self.weight).exp() * 0.1
                x = x + y
            for tensor in self.kept:
                tensor.data.mul_(0.5)
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Keeping(), torch.randn(64, 64)
    budget = lowtide.budget(share)
    for _ in range(3):
        _peak(model, x, budget)
        assert budget.report().limit is not None  # what was measured is planned by now
        for known in budget._loop._plans:
            written = [node for node in known.graph.values if node.overwritten]
            assert len(written) == 4
            assert not any(node.pinned for node in written)
