"""Rule 13 in loops whose steps change: leaves that are frozen and unfrozen, steps that alternate,
steps that never recur.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide.learning import rests
from lowtide.learning.planning import Planning
from lowtide.learning.settling import Settling
from lowtide.observing.observer import Observer
from once import on_one_recorder
from one_step import gradients, peak_of

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


class Net(nn.Module):
    """An embedding, blocks, a head; the blocks may run under `no_grad`."""

    def __init__(self, blocks: int = 6, words: int = 20_000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(words, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(blocks)
        )
        self.head = nn.Linear(32, 4)
        self.features_only = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.features_only):
            x = self.table(x)
            for block in self.blocks:
                x = block(x)
        out: Tensor = self.head(x)
        return out


def words(count: int = 512) -> Tensor:
    return torch.randint(20_000, (count,))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets one entry for each plan that is made."""
    made: list[int] = []
    plan_next: Callable[..., None] = Planning._plan_next

    def counted(*args: object, **more: object) -> None:
        made.append(1)
        plan_next(*args, **more)

    monkeypatch.setattr(Planning, "_plan_next", counted)
    return made


# --- what collects gradients changes ----------------------------------------------------------


def test_unfrozen_parameters_are_counted_in_their_first_step() -> None:
    model, x = Net(blocks=2), words()
    model.table.requires_grad_(False)
    limit = lowtide.budget(int(1.1 * peak_of(model, x)))
    for _ in range(4):
        peak_of(model, x, limit)
    model.table.requires_grad_(True)
    model.zero_grad()
    with pytest.raises(lowtide.BudgetError) as caught:
        peak_of(model, x, limit)
    assert caught.value.minimum is not None
    for _ in range(3):
        assert peak_of(model, x, lowtide.budget(caught.value.minimum)) <= caught.value.minimum


@pytest.mark.parametrize("how", ["frozen", "no_grad"])
def test_what_was_frozen_is_planned_anew(how: str, replayed: Callable[[], int]) -> None:
    """If the frozen step's plan were still followed, each block would be replayed from the first
    one on."""
    model, x = Net(words=100), torch.randint(100, (512,))
    share = int(0.7 * peak_of(model, x))
    twin = copy.deepcopy(model)

    def freeze(on: bool) -> None:
        if how == "no_grad":
            model.features_only = on
        else:
            for parameter in (*model.table.parameters(), *model.blocks.parameters()):
                parameter.requires_grad_(not on)

    limit = lowtide.budget(share)
    freeze(True)
    for _ in range(4):
        peak_of(model, x, limit)
    before = replayed()
    freeze(False)
    peak_of(twin, x)
    for number in range(4):
        assert peak_of(model, x, limit) <= share
        assert same(gradients(model), gradients(twin))
        if number:
            report = limit.report()
            assert report.planned
            assert 0 < report.replayed_operations < report.recorded_operations
    assert replayed() > before


def test_frozen_again_the_earlier_plans_are_followed_at_once(planned: list[int]) -> None:
    """As in adversarial training, where one net is frozen in the step of the other."""
    model, x = Net(words=100), torch.randint(100, (512,))
    limit = lowtide.budget(0.8)
    for _ in range(4):
        for frozen in (True, False):
            model.blocks.requires_grad_(not frozen)
            peak_of(model, x[: 256 if frozen else 512], limit)
    made = len(planned)
    for _ in range(4):
        for frozen in (True, False):
            model.blocks.requires_grad_(not frozen)
            peak_of(model, x[: 256 if frozen else 512], limit)
            assert limit.report().planned
    assert len(planned) == made


def test_leaves_that_are_frozen_inside_of_the_context() -> None:
    """When the context is entered, the leaves are not yet those of the step."""
    model, x = Net(words=100), torch.randint(100, (512,))
    limit = lowtide.budget(0.8)
    for number in range(6):
        model.zero_grad()
        with limit:
            model.table.requires_grad_(False)
            loss = model(x).square().mean()
        loss.backward()
        model.table.requires_grad_(True)
        if number > 2:
            assert limit.report().planned


@pytest.mark.parametrize("alone", [False, True])
def test_parameters_that_are_frozen_for_a_part_of_the_forward(alone: bool) -> None:
    """A critic while the actor's loss is computed, unfrozen before the backward: their state was
    another one than the step's whenever a plan was looked for, and each step was watched."""
    torch.manual_seed(0)
    actor, critic = (
        nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
        for _ in range(2)
    )
    nets, x = nn.ModuleList([actor, critic]), torch.randn(512, 64)

    def step(freezes: bool, limit: lowtide.Budget | None) -> list[Tensor]:
        nets.zero_grad()
        with limit or nullcontext():
            loss = torch.zeros(()) if alone else critic(x).square().mean()
            critic.requires_grad_(not freezes)
            loss = loss + critic(actor(x)).square().mean()
            critic.requires_grad_(True)
        loss.backward()
        return gradients(nets)

    share = int(0.75 * lowtide.measure(lambda: step(True, None), device="cpu").peak_bytes)
    limit = lowtide.budget(share)
    for number in range(12):
        freezes = number < 6
        expected = step(freezes, None)
        assert lowtide.measure(step, freezes, limit, device="cpu").peak_bytes <= share
        assert same(gradients(nets), expected)
        report = limit.report()
        assert report.replayed_operations > 0
        assert report.planned or not freezes or number <= 2


# --- steps that come in turns, or never again ---------------------------------------------------


def test_steps_that_take_turns_are_all_measured_and_planned_no_more(planned: list[int]) -> None:
    """As in an epoch that ends with a short batch."""
    model = Net(words=100)
    large, small = torch.randint(100, (512,)), torch.randint(100, (200,))
    share = int(0.7 * peak_of(model, large))
    limit = lowtide.budget(share)
    for number in range(8):
        for x in (large, large, small):
            assert peak_of(model, x, limit) <= share
        if number == 4:
            made = len(planned)
    assert [prepared.measured for prepared in limit._loop._plans] == [True, True]
    assert len(planned) == made


def test_steps_with_their_beginning_in_common_are_planned_no_more(planned: list[int]) -> None:
    """A step with another end is recognised only there; until then it follows another plan."""
    model, head, x = Net(words=100), nn.Linear(4, 300), torch.randint(100, (512,))
    limit = lowtide.budget(0.7)

    def step(other: bool) -> None:
        with limit:
            out = model(x)
            loss = (head(out) if other else out).square().mean()
        loss.backward()

    for number in range(8):
        step(True)
        step(False)
        if number == 4:
            made = len(planned)
    assert len(planned) == made


@pytest.mark.parametrize("part", ["before", "after"])
def test_what_another_plan_held_is_not_taken_for_memory_of_the_step(part: str) -> None:
    """A step follows the plan for another one until something shows that it is not that: an
    operation of its own, or that its forward is over. What it drops then was not its own (rule 13).
    """
    torch.manual_seed(0)
    body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12)))
    x, limit = torch.randn(512, 32), lowtide.budget(0.6)

    def step(larger: bool, context: AbstractContextManager[object]) -> None:
        body.zero_grad()
        with context:
            loss = body(x).square().mean()
            if larger:
                body(x)  # without a backward
            elif part == "before":
                loss = loss.exp().sin()
        loss.backward()

    plain = lowtide.measure(step, False, nullcontext()).peak_bytes
    found = []
    for number in range(12):
        larger = number % 3 == 2
        step(larger, limit)
        if limit.report().planned and not larger:
            found.append(limit.report().plain_peak)
    assert found
    for peak in found:
        assert peak == pytest.approx(plain, rel=0.01)


def test_steps_that_never_come_again_are_not_planned_for_ever(planned: list[int]) -> None:
    model = Net(words=100)
    share = int(0.7 * peak_of(model, torch.randint(100, (400,))))
    limit = lowtide.budget(share)
    for count in range(300, 330):
        assert peak_of(model, torch.randint(100, (count,)), limit) <= share
    assert len(planned) < 8
    for _ in range(4):  # a step that recurs is planned all the same
        assert peak_of(model, torch.randint(100, (340,)), limit) <= share
    assert limit.report().planned


class Shifted(nn.Module):
    """Begins with operations of which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))
        self.depth = 4

    def forward(self, x: Tensor) -> Tensor:
        for number in range(8):
            x = x + number
        for block in self.blocks[: self.depth]:
            x = torch.sin(block(x))
        return x


def test_a_fraction_for_a_step_that_leaves_its_plan() -> None:
    """What autograd has not saved, the plain step does not have either: it grants nothing."""
    model, x, limit = Shifted(), torch.randn(512, 32), lowtide.budget(0.6)
    for _ in range(3):
        peak_of(model, x, limit)
    model.depth = 12
    plain = peak_of(copy.deepcopy(model), x)
    assert peak_of(model, x, limit) <= 0.6 * plain


# --- what follows a backward inside of the context ----------------------------------------------


@pytest.mark.parametrize("clipped", [False, True])
def test_an_optimizer_inside_of_the_context(clipped: bool, replayed: Callable[[], int]) -> None:
    """What backward has freed is not counted when the optimizer allocates."""
    x = torch.randint(100, (512,))
    model, twin = Net(words=100), Net(words=100)
    share = int(0.6 * peak_of(model, x))
    model.zero_grad()
    limit = lowtide.budget(share)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, twin)]

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        if clipped:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()

    for _ in range(4):
        with limit:
            train(model, optimizers[0])
        train(twin, optimizers[1])
        assert same(
            [p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()]
        )
    report = limit.report()
    assert report.planned
    assert report.measured_peak is not None
    assert report.measured_peak <= share
    assert replayed() > 0


class Heads(nn.Module):
    """A trunk, and heads of other depths, one of which runs in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = self.blocks(6)
        self.heads = nn.ModuleList(map(self.blocks, (1, 3, 5)))

    @staticmethod
    def blocks(count: int) -> nn.Module:
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                for _ in range(count)
            )
        )

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](self.trunk(x)).square().mean()
        return out


def test_known_steps_that_part_halfway_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves the plan that was followed last when its head begins, for its own: what its own
    plan does not hold is dropped there. Watching it would teach nothing, and take a multiple of its
    time."""
    model, x = Heads(), torch.randn(256, 32)
    other = copy.deepcopy(model)
    most = lowtide.measure(lambda: model(x, 2).backward(), device="cpu").peak_bytes
    budget = lowtide.budget(int(0.7 * most))
    watched: list[str] = []
    settled: list[int] = []
    operation, settle = Observer.operation, Settling.settle
    monkeypatch.setattr(
        Observer,
        "operation",
        lambda self, op, *a: (watched.append(op.facts.name), operation(self, op, *a)),
    )
    monkeypatch.setattr(
        Settling, "settle", lambda *args, **more: (settled.append(1), settle(*args, **more))
    )

    def step(head: int) -> int:
        for net, context in ((model, budget), (other, nullcontext())):
            net.zero_grad()
            with context:
                loss = net(x, head)
            loss.backward()
        assert same(gradients(model), gradients(other))
        budget._loop._beside.wait()
        return budget.report().replayed_operations

    for head in (0, 1, 2) * 2:
        for _ in range(4):
            step(head)
    turns = [0, 2, 1, 0, 1, 2, 1, 0, 2, 0]
    planned: list[int] = []
    search = rests.with_margin
    monkeypatch.setattr(
        rests, "with_margin", lambda *args, **more: (planned.append(1), search(*args, **more))[1]
    )
    watched.clear()
    settled.clear()
    replays: dict[int, set[int]] = {}  # by plan: of steps that changed to it, or began under it
    for head in [*turns, *(each for each in (0, 1, 2) for _ in range(2))]:
        searched = len(settled)
        found = step(head)
        assert budget._loop._reported.last is not None
        if len(settled) == searched:  # all that its plan holds was there
            replays.setdefault(id(budget._loop._reported.last.followed), set()).add(found)
        assert budget.report().planned
    assert not watched
    assert len(settled) < len(turns) - 1
    assert all(len(times) == 1 for times in replays.values())
    assert any(times != {0} for times in replays.values())
    before = len(planned), len(settled)
    for head in turns[1:]:  # what differs from the plans is planned once
        step(head)
    assert len(planned) == before[0]
    assert len(settled) > before[1]
    assert budget.report().highest_peak <= budget.limit
