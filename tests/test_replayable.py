"""Rule 5: what custom operators make is dropped and recomputed where the program allows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from against_plain import WAYS, Way, bits, check, counted, held, leaf
from against_plain import gradients as gradients_of
from lowtide.tape import operators

_LIBRARY = "lowtide_tests_replayable"
_calls: Counter[str] = Counter()


def _swiglu(name: str) -> Any:
    """A gated activation, with a backward that reads its inputs."""

    @torch.library.custom_op(f"{_LIBRARY}::{name}", mutates_args=())
    def run(gate: Tensor, up: Tensor) -> Tensor:
        _calls[name] += 1
        return torch.sigmoid(gate) * gate * up

    @run.register_fake
    def _(gate: Tensor, up: Tensor) -> Tensor:
        return torch.empty_like(up)

    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return given * up * s * (1 + gate * (1 - s)), given * gate * s

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    run.register_autograd(backward, setup_context=save)
    return run


declared, kept, late = _swiglu("declared"), _swiglu("kept"), _swiglu("late")
assert lowtide.replayable(declared) is declared


@lowtide.replayable
@torch.library.custom_op(f"{_LIBRARY}::dropped", mutates_args=())
def dropped(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.3)  # draws, and does not say so


dropped.register_autograd(
    lambda ctx, given: given * (ctx.saved_tensors[0] != 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@lowtide.replayable
@torch.library.custom_op(f"{_LIBRARY}::add_to", mutates_args={"total"})
def add_to(total: Tensor, x: Tensor) -> None:
    total.add_(x)


@lowtide.replayable
@torch.library.custom_op(f"{_LIBRARY}::as_switched", mutates_args=())
def as_switched(x: Tensor) -> Tensor:
    return x.sin() if torch.are_deterministic_algorithms_enabled() else x.cos()


@lowtide.replayable
@torch.library.custom_op(f"{_LIBRARY}::spacious", mutates_args=())
def spacious(x: Tensor) -> Tensor:
    inside = [x * number for number in range(5)]
    return inside[0].copy_(inside[4])


@spacious.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


spacious.register_autograd(lambda ctx, given: given * 4)


class Block(nn.Module):
    def __init__(self, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.both, self.down = nn.Linear(16, 128), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        out: Tensor = x + self.down(self.act(gate, up))
        return out


def blocks(act: Callable[[Tensor, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(act) for _ in range(4)))


def peak(act: Callable[[Tensor, Tensor], Tensor], way: Callable[..., Any]) -> int:
    model, x = blocks(act), torch.randn(256, 16)

    def run() -> None:
        out = x
        for block in model:
            out = way(block, out)
        out.square().mean().backward()

    return lowtide.measure(run, device="cpu").peak_bytes


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = run(x).square().mean()
    loss.backward()
    found = [bits(p.grad) for p in model.parameters()]
    return [bits(loss.detach()), *found, bits(torch.get_rng_state())]


def test_blocks_with_a_declared_operator_take_no_more_than_under_torchs_checkpoint() -> None:
    torchs = peak(declared, lambda block, x: torch_checkpoint(block, x, use_reentrant=False))
    assert peak(declared, lowtide.checkpoint) <= torchs
    assert peak(kept, lowtide.checkpoint) > torchs + 2 * 256 * 64 * 4


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("name", "act"), [("declared", declared), ("kept", kept)])
def test_a_declared_operator_is_replayed_with_the_same_bits(name: str, act: Any, way: Way) -> None:
    model, x = blocks(act), torch.randn(256, 16)
    wanted, before = gradients(model, model, x), _calls[name]
    with counted() as seen:
        assert gradients(model, lambda x: way(model, x), x) == wanted
    again = seen.names()[f"{_LIBRARY}::{name}"]
    assert (again > 0) == (name == "declared")
    assert _calls[name] == before + 4 + again


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_may_draw_without_saying_so(way: Way) -> None:
    model, x = blocks(lambda gate, up: dropped(gate * up).cos()), torch.randn(256, 16)
    wanted = gradients(model, model, x)
    with counted() as seen:
        assert gradients(model, lambda x: way(model, x), x) == wanted
    assert seen.names()[f"{_LIBRARY}::dropped"]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_it_writes_to_is_kept(way: Way) -> None:
    """torch moves the version of what a custom operator writes before it runs, as if something
    unseen had."""

    def forward(x: Tensor) -> Tensor:
        total = x.detach() * 2
        add_to(total, x.detach())
        add_to(total, x.detach().sin())
        return (x * total).cos().sin()

    start, found = torch.randn(64, requires_grad=True), []
    for one in (forward, lambda x: way(forward, x)):
        with counted() as seen:
            found.append(bits(torch.autograd.grad(one(start).sum(), start)[0]))
    assert found[0] == found[1]
    assert seen["cos"] == 1
    assert not seen.names()[f"{_LIBRARY}::add_to"]


def test_a_budget_is_held_once_such_operators_were_measured() -> None:
    model, x = blocks(declared), torch.randn(256, 16)
    wanted = gradients(model, model, x)
    model.zero_grad()
    plain = lowtide.measure(lambda: model(x).square().mean().backward(), device="cpu").peak_bytes
    limit = lowtide.budget(int(0.7 * plain))

    def run(x: Tensor) -> Tensor:
        with limit:
            out: Tensor = model(x)
            return out

    for number in range(4):
        model.zero_grad()
        assert gradients(model, run, x) == wanted
        held(limit, planned=number > 0)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_switches_are_as_they_were_when_it_is_replayed(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8, 8)
        loss = way(lambda x: (x * as_switched(x.detach().exp())).sin().sum(), x)
        torch.use_deterministic_algorithms(True)
        try:
            return gradients_of(loss, x)
        finally:
            torch.use_deterministic_algorithms(False)

    assert check(scenario, way).names()[f"{_LIBRARY}::as_switched"]


def test_what_it_takes_inside_has_room_in_the_first_step_already() -> None:
    """Nothing tells that it takes five times its input."""
    x = torch.randn(64, 256, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x.sin().cos()
        return spacious(x).sum()

    with lowtide.budget(15 * 64 * 256 * 4) as limit:
        loss = forward(x)
    loss.backward()
    report = limit.report()
    assert report.highest_peak is not None
    assert report.highest_peak <= report.limit  # type: ignore[operator]


def test_a_plan_says_that_it_is_recomputed() -> None:
    model, x = blocks(declared), torch.randn(256, 16)
    found = lowtide.plan(lambda: model(x).square().mean(), limit=0.5)
    choices = {op.choice for op in found.operations if op.name == f"{_LIBRARY}::declared"}
    assert "recompute" in choices


def test_it_may_be_declared_after_its_first_call() -> None:
    model, x = blocks(late), torch.randn(256, 16)
    wanted = gradients(model, model, x)
    for expected in (False, True):
        with counted() as seen:
            assert gradients(model, lambda x: lowtide.checkpoint(model, x), x) == wanted
        assert bool(seen.names()[f"{_LIBRARY}::late"]) == expected
        lowtide.replayable(f"{_LIBRARY}::late")


@pytest.fixture
def undeclared() -> Iterator[set[str]]:
    """What was declared, as it was before the test."""
    before = set(operators._declared)
    yield operators._declared
    operators._declared.clear()
    operators._declared.update(before)


def test_each_way_to_name_an_operator(undeclared: set[str]) -> None:
    packet = getattr(torch.ops, _LIBRARY).kept
    for one in (kept, packet, packet.default, f"{_LIBRARY}::kept", f"{_LIBRARY}::kept.default"):
        undeclared.discard(f"{_LIBRARY}::kept")
        assert lowtide.replayable(one) is one
        assert f"{_LIBRARY}::kept" in undeclared


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (torch.ops.aten.mm.default, "aten::mm is torch's own"),
        ("aten::_cudnn_rnn", "is torch's own"),
        ("c10d::allreduce_", "talks to other processes"),
        ("_c10d_functional::all_reduce", "talks to other processes"),
        ("mylib::swiglu", "there is no operator mylib::swiglu. Import the library"),
        ("swiglu", "takes an operator .* got 'swiglu'"),
        (torch.sigmoid, "takes an operator"),
        (nn.Linear, "or a subclass of torch.autograd.Function; got <class"),
        (None, "got None"),
    ],
)
def test_what_is_refused(what: Any, text: str, undeclared: set[str]) -> None:
    before = set(undeclared)
    with pytest.raises(lowtide.UsageError, match=text):
        lowtide.replayable(what)
    assert undeclared == before


def test_a_policy_takes_what_custom_op_returned() -> None:
    keep = lowtide.policies.KeepOperators
    assert keep(kept) == keep(f"{_LIBRARY}::kept")
    model, x = blocks(declared), torch.randn(64, 16)
    with counted() as seen:
        lowtide.checkpoint(model, x, policy=keep(declared)).sum().backward()
    assert seen.operations
    assert not seen.names()[f"{_LIBRARY}::declared"]
