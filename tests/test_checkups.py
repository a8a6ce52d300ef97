"""Steps that are measured only because none was for long: ever more seldom, while nothing is new.

Cites rule 13 of docs/semantics.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide.learning.checkups import CheckUps
from lowtide.learning.learned import Learned
from lowtide.memory.marks import OwnEvents
from lowtide.planner import Graph
from once import on_one_recorder

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

SCHEDULE = [0, 50, 151, 354, 761, 1572, 2383]


def due(checks: CheckUps, steps: int, new: Callable[[int], bool] = lambda step: False) -> list[int]:
    found = []
    for step in range(steps):
        if checks.due(step):
            found.append(step)
            if step:
                checks.seen(new=new(step))
    return found


def test_a_check_up_without_news_puts_off_the_next() -> None:
    assert due(CheckUps(), 2400) == SCHEDULE


def test_news_brings_the_next_check_up_near() -> None:
    assert due(CheckUps(), 1100, lambda step: step in (354, 404)) == [
        *SCHEDULE[:4],
        *(404, 454, 555, 758),
    ]


def test_check_ups_that_no_one_judges_come_every_fifty_steps() -> None:
    """Of steps that follow the plan for a larger one, each may be another."""
    checks = CheckUps()
    assert [step for step in range(260) if checks.due(step)] == [0, 50, 100, 150, 200, 250]


@pytest.mark.parametrize("rhythm", [2, 3, 4, 5, 7, 10])
def test_check_ups_meet_every_step_of_a_loop(rhythm: int) -> None:
    found = due(CheckUps(), 811 * 12)
    assert {step % rhythm for step in found} == set(range(rhythm))


# ---------------------------------------------------------------------- in a loop


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(4))
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that were measured."""
    steps: list[int] = []
    of_step = OwnEvents.of_step

    def note(self: OwnEvents, pending: Callable[[], bool]) -> None:
        steps.append(COUNT[0])
        of_step(self, pending)

    monkeypatch.setattr(OwnEvents, "of_step", note)
    COUNT[0] = -1
    return steps


COUNT = [-1]


def train(
    model: nn.Module,
    limit: lowtide.Budget | None,
    steps: int,
    x: Tensor,
    hook: list[int] | None = None,
) -> None:
    for _ in range(steps):
        COUNT[0] += 1
        model.zero_grad()
        if limit is None:
            loss = model(x).square().mean()
        else:
            with limit:
                loss = model(x).square().mean()
        if hook:
            loss.register_hook(lambda grad: torch.empty(hook[0]).fill_(0.0).sum().mul(0.0) + grad)
        loss.backward()


def test_where_all_is_kept_a_check_up_is_one_step(measured: list[int]) -> None:
    """Nothing is planned after it, so that no new plan is measured either."""
    limit = lowtide.budget("1 GiB")
    train(net(), limit, 400, torch.randn(64, 16))
    assert [step for step in measured if step > 3] == SCHEDULE[1:4]
    assert [step for step in measured if step <= 3] in ([0, 1], [0, 1, 2], [0, 1, 3])


def test_where_a_part_is_recomputed_the_plan_stays(
    measured: list[int], replayed: Callable[[], int]
) -> None:
    """Times vary from step to step: another plan for no gain would have to be measured again."""
    model, x = net(), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    limit = lowtide.budget(0.7)
    train(model, limit, 49, x)
    before = list(measured)
    train(model, limit, 130, x)
    assert replayed()
    train(twin, None, 1, x)
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    new = [step for step in measured if step not in before]
    assert new[0] == 50
    assert 151 in new
    assert 100 not in new
    assert len(new) <= 4  # one more for each plan that was notably better


def test_what_changes_unseen_is_found_at_a_check_up(measured: list[int]) -> None:
    """A hook on the loss takes more memory from some step on, which no operation shows."""
    model, x = net(), torch.randn(64, 16)
    limit = lowtide.budget("1 GiB")
    more = [8]
    train(model, limit, 60, x, more)
    usual = limit.report().measured_peak
    more[0] = 1_000_000
    train(model, limit, 100, x, more)  # the check-up is step 151
    report = limit.report()
    assert usual is not None
    assert report.measured_peak is not None
    assert report.measured_peak > usual + 3_000_000
    train(model, limit, 60, x, more)
    late = [step for step in measured if step > 60]
    assert late[0] == 151
    assert 201 in late or 202 in late or 203 in late  # near again
    assert limit.report().planned_peak == limit.report().measured_peak


# ---------------------------------------------------------------------- another plan


def learned_step(monkeypatch: pytest.MonkeyPatch) -> tuple[Learned, int]:
    """What a measured step taught that followed its plan, and the limit of that plan."""
    found: list[Learned] = []
    search = Learned.search

    def note(self: Learned, limit: int, *polish: object) -> object:
        found.append(self)
        limits.append(limit)
        return search(self, limit)

    limits: list[int] = []
    monkeypatch.setattr(Learned, "search", note)
    train(net(), lowtide.budget(0.7), 4, torch.randn(256, 16))
    monkeypatch.undo()
    return found[-1], limits[-1]


def slower(graph: Graph, ops: set[int], factor: float) -> Graph:
    return replace(
        graph,
        ops=tuple(
            replace(op, seconds=op.seconds * factor) if index in ops else op
            for index, op in enumerate(graph.ops)
        ),
    )


def test_a_plan_is_exchanged_only_for_a_notable_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    learned, limit = learned_step(monkeypatch)
    plan = learned.search(limit)
    assert plan is not None
    ran = replace(learned, ran=list(plan.plan.retain[: learned.graph.recorded]))
    assert ran.faster(limit) is None
    replayed = {
        op
        for op, node in enumerate(ran.graph.ops)
        if any(plan.plan.retain[v] >= 0 for v in node.outputs)
    }
    assert replayed
    costly = replace(ran, graph=slower(ran.graph, replayed, 1000.0))
    better = costly.faster(limit)
    assert better is not None
    assert better.plan.retain != plan.plan.retain
    nothing_known = replace(ran, ran=None)
    assert nothing_known.faster(limit) == nothing_known.search(limit)


def test_a_plan_that_does_not_fit_any_more_is_exchanged_for_a_slower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned, limit = learned_step(monkeypatch)
    plan = learned.search(limit)
    assert plan is not None
    ran = replace(learned, ran=list(plan.plan.retain[: learned.graph.recorded]))
    less = plan.peak - 1
    found = ran.faster(less)
    assert found is not None
    assert found.peak <= less
