"""Rule 5: what the forward of a custom Function that runs again is given, and what it may do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

import lowtide
from against_plain import bits, counted, unseen

_calls: Counter[str] = Counter()


@lowtide.replayable
class Asks(Function):
    """Saves what only a backward needs if there will be one, as attention kernels do, and has a
    gradient of a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: list[Tensor]) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            made = inner.sin() * others[0]
            (slope,) = torch.autograd.grad(made.sum(), inner)
        if x.requires_grad and not others[0].requires_grad:
            ctx.save_for_backward(slope.clone())
        out = torch.empty_like(x)
        unseen(out, made.detach())
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return given * slope, None


def alike_and_again(forward: Callable[[Tensor], Tensor], name: str) -> int:
    """Fail unless a region around this has the bits of the plain step; how often `name` was run
    again."""
    torch.manual_seed(3)
    x = torch.randn(64, 8, requires_grad=True)
    state = torch.get_rng_state()
    (wanted,) = torch.autograd.grad(forward(x).sum(), x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    with counted() as seen:
        (found,) = torch.autograd.grad(lowtide.checkpoint(forward, x).sum(), x)
    assert bits(found) == bits(wanted)
    assert torch.equal(torch.get_rng_state(), after)
    return seen.names()[f"function::{name}"]


def test_a_replay_sees_which_tensors_require_a_gradient_and_may_differentiate() -> None:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = Asks.apply(x * 2, [torch.rand(8)]).exp().sin()  # type: ignore[no-untyped-call]
        return out

    assert alike_and_again(forward, "Asks")


def test_a_gradient_that_a_forward_takes_inside_is_no_backward_of_the_step() -> None:
    x, limit = torch.randn(64, 8, requires_grad=True), lowtide.budget(0.8)

    def forward() -> Tensor:
        out = x
        for _ in range(4):
            out = Asks.apply(out.tanh(), [torch.ones(8)]).sin()  # type: ignore[no-untyped-call]
        return out.sum()

    (wanted,) = torch.autograd.grad(forward(), x)
    for _ in range(3):
        with limit:
            loss = forward()
        assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)


def test_a_list_in_a_budget_may_hold_more_than_tensors() -> None:
    x, limit = torch.randn(64, 8, requires_grad=True), lowtide.budget("1 MB")

    def forward() -> Tensor:
        out: Tensor = Asks.apply(x * 2, [torch.ones(8), 2, None])  # type: ignore[no-untyped-call]
        return out.sum()

    (wanted,) = torch.autograd.grad(forward(), x)
    for _ in range(2):
        with limit:
            loss = forward()
        assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)


@lowtide.replayable
class Scaled(Function):
    """By what is in its last argument, whatever that is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Any) -> Tensor:
        by = getattr(ctx, "by", 1.0) * _scale_in(scale)
        slope, out = torch.empty_like(x), torch.empty_like(x)
        unseen(slope, x.cos() * by)
        unseen(out, x.sin() * by)
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return given * ctx.saved_tensors[0], None


class Holder:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def _scale_in(scale: Any) -> Any:
    while not isinstance(scale, Tensor | float):
        if isinstance(scale, Holder):
            scale = scale.inside
        elif callable(scale):
            scale = scale()
        else:
            scale = scale["of"] if isinstance(scale, dict) else scale[0]
    return scale


_WRAPPED: dict[str, tuple[Callable[[Any], Any], bool]] = {  # and whether such a call is recorded
    "list": (lambda inside: [inside], True),
    "dict": (lambda inside: {"of": [inside]}, True),
    "lists": (lambda inside: [[inside]], True),
    "object": (Holder, False),
    "closure": (lambda inside: lambda: inside[0], False),
}


@pytest.mark.parametrize("kind", _WRAPPED)
@pytest.mark.parametrize("of_tensors", [False, True])
def test_arguments_that_change_after_the_call(kind: str, of_tensors: bool) -> None:
    wrap, recorded = _WRAPPED[kind]

    def forward(x: Tensor) -> Tensor:
        inside: Any = torch.rand(8) if of_tensors else 2.0
        cell = [inside]
        wrapped = wrap(cell if kind == "closure" else inside)
        out: Tensor = Scaled.apply(x * 2, wrapped).exp().sin()  # type: ignore[no-untyped-call]
        cell[0] = 3.0
        if isinstance(wrapped, list | dict):
            inner = wrapped["of"] if isinstance(wrapped, dict) else wrapped
            (inner[0] if kind == "lists" else inner)[0] = 3.0
        elif isinstance(wrapped, Holder):
            wrapped.inside = 3.0
        if of_tensors:
            inside.zero_()
        return out

    again = alike_and_again(forward, "Scaled")
    assert bool(again) == (recorded and (kind == "list" or not of_tensors))


class Doubled(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Any) -> Tensor:
        ctx.by = 2.0
        return Scaled.forward(ctx, x, scale=scale)


def test_what_a_subclass_told_the_context_before_is_not_forgotten() -> None:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = Doubled.apply(x * 2, 1.5).exp().sin()  # type: ignore[no-untyped-call]
        return out

    assert not alike_and_again(forward, "Scaled")


@lowtide.replayable
class Seeded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        mask = (torch.rand(x.shape, generator=generator) + torch.rand(x.shape)) > 1
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return given * ctx.saved_tensors[0], None


@lowtide.replayable
class Placed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        by = 3.0 if torch.empty(0).device.type == "meta" else 2.0
        ctx.save_for_backward(x.cos() * by)
        return x.sin() * by

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        slope: Tensor = ctx.saved_tensors[0]
        return given * slope


def test_it_may_draw_from_two_generators_and_has_the_default_device() -> None:
    def forward(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        x = Seeded.apply(x * 2, generator).sin()  # type: ignore[no-untyped-call]
        with torch.device("meta"):
            x = Placed.apply(x).exp().sin()  # type: ignore[no-untyped-call]
        return x * torch.rand(8, generator=generator)

    assert alike_and_again(forward, "Seeded")
    assert alike_and_again(forward, "Placed")


class _Writes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        out = x.sin()
        if how == "seen":
            x.neg_()
        else:
            unseen(x, x.neg())
        ctx.save_for_backward(x.detach())
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return given * ctx.saved_tensors[0], None


@lowtide.replayable
class Beside(Function):
    """Writes to the memory in which its argument lies, but not to the argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor) -> Tensor:
        whole = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
        unseen(whole[:3], torch.rand(3).to(torch.uint8) + whole[:3] + 1)
        ctx.save_for_backward(x.cos() * part)
        return x.sin() * part

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return given * ctx.saved_tensors[0], None


def test_what_lies_beside_an_argument_may_change() -> None:
    buffer = torch.rand(3 + 16 + 1).half()

    def forward(x: Tensor) -> Tensor:
        out: Tensor = Beside.apply(x * 2, buffer[3:11]).exp().sin()  # type: ignore[no-untyped-call]
        return out

    assert alike_and_again(forward, "Beside")


@pytest.mark.parametrize("how", ["seen", "unseen"])
def test_a_forward_that_writes_to_its_arguments_without_a_word(how: str) -> None:
    lowtide.replayable(_Writes)
    x = torch.randn(64, 8, requires_grad=True)
    with pytest.raises(lowtide.UnsupportedError, match=r"forward of _Writes writes to its arg"):
        lowtide.checkpoint(lambda x: _Writes.apply(x * 2, how), x)  # type: ignore[no-untyped-call]


@lowtide.replayable
class Counts(Function):
    """Is another function each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _calls["Counts"] += 1
        ctx.save_for_backward(x.new_ones(_calls["Counts"]))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        return given * len(ctx.saved_tensors[0])


def test_a_replay_that_makes_something_else_says_so() -> None:
    x = torch.randn(8, requires_grad=True)
    loss = lowtide.checkpoint(lambda x: Counts.apply(x.sin()).sum(), x)  # type: ignore[no-untyped-call]
    with pytest.raises(lowtide.ReplayError, match="forward of Counts made something else"):
        loss.backward()


@lowtide.replayable
class Spectrum(Function):
    """Saves a lazily conjugated tensor, and makes one of a subclass inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.fft.fft(x)
        parts = torch.nested.nested_tensor([out.real[0], out.real[1, :3]], layout=torch.jagged)
        ctx.save_for_backward(out.conj(), out, parts.values().sum())
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        conjugated, out, total = ctx.saved_tensors
        return (given * conjugated * out * total).imag


def test_lazily_conjugated_tensors_and_subclasses_inside() -> None:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = Spectrum.apply(x * 2).abs().log1p()  # type: ignore[no-untyped-call]
        return out

    assert alike_and_again(forward, "Spectrum")


class Thrice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is Tensor.cos else result


def test_a_mode_of_the_programs_that_changes_what_functions_do() -> None:
    def forward(x: Tensor) -> Tensor:
        with Thrice():
            out: Tensor = Scaled.apply(x * 2, 1.0)  # type: ignore[no-untyped-call]
        return out.exp().sin()

    assert not alike_and_again(forward, "Scaled")


def test_a_kernel_that_asks_where_a_fake_tensor_lies_is_told_that_it_lies_nowhere() -> None:
    x = torch.randn(64, 8, requires_grad=True)

    def step() -> Tensor:
        out = x
        for _ in range(4):
            out = Scaled.apply(out * 2, 1.0).exp()  # type: ignore[no-untyped-call]
        return out.sum()

    with pytest.warns(lowtide.DryRunWarning, match="one real forward"):
        assert lowtide.plan(step, limit=0.9).source == "recorded"
