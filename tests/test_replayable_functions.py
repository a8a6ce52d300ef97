"""Rule 5: the forward of a custom Function runs again where the program allows it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from against_plain import WAYS, Way, bits, counted, held, unseen

_calls: Counter[str] = Counter()


def _norm() -> type[Function]:
    class Norm(Function):
        """Saves something that it does not return."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            _calls["Norm"] += 1
            out, scale = torch.empty_like(x), x.new_empty(len(x), 1)
            unseen(scale, (x.square().mean(-1, keepdim=True) + eps).rsqrt())
            unseen(out, x * scale * weight)
            ctx.save_for_backward(x, weight, scale)
            return out

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
            x, weight, scale = ctx.saved_tensors
            given, of_weight = given * weight, given * x * scale
            inner = (given * x).mean(-1, keepdim=True)
            return given * scale - x * scale**3 * inner, of_weight.sum(0), None

    return Norm


Kept, Norm = _norm(), _norm()
assert lowtide.replayable(Norm) is Norm
assert lowtide.replayable(Norm) is Norm


@lowtide.replayable
class Split(Function):
    """Two results and one that is no tensor, in the newer form without a context."""

    @staticmethod
    def forward(x: Tensor, where: int | None) -> tuple[Tensor, Tensor, str]:
        _calls["Split"] += 1
        left, right = torch.empty_like(x[:, :where]), torch.empty_like(x[:, where:])
        unseen(left, x[:, :where].sin())
        unseen(right, x[:, where:].cos())
        return left, right, "halves"

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output[:2])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        left, right = ctx.saved_tensors
        slopes = [(1 - left**2).clamp(min=0).sqrt(), -((1 - right**2).clamp(min=0).sqrt())]
        return torch.cat([g * s for g, s in zip(given[:2], slopes, strict=True)], 1), None


@lowtide.replayable
class Inside(Function):
    """Draws, casts under autocast, looks at its context, and calls another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _calls["Inside"] += 1
        mask = torch.rand_like(x) > 0.2
        x = Norm.apply(x * mask, torch.ones_like(x[0]), 1e-5)  # type: ignore[no-untyped-call]
        out: Tensor = F.linear(x, weight).float()
        assert ctx.needs_input_grad[1]
        ctx.save_for_backward(mask, weight, x, out if ctx.needs_input_grad[0] else None)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mask, weight, x, out = ctx.saved_tensors
        given = given * out.cos()
        return given @ weight * mask, given.mT @ x


class Block(nn.Module):
    def __init__(self, kind: type[Function] | None) -> None:
        super().__init__()
        self.kind = kind
        self.weight, self.dense = nn.Parameter(torch.ones(32)), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is Split:
            left, right, name = Split.apply(x.tanh(), 12)  # type: ignore[no-untyped-call]
            assert name == "halves"
            return x + self.dense(torch.cat([right, left], 1)).tanh()
        if self.kind is Inside:
            out: Tensor = Inside.apply(x.tanh(), self.dense.weight)  # type: ignore[no-untyped-call]
            return x + out * self.weight + self.dense.bias
        assert self.kind is not None
        normed = self.kind.apply(x.tanh(), self.weight, 1e-5)  # type: ignore[no-untyped-call]
        return x + self.dense(normed).tanh()


def blocks(kind: type[Function]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for _ in range(4)))


def one_by_one(way: Callable[..., Any], model: nn.Sequential, x: Tensor) -> Tensor:
    for block in model:
        x = way(block, x)
    return x


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(256, 32, requires_grad=True)
    loss = run(x).square().mean()
    loss.backward()
    found = [bits(p.grad) for p in (x, *model.parameters())]
    return [bits(loss.detach()), *found, bits(torch.get_rng_state())]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [Norm, Split, Inside], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("casting", [False, True])
def test_its_forward_runs_again_with_the_same_bits(
    way: Way, kind: type[Function], casting: bool
) -> None:
    model, name = blocks(kind), kind.__name__
    with torch.autocast("cpu", torch.bfloat16, enabled=casting):
        wanted, before = gradients(model, model), _calls[name]
        with counted() as seen:
            found = gradients(model, functools.partial(one_by_one, functools.partial(way), model))
    assert found == wanted
    again = seen.names()[f"function::{name}"]
    assert again
    assert _calls[name] == before + 4 + again
    if kind is Inside:  # what it calls is no operation of the record
        assert not seen.names()["function::Norm"]


def test_blocks_take_no_more_than_under_torchs_checkpoint() -> None:
    torchs = functools.partial(torch_checkpoint, use_reentrant=False)

    def peak(kind: type[Function], way: Callable[..., Any]) -> int:
        model, x = blocks(kind), torch.randn(256, 32)
        step = functools.partial(one_by_one, way, model, x)
        return lowtide.measure(lambda: step().square().mean().backward(), device="cpu").peak_bytes

    assert peak(Norm, lowtide.checkpoint) <= peak(Norm, torchs)
    assert peak(Kept, lowtide.checkpoint) > peak(Norm, torchs) + 2 * 256 * 32 * 4


def test_a_budget_is_held_once_they_were_measured() -> None:
    """Before that, nothing tells what their backward takes."""
    model, x = blocks(Norm), torch.randn(256, 32)
    plain = lowtide.measure(lambda: model(x).square().mean().backward(), device="cpu").peak_bytes
    wanted, limit = gradients(model, model), lowtide.budget(int(0.75 * plain))

    def run(x: Tensor) -> Tensor:
        with limit:
            out: Tensor = model(x)
            return out

    for number in range(4):
        assert gradients(model, run) == wanted
        held(limit, planned=number > 0)


@lowtide.replayable
class Same(Function):
    """Returns what it was given, and a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view(-1)[:8]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:  # type: ignore[override]
        return given[0] * 2 + given[1].sum()


def test_what_it_returns_of_its_arguments_is_no_memory_of_its_own() -> None:
    def forward(x: Tensor) -> Tensor:
        whole, part = Same.apply(x.sin())  # type: ignore[no-untyped-call]
        return whole.cos().sum() + part.exp().sum()

    x = torch.randn(16, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(forward(x), x)
    (found,) = torch.autograd.grad(lowtide.checkpoint(forward, x), x)
    assert torch.equal(found, wanted)


@lowtide.replayable
class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        return given * 2


@lowtide.replayable
class Raises(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.numel() > 4:
            raise ValueError("too many")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        return given


def test_what_it_raises() -> None:
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(lowtide.UnsupportedError, match=r"forward of Dirty writes to its arguments"):
        lowtide.checkpoint(lambda x: Dirty.apply(x.sin()), x)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="too many"):
        lowtide.checkpoint(lambda x: Raises.apply(x.sin()), x)  # type: ignore[no-untyped-call]
    lowtide.checkpoint(lambda x: Raises.apply(x[:4].sin()), x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None


class Plain(Function):
    """Of torch's operators alone, so that a dry run can follow it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sigmoid() * x

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return given * s * (1 + x * (1 - s))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo
def test_compiled_code_sees_what_it_saw() -> None:
    lowtide.replayable(Plain)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = Plain.apply(x.sin()).sum()  # type: ignore[no-untyped-call]
        return out

    x = torch.randn(8, requires_grad=True)
    (wanted,) = torch.autograd.grad(forward(x), x)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], wanted)


def test_a_plan_has_it_as_one_operation() -> None:
    lowtide.replayable(Plain)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    x = torch.randn(512, 64)

    def step() -> Tensor:
        out = x
        for layer in layers:
            out = Plain.apply(layer(out)).sin()  # type: ignore[no-untyped-call]
        return out.square().mean()

    found = lowtide.plan(step, limit=0.6)
    assert found.source == "fake"
    assert [op.name for op in found.operations].count("function::Plain") == 6
    assert "recompute" in {op.choice for op in found.operations if op.name == "function::Plain"}
    with lowtide.budget(found) as limit:
        loss = step()
    loss.backward()
    assert limit.report().left_plan_at is None


@lowtide.replayable
class Pair(Function):
    """Takes tensors in a list, or in a tuple, in which nobody would see that one has changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: Any) -> Tensor:
        _calls["Pair"] += 1
        out = torch.empty_like(x)
        unseen(out, x.sin() * others[0] + others[1])
        ctx.save_for_backward(x, *others)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, scale, _ = ctx.saved_tensors
        return given * x.cos() * scale, None


@pytest.mark.parametrize(("kind", "again"), [(list, 1), (tuple, 0)])
def test_tensors_in_lists_are_known_and_in_tuples_the_call_is_as_it_was(
    kind: type, again: int
) -> None:
    x, others = torch.randn(64, requires_grad=True), (torch.randn(64), torch.randn(64))

    def forward(x: Tensor) -> Tensor:
        made = [other * 2 for other in others]
        out: Tensor = Pair.apply(x * 2, kind(made)).exp().sin()  # type: ignore[no-untyped-call]
        return out

    (wanted,) = torch.autograd.grad(forward(x).sum(), x)
    with counted() as seen:
        (found,) = torch.autograd.grad(lowtide.checkpoint(forward, x).sum(), x)
    assert torch.equal(found, wanted)
    assert seen.names()["function::Pair"] == again


def test_it_is_named_in_tables_and_by_policies() -> None:
    model, x = blocks(Norm), torch.randn(64, 32)
    with counted() as seen:
        way = functools.partial(
            lowtide.checkpoint, policy=lowtide.policies.KeepOperators("function::Norm")
        )
        one_by_one(way, model, x).sum().backward()
    assert seen.operations
    assert not seen.names()["function::Norm"]
    lowtide.replayable(Plain)
    layer = nn.Linear(32, 32)
    found = lowtide.saved_tensors(lambda: Plain.apply(layer(x)).sin().sum())  # type: ignore[no-untyped-call]
    assert "function::Plain" in str(found.by("operator"))
