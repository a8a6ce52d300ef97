"""Rule 13 where the forward has differentiable backwards inside, as in meta-learning.

Such a backward asks for what was saved while the forward still runs. What was dropped is replayed
in the middle of the forward, and the outer backward goes through the graph of a backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import lowtide
from against_plain import counted
from by_hand import same
from lowtide import engine, replay
from lowtide.running.decide import StepDecisions
from lowtide.step import current_recorder
from lowtide.tape.saves import Saves
from lowtide.tape.values import Operation, Value

pytestmark = pytest.mark.usefixtures("one_thread")


def tower(depth: int = 6, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    )


def adapted(model: nn.Module, tasks: int = 2, steps: int = 2) -> Tensor:
    """The loss of MAML: gradient steps inside, through which the outer gradient goes."""
    total = torch.zeros(())
    for task in range(tasks):
        x = torch.linspace(-1, 1 + task, 64 * 32).reshape(64, 32)
        weights = dict(model.named_parameters())
        for _ in range(steps):
            loss = functional_call(model, weights, (x,)).square().mean()
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: weight - 0.1 * slope
                for (name, weight), slope in zip(weights.items(), slopes, strict=True)
            }
        total = total + functional_call(model, weights, (x,)).sin().mean()
    return total


def run(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], limit: lowtide.Budget | None
) -> tuple[int, list[Tensor]]:
    def step() -> None:
        if limit is None:
            loss = loss_of(model)
        else:
            with limit:
                loss = loss_of(model)
        loss.backward()

    model.zero_grad()
    peak = lowtide.measure(step, device="cpu").peak_bytes
    return peak, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("share", [0.35, 0.4, 0.45])
def test_what_is_replayed_inside_the_forward_counts(share: float) -> None:
    plain, expected = run(tower(), adapted, None)
    model, limit = tower(), lowtide.budget(int(share * plain))
    with counted() as replayed:
        for _ in range(2):
            peak, found = run(model, adapted, limit)
            assert peak <= limit.limit
            assert same(expected, found)
    assert replayed.operations


def test_a_graph_that_dies_during_a_replay_takes_nothing_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's collector, or another thread, may release a graph at any moment. What only that had
    saved was dropped then, in the middle of a replay that counted on it."""
    others = [torch.ones(())]
    find = replay.closure

    def meanwhile(value: Value) -> list[Operation]:
        found = find(value)
        recorder = current_recorder()
        if recorder is not None and recorder.replaying:
            others.clear()
        return found

    def loss_of(x: Tensor) -> Tensor:
        shifted = x + 1
        others.append(shifted.sin())  # saves `shifted`, which the tanh does not
        out = shifted.tanh()
        del shifted
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return slope.square().sum()

    def gradient(limit: lowtide.Budget | None) -> Tensor:
        x = torch.linspace(-1, 1, 4096).requires_grad_()
        with limit or contextlib.nullcontext():
            loss = loss_of(x)
        loss.backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(None)
    monkeypatch.setattr(replay, "closure", meanwhile)
    monkeypatch.setattr(
        StepDecisions, "saved", lambda _, value, __: value.op.facts.name != "aten::tanh"
    )
    with engine.use("python"):
        found = gradient(lowtide.budget("1 GiB"))
    assert not others
    assert torch.equal(found, expected)


def test_every_recorder_knows_while_it_replays_inside_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[bool] = []

    def note(recorder: Saves, name: str, value: object) -> None:
        if name == "replaying":
            noted.append(bool(value))
        object.__setattr__(recorder, name, value)

    monkeypatch.setattr(StepDecisions, "saved", lambda *_: False)
    monkeypatch.setattr(Saves, "__setattr__", note, raising=False)
    x = torch.ones(64, requires_grad=True)
    with lowtide.budget("1 GiB"):
        (slope,) = torch.autograd.grad(x.tanh().exp().sum(), x, create_graph=True)
    assert noted[:2] == [True, False]
    noted.clear()
    slope.sum().backward()
    assert not noted  # the forward is over, and nothing is dropped any more


class Inside(torch.autograd.Function):
    """Its backward has what it saved while it runs that of a graph which its forward made."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, *xs: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = model(sum(x.detach() for x in xs).requires_grad_())  # type: ignore[union-attr]
        ctx.save_for_backward(*xs)
        return ctx.inner.detach().sum()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        xs = ctx.saved_tensors
        torch.autograd.backward(ctx.inner, gradient.expand_as(ctx.inner))
        ctx.inner = None
        return None, *[x * 0.001 for x in xs]


def test_what_a_node_was_given_is_there_while_it_runs_another_backward() -> None:
    """Others ask next, of a backward that this node runs; each `x` is asked for later, too."""
    model, batch = tower(), torch.randn(64, 32)
    scales = nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(3)])

    def step() -> None:
        xs = [batch * scale for scale in scales]
        (sum(x.sin().sum() for x in xs) + Inside.apply(model, *xs)).backward()

    graph = lowtide.plan(step).graph
    assert len(graph.events) > 6
    # It has them until they are released, whoever asks for them meanwhile.
    for event, value in enumerate([each.value for each in graph.events[:3]]):
        assert len(graph.asked[value]) == 2
        assert graph.ends[event] == graph.release[value]
        assert graph.latest[value] == graph.first_event[value]
    budget = lowtide.budget(0.95)
    step()
    expected = [p.grad for p in (*model.parameters(), *scales)]
    for _ in range(3):
        for parameter in (*model.parameters(), *scales):
            parameter.grad = None
        with budget:
            step()
        found = [p.grad for p in (*model.parameters(), *scales)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
