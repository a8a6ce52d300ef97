"""Which steps are measured and planned where they differ: what that takes is bounded.

Rule 13 of docs/semantics.md says what holds meanwhile.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import BudgetError
from lowtide.kernels import results
from lowtide.kernels.results import made_by
from lowtide.learning.awaited import Awaited
from lowtide.learning.effort import Effort, annealings
from lowtide.learning.planning import Planning
from lowtide.learning.refusals import Refusals
from lowtide.memory.marks import OwnEvents
from lowtide.observing.leaves import Leaves
from lowtide.observing.seen import Seen
from lowtide.planner.graph import UNKNOWN
from once import on_one_recorder

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

aten = torch.ops.aten


# ---------------------------------------------------------------------- waiting


def measured_among(steps: list[int], awaited: set[int]) -> list[int]:
    """Which of these steps a loop would measure, each a kind; those awaited have no measurement
    until they are measured."""
    waiting, unmeasured, found = Awaited(), set(awaited), []
    for number, kind in enumerate(steps):
        waiting.begins(number)
        measure = waiting.is_due or (waiting.waits and bool(unmeasured))
        waiting.followed()
        if measure:
            found.append(number)
            waiting.waited()
        if kind in unmeasured:
            if measure:
                waiting.met()
                unmeasured.discard(kind)
            else:
                waiting.missed(kind)
    return found


def test_a_step_that_takes_turns_is_measured_when_it_comes_next() -> None:
    assert measured_among([0, 1, 2] * 20, {2}) == [3, 4, 5]


def test_the_last_batch_of_an_epoch_is_measured_at_its_time() -> None:
    epoch = [0] * 99 + [1]
    found = measured_among(epoch * 6, {1})
    assert found == [*range(100, 116), *range(200, 216), *range(300, 316), 399]


def test_no_one_waits_for_ever() -> None:
    """Some come once in a thousand steps, and so often one of them has just come."""
    draw = random.Random(0)
    found = measured_among([draw.randrange(1_000) for _ in range(20_000)], set(range(100)))
    assert len(found) < 1_200  # measuring as long as any is known would be most of 20,000
    assert sum(number >= 10_000 for number in found) < 400


# ---------------------------------------------------------------------- planning


def a_step(number: int) -> Any:
    return [("aten::sin", (number,), (-1,), 0)]


def test_plans_that_no_step_follows_are_made_ever_more_seldom() -> None:
    """A step takes 10 milliseconds, its plan a tenth of a second."""
    effort, planned = Effort(), []
    for number in range(2_000):
        if effort.first(a_step(number % 500), 0.01):
            planned.append(number)
            effort.spent_first(0.1)
    early = [number for number in planned if number < 100]
    assert 4 <= len(early) <= 6
    assert len(planned) <= 2_000 * 0.01 * 0.1 / 0.1 + 6


def at_the_end_of_its_patience() -> tuple[Effort, int]:
    """After so many steps that no plan covers, each of which got one."""
    effort, number = Effort(), 0
    while effort.first(a_step(number), 0.01):
        effort.spent_first(0.1)
        number += 1
    return effort, number


def test_a_step_that_comes_often_gets_its_plan() -> None:
    """As soon as its plan would have paid, whatever others have cost."""
    effort, _ = at_the_end_of_its_patience()
    for _ in range(4):
        effort.spent_first(0.1)
    often = a_step(-1)
    asked = [effort.first(often, 0.01) for _ in range(12)]
    assert asked.index(True) == 5  # five times twice the step's time are the plan's time


def test_steps_that_follow_plans_bring_their_time_back() -> None:
    effort, number = at_the_end_of_its_patience()
    followed = SimpleNamespace(seconds=0.01, measured=True, tried=True, grown=False, of_plain=None)
    for _ in range(30):
        effort.followed(followed, covered=False, measured=False)  # type: ignore[arg-type]
    assert effort.first(a_step(number + 1), 0.01)


def test_a_step_for_which_there_is_no_plan_is_searched_for_ever_more_seldom() -> None:
    effort, searched = Effort(), []
    for number in range(200):
        measured = effort.to_measure(None, lambda: False)
        if effort.first(a_step(0), 0.01, measured=measured):
            searched.append(number)
            effort.planless(a_step(0))
    assert searched == [0, 1, 4, 11, 26, 57, 120]
    assert not effort.to_measure(None, lambda: False)
    asked = [effort.first(a_step(1), 0.01) for _ in range(2)]
    assert asked == [False, True]  # another one: its own occurrences count
    assert effort.to_measure(None, lambda: False)
    assert not effort.first(a_step(0), 0.01)
    effort.more_room()
    assert effort.first(a_step(0), 0.01)


# ---------------------------------------------------------------------- in a loop


class Layers(nn.Module):
    """Each step runs its layers by chance: hardly any step is like another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(10)
        )
        self.first = nn.Linear(16, 16)
        self.draw = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x) if self.draw.random() < 0.5 else x * 0.9
        return x


def test_steps_that_never_recur_are_not_all_measured_and_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured, planned = [0], [0]
    of_step, plan_next = OwnEvents.of_step, Planning._plan_next

    def noted(self: OwnEvents, pending: Callable[[], bool]) -> None:
        measured[0] += 1
        of_step(self, pending)

    def counted(self: Any, *given: Any, **more: Any) -> None:
        planned[0] += 1
        plan_next(self, *given, **more)

    monkeypatch.setattr(OwnEvents, "of_step", noted)
    monkeypatch.setattr(Planning, "_plan_next", counted)
    model, x = Layers(), torch.randn(64, 16)
    peak = lowtide.measure(lambda: model(x).square().mean().backward(), device="cpu").peak_bytes
    model.zero_grad()
    limit = lowtide.budget(peak)
    for _ in range(150):
        with limit:
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
    assert measured[0] <= 75
    assert planned[0] <= 75


# ---------------------------------------------------------------------- what operators make


CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.add.Tensor, (torch.ones(3, dtype=torch.int32), 1)),
    (aten.add.Tensor, (torch.ones(3, dtype=torch.int32), 1.0)),
    (aten.add.Tensor, (torch.ones(3, dtype=torch.int32), True)),
    (aten.sum.dim_IntList, (torch.ones(3, 4), [0])),
    (aten.sum.dim_IntList, (torch.ones(3, 4), [1])),
    (aten.sum.dim_IntList, (torch.ones(3, 4), [0, 1])),
    (aten.to_dense.default, (torch.ones(3, 4),)),
    (aten.clone.default, (torch.ones(4, 3).t(),)),
    (aten.clone.default, (torch.ones(3, 4),)),
    (aten.clone.default, (torch.ones(1, 4).expand(3, 4),)),
    (aten.cat.default, ([torch.ones(3), torch.ones(4)],)),
    (aten.cat.default, ([torch.ones(3, dtype=torch.float64), torch.ones(4)],)),
    (aten.full.default, ([5], 1.0)),
    (aten.full.default, ([5], 1)),
    (aten.arange.default, (7,)),
    (aten.div.Tensor, (torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32))),
]


def exactly(func: Any, args: tuple[Any, ...]) -> int:
    result = func(*args)
    return int(result.numel() * result.element_size())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_what_is_remembered_of_one_call_is_not_taken_for_another(dtype: torch.dtype) -> None:
    """Shapes, strides, dtypes, the types of numbers, and the default dtype all matter."""
    results._known.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for _ in range(2):
            for func, args in CALLS:
                assert made_by(func, args, {}) == exactly(func, args), (func, args)
    finally:
        torch.set_default_dtype(before)


def test_what_is_remembered_saves_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    results._known.clear()
    runs = []
    run = results._run
    monkeypatch.setattr(results, "_run", lambda *call: runs.append(call) or run(*call))
    for _ in range(3):
        assert made_by(aten.mm.default, (torch.ones(3, 4), torch.ones(4, 5)), {}) == 60
    assert len(runs) == 1
    for _ in range(2):  # which a generator makes, no one can tell
        drawn = {"generator": torch.Generator()}
        assert made_by(aten.bernoulli.default, (torch.ones(6),), drawn) == 24
    assert len(runs) == 3


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    results._known.clear()
    monkeypatch.setattr(results, "_MOST", 5)
    for count in range(1, 20):
        assert made_by(aten.sin.default, (torch.ones(count),), {}) == 4 * count
        assert len(results._known) <= 5


@pytest.mark.parametrize("planned", [True, False])
def test_several_backwards_through_one_graph_are_not_measured_for_ever(
    planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no plan for all of them keeps the limit, as when it is not known when a node is over,
    they are planned one by one, inside the limit."""
    if not planned:
        for module in ("measured", "rebuild"):
            monkeypatch.setattr(
                f"lowtide.observing.{module}.following", lambda asked, ended: [UNKNOWN] * len(asked)
            )
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
    heads = nn.ModuleList(nn.Linear(128, 4) for _ in range(3))
    limit, x = lowtide.budget(0.8), torch.randn(512, 32)
    for _ in range(30):
        body.zero_grad()
        heads.zero_grad()
        with limit:
            found = body(x)
            losses = [head(found).square().mean() for head in heads]
        for place, loss in enumerate(losses):
            loss.backward(retain_graph=place < 2)
    told = limit.report()
    assert told.planned == planned
    assert told.highest_peak is not None
    assert told.limit is not None
    assert told.highest_peak <= told.limit
    assert told.measured_steps < 15  # and not in every step


def test_the_longer_the_steps_the_longer_the_search_beside_them() -> None:
    """For as long as ten steps take, and at most eight times as long as others wait for."""
    assert [annealings(step) for step in (0.0, 1e-3, 0.1, 0.2, 60.0)] == [1, 1, 2, 4, 8]


def test_with_more_room_none_is_refused_again() -> None:
    seen = Seen((), frozenset(), {}, {}, 0)
    refusals = Refusals()
    assert refusals.not_yet(seen)
    refusals.add(seen, BudgetError("too small"))
    assert refusals
    assert refusals.of((), (), {}, 0)
    refusals.clear()
    assert not refusals
    assert refusals.of((), (), {}, 0) is None
    assert refusals.not_yet(seen)


@pytest.mark.parametrize("size", [8, 4])
def test_a_refused_step_with_a_leaf_of_its_own_is_refused_again(size: int) -> None:
    """As an input that requires grad, the images of a penalty, the fixed point of an equilibrium:
    another such leaf, of no fewer bytes, comes in its place."""
    weight, own = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    read = {id(leaf): (0, leaf.nbytes) for leaf in (weight, own)}
    leaves = {id(leaf): (0, weakref.ref(leaf)) for leaf in (weight, own)}
    refusals = Refusals()
    refusals.add(Seen((), frozenset(), read, leaves, 0), BudgetError("too small"))
    assert refusals.of((), (), {id(weight): (0, 32)}, 0) is None
    assert refusals.of((), (), read, 0)
    del own
    assert refusals.of((), (), {id(weight): (0, 32)}, 0) is None
    another = torch.ones(size, requires_grad=True)
    to_come = {id(weight): (0, 32), id(another): (0, another.nbytes)}
    assert bool(refusals.of((), (), to_come, 0)) == (size == 8)


def test_gradients_to_come_are_those_of_parameters_that_nothing_has_read() -> None:
    model, leaves = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.LazyLinear(2)), Leaves()
    first, second = model[0], model[1]
    first.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    second.bias.grad = torch.zeros(1)  # type: ignore[union-attr]
    assert leaves.to_come(model) == 4 * (6 + 3)
    leaves.gradients[id(first.weight)] = 0, 24
    assert leaves.to_come(model) == 4 * 3
