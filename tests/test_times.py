"""The time of an operation in a plan: it is taken over all similar calls, not from one.

Steps are planned from times that these tests invent, so that it is known what was slow by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.observing.observer import Observer
from lowtide.planner import Graph
from once import on_one_recorder

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

Times = Callable[[int, int, str], float]
"""Seconds of an operation, from the number of the step, its place in the step, and its name."""


class Tower(nn.Module):
    """Similar layers, and one operation that occurs once."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.last = depth

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.last]:
            x = torch.nn.functional.gelu(layer(x))
        return torch.tanh(x).square().mean()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Times], None]]:
    """A function that sets the times of observed steps."""
    plain = Observer.operation
    begun: list[Observer] = []

    def take(times: Times) -> None:
        def operation(self, op, *rest):  # type: ignore[no-untyped-def]
            if self not in begun:
                begun.append(self)
            op.seconds = times(len(begun), op.sequence, op.facts.name)
            plain(self, op, *rest)

        monkeypatch.setattr(Observer, "operation", operation)

    yield take
    begun.clear()


def step(model: nn.Module, limit: lowtide.Budget) -> None:
    model.zero_grad()
    with limit:
        loss = model(torch.ones(128, 64))
    loss.backward()


def planned(model: nn.Module, limit: lowtide.Budget, steps: int) -> Graph:
    """The graph from which the plan after some steps was made."""
    for _ in range(steps):
        step(model, limit)
    limit.report()
    for found in limit._loop._beside.found():  # the next step would do this
        limit._loop._plans.add(found)
    return limit._loop._plans.expected(0).graph


def seconds(graph: Graph, name: str) -> set[float]:
    return {op.seconds for op in graph.ops if op.name == f"aten::{name}"}


def test_one_slow_call_among_many_alike_changes_no_plan(timed: Callable[[Times], None]) -> None:
    timed(lambda step, place, name: 1e-3)
    even = lowtide.budget(0.6)
    planned(Tower(), even, 1)
    slow: list[int] = []

    def times(step: int, place: int, name: str) -> float:
        if name == "aten::gelu" and not slow:
            slow.append(place)
        return 1.0 if place in slow else 1e-3

    timed(times)
    disturbed = lowtide.budget(0.6)
    graph = planned(Tower(), disturbed, 1)
    assert slow
    assert seconds(graph, "gelu") == {1e-3}
    assert (
        disturbed._loop._plans.expected(0).plan.retain == even._loop._plans.expected(0).plan.retain
    )


def test_a_call_unlike_others_has_its_own_time(timed: Callable[[Times], None]) -> None:
    timed(lambda step, place, name: 5e-3 if name == "aten::tanh" else 1e-3)
    graph = planned(Tower(), lowtide.budget(0.6), 1)
    assert seconds(graph, "tanh") == {5e-3}
    assert seconds(graph, "gelu") == {1e-3}


@pytest.mark.parametrize("slow", [1, 2])
def test_a_slow_step_is_made_up_for_by_the_other(timed: Callable[[Times], None], slow: int) -> None:
    timed(lambda step, place, name: 1.0 if step == slow else 1e-3)
    graph = planned(Tower(), lowtide.budget(0.6), 2)
    assert {op.seconds for op in graph.ops} == {1e-3}


def test_modelled_times_are_not_mixed_with_measured_ones(timed: Callable[[Times], None]) -> None:
    model = Tower()
    plan = lowtide.plan(lambda: model(torch.ones(128, 64)), limit=0.6)
    assert 1.0 not in {op.seconds for op in plan.step.graph.ops}
    timed(lambda step, place, name: 1.0)
    graph = planned(model, lowtide.budget(plan), 1)
    assert {op.seconds for op in graph.ops} == {1.0}


def test_a_step_that_is_not_watched_knows_the_times_of_calls_it_has_seen() -> None:
    """It leaves the planned step: operations from there on were not timed in it."""
    model, limit = Tower(), lowtide.budget(0.6)
    planned(model, limit, 4)
    assert limit._loop._active == []
    model.last = 3
    graph = planned(model, limit, 1)
    assert [op.name for op in graph.ops].count("aten::gelu") == 3
    (tanh,) = seconds(graph, "tanh")
    assert tanh > 0
