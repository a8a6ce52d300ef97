"""Rule 13 where no plan covers a step: the limit holds all the same, or the step is refused.

Rules of docs/semantics.md are cited by number. Steps change through branches that depend on data,
their batch, an early end, the wiring of the layers, and gradients that exist already or not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
import one_step
from against_plain import budgeted
from by_hand import same
from lowtide.learning.effort import Effort
from lowtide.running.prepared import ANCHOR
from once import on_one_recorder
from one_step import gradients
from zoo import CASES

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

FOLLOWED = [
    (name, way)
    for name in ("hf_gpt2_sdpa", "monai_unet_3d", "hf_resnet", "monai_dense_net_121")
    for way in ("budget", "fit")
    if (name, way) != ("monai_dense_net_121", "fit")  # the slowest, and it covers nothing new
]


class Branching(nn.Module):
    """A tower whose forward differs from call to call over layers of the same shapes."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.left_out: set[int] = set()
        self.last = depth  # where the forward ends
        self.skips: dict[int, int] = {}  # layer -> the earlier one whose output is added
        self.gated = False

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for number, layer in enumerate(self.layers[: self.last]):
            if number not in self.left_out:
                x = torch.sin(layer(x)).exp().cos()
            outputs.append(x)
            if number in self.skips:
                x = x + outputs[self.skips[number]]
        return torch.tanh(x) * x if self.gated else x


def drawn(model: Branching, choose: random.Random) -> Callable[[Branching], None]:
    """A random path through a model."""
    depth = len(model.layers)
    left_out = set(choose.sample(range(1, depth), choose.choice([0, 1, 2])))
    last = choose.choice([depth, depth, depth - 1, depth - 2])
    places = choose.sample(range(1, depth), choose.choice([0, 0, 1, 2]))
    skips = {place: choose.randrange(place) for place in places}
    gated = choose.random() < 0.3

    def take(model: Branching) -> None:
        model.left_out, model.last, model.skips, model.gated = left_out, last, skips, gated

    return take


peak_of = functools.partial(one_step.peak_of, adds_up=True)


@pytest.mark.parametrize("seed", range(30))
def test_the_limit_holds_in_every_step(seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    model = Branching(choose.choice([4, 8, 12]))
    reference = copy.deepcopy(model)
    plain = peak_of(reference, torch.randn(512, 32))
    limit = lowtide.budget(int(choose.choice([0.45, 0.55, 0.7, 0.85]) * plain))
    ways = [drawn(model, choose) for _ in range(3)]
    refused: lowtide.BudgetError | None = None
    for number in range(8):
        take, rows = choose.choice(ways), choose.choice([512, 512, 512, 448, 384])
        x = torch.randn(rows, 32)
        take(model)
        take(reference)
        model.zero_grad()
        reference.zero_grad()
        peak_of(reference, x)
        try:
            peak = peak_of(model, x, limit)
        except lowtide.BudgetError as error:
            refused = error
            break
        assert peak <= limit.limit, f"step {number}"
        expected, found = gradients(reference), gradients(model)
        assert len(expected) == len(found)
        assert same(expected, found), f"step {number}"
    assert refused is None or refused.minimum > refused.limit


def test_most_changed_steps_are_not_refused() -> None:
    """Checks the test above, which would pass if every step were refused."""
    model = Branching(8)
    limit = lowtide.budget(int(0.5 * peak_of(model, torch.randn(512, 32))))
    choose = random.Random(0)
    for _ in range(20):
        drawn(model, choose)(model)
        model.zero_grad()
        peak_of(model, torch.randn(512, 32), limit)


def test_a_step_that_differed_is_not_watched_for_ever() -> None:
    """Watching costs several times what following a plan does."""
    model, x = Branching(4), torch.randn(512, 32)
    limit = lowtide.budget(int(0.7 * peak_of(model, x)))

    def watched() -> bool:
        peak_of(model, x, limit)
        limit.report()
        limit._loop._beside.wait()
        assert limit._loop._reported.last is not None
        return limit._loop._reported.last.observer is not None

    # The third one is the first that follows the plan from the search beside training.
    assert [watched() for _ in range(5)] == [True, True, True, False, False]
    model.gated = True
    assert watched()
    assert watched()
    model.gated = False
    assert [watched() for _ in range(6)][-1] is False


def test_a_forward_that_ends_early_with_its_backward_outside_of_the_budget() -> None:
    """What ran is the beginning of the planned step; that it has ended is known only later."""
    model, x = Branching(8, width=64), torch.randn(256, 64)
    plain = copy.deepcopy(model)
    limit = lowtide.budget(int(0.7 * peak_of(model, x)))

    def outside(used: nn.Module, around: Any) -> list[Tensor]:
        used.zero_grad()
        with around:
            result = used(x)
        result.sum().backward()
        return [p.grad for p in used.parameters() if p.grad is not None]

    for last in (8, 8, 8, 5, 5, 8):
        model.last = plain.last = last
        ours: list[Tensor] = []
        step = functools.partial(outside, model, limit)
        measured = lowtide.measure(lambda: ours.extend(step()), device="cpu")  # noqa: B023
        theirs = outside(plain, contextlib.nullcontext())
        assert measured.peak_bytes <= limit.limit
        assert len(ours) == len(theirs) == 2 * last
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradients_that_were_there_when_the_step_was_planned() -> None:
    """The plan is made from steps that accumulate; the next one allocates all gradients anew."""
    model, x = Branching(6, width=96), torch.randn(96, 96)
    peak_of(model, x)
    model.zero_grad()
    plain = peak_of(model, x)
    limit = lowtide.budget(int(0.9 * plain))
    for number in range(10):  # gradients of the plain step are there in the first ones
        if number in (3, 5, 6, 8):
            model.zero_grad()
        assert peak_of(model, x, limit) <= limit.limit, f"step {number}"


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Reading(nn.Module):
    """Layers whose weights some steps read detached: what they read is then not saved, though the
    operations are the same."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(32, 64), (64, 32)] * 4
        self.weights = nn.ParameterList(torch.randn(size) / 8 for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(4))
        self.frozen = False

    def forward(self, x: Tensor) -> Tensor:
        weights = [weight.detach() if self.frozen else weight for weight in self.weights]
        for norm, wide, narrow in zip(self.norms, weights[::2], weights[1::2], strict=True):
            x = norm(x @ wide).sigmoid() @ narrow
        return x


@pytest.mark.parametrize("accumulating", [False, True])
def test_steps_of_the_same_operations_that_save_less(accumulating: bool) -> None:
    """A plan counts the requests of a backward: one that makes fewer is then later than it seems,
    and took up to twice its limit."""
    torch.manual_seed(0)
    model, x = Reading(), torch.randn(256, 32)
    limit = one_step.peak_of(model, x) // 2
    budget = lowtide.budget(limit)
    for frozen in (False, False, False, False, True, False, True):
        model.frozen = frozen
        assert one_step.peak_of(model, x, budget, adds_up=accumulating) <= limit
        if not accumulating:
            found = gradients(model)
            one_step.peak_of(model, x)
            assert same(found, gradients(model))


@pytest.mark.parametrize("share", [0.25, 0.3])
def test_a_plan_made_while_gradients_are_there_is_followed_without_them(share: float) -> None:
    """Rule 13: a dry run knows the leaves, so that a budget sees what is to be allocated now."""
    torch.manual_seed(0)
    model = nn.Sequential(*[
        Residual(nn.LayerNorm(48), nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48), nn.Dropout())
        for _ in range(8)
    ])  # fmt: skip
    x = torch.randn(333, 48)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    loss(x).backward()
    limit = lowtide.budget(lowtide.plan(loss, x, limit=share))

    def step() -> None:
        with limit:
            value = loss(x)
        value.backward()

    for number in range(4):
        if number != 2:  # which adds to the gradients that are there
            model.zero_grad()
        assert lowtide.measure(step).peak_bytes <= limit.limit, f"step {number}"
        assert limit.report().planned


def test_steps_of_an_accumulation_have_plans_of_their_own() -> None:
    """At the limit needed by a step that allocates its gradients, the other steps are not planned
    for more, and do not replace its plan."""
    model, x = Branching(6, width=96), torch.randn(96, 96)
    peak_of(model, x)
    model.zero_grad()
    least = lowtide.plan(lambda x: model(x).square().mean(), x).minimum_peak
    limit = lowtide.budget(int(1.02 * least))
    planned = []
    for number in range(10):
        if number % 2 == 0:
            model.zero_grad()
        assert peak_of(model, x, limit) <= limit.limit, f"step {number}"
        planned.append(limit.report().planned_peak)
    assert len(set(planned[-4:])) == 2
    assert planned[-4:-2] == planned[-2:]


def test_a_backward_that_cannot_fit_is_refused_before_it_runs() -> None:
    model, x = Branching(4, width=128), torch.randn(16, 128)
    plain = peak_of(model, x)
    model.zero_grad()
    limit = lowtide.budget(plain // 3)  # gradients alone are more
    with limit:
        loss = model(x).square().mean()
    for _ in range(2):  # refused again if called again
        with pytest.raises(lowtide.BudgetError) as caught:
            loss.backward()
        assert caught.value.minimum > limit.limit
        assert "The smallest limit known to suffice is" in str(caught.value)
        assert "not measured yet, but computed from sizes" in str(caught.value)
    assert not gradients(model)
    with limit:  # after a refusal, a step that fits runs
        loss = model.layers[0](x).square().mean()
    loss.backward()


def test_a_refusal_in_the_forward_says_what_it_does_not_know() -> None:
    model, x = Branching(4), torch.randn(512, 32)
    with pytest.raises(lowtide.BudgetError) as caught, lowtide.budget(100_000):
        model(x).square().mean()
    text = str(caught.value)
    assert "At operation 1 of the forward (aten::sin)" in text
    assert "needs at least" in text
    assert "the rest of the step is not known yet" in text
    assert f"{caught.value.minimum} bytes" in text


def test_a_fitted_model_counts_gradients_it_has_not_come_to() -> None:
    model, x = Branching(4), torch.randn(8, 32)
    nbytes = sum(4 * p.numel() for p in model.parameters())
    fitted = lowtide.fit(model, 500)
    with pytest.raises(lowtide.BudgetError) as caught:
        model(x)
    fitted.remove()
    assert caught.value.minimum > nbytes


def test_a_layer_that_has_no_parameters_yet_has_no_bytes() -> None:
    """A lazy layer makes its parameters when it is first called: until then nobody knows them."""

    def losses(limit: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.LazyLinear(64), nn.Tanh())
        fitted = None if limit is None else lowtide.fit(model, limit)
        made = []
        for _ in range(3):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            made.append(loss.detach())
        if fitted is not None:
            fitted.remove()
        return made + [p.grad for p in model.parameters() if p.grad is not None]

    plain, limit, refusals = losses(None), 4000, 0
    while True:
        try:
            planned = losses(limit)
            break
        except lowtide.BudgetError as refused:
            limit, refusals = refused.minimum, refusals + 1
    # At the first operation, at others before the lazy layer, and once its parameters are known.
    assert refusals in (2, 3, 4)
    assert len(plain) == 7
    assert same(plain, planned)


@pytest.mark.parametrize("way", ["budget", "fit"])
def test_parameters_can_be_swapped_once_their_budget_is_gone(way: str) -> None:
    """torch swaps no tensor that has weak references, and a budget knows leaves by them."""
    model = nn.Linear(4, 4)
    budget = lowtide.fit(model, "1 MB") if way == "fit" else lowtide.budget("1 MB")
    with contextlib.nullcontext() if way == "fit" else budget:
        loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    del loss
    model.zero_grad()
    other = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model.weight, other)
    if isinstance(budget, lowtide.FittedBudget):
        budget.remove()
    del budget
    gc.collect()
    torch.utils.swap_tensors(model.weight, other)
    assert not model.weight.any()


@pytest.mark.parametrize(("name", "way"), FOLLOWED)
def test_following_the_advice_ends_soon(name: str, way: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    original, batch = case.build(), case.batch()

    def run(model: nn.Module, limit: Any = None) -> int:
        def step() -> None:
            if limit is None:
                loss = case.loss(model, batch)
            else:
                with limit:
                    loss = case.loss(model, batch)
            loss.backward()

        model.zero_grad()
        return lowtide.measure(step, device="cpu").peak_bytes

    run(copy.deepcopy(original))
    plain = run(copy.deepcopy(original))
    nbytes, refusals = plain // 10, 0
    while True:
        model = copy.deepcopy(original)
        fitted = lowtide.fit(model, nbytes) if way == "fit" else None
        limit = lowtide.budget(nbytes) if way == "budget" else None
        try:
            peaks = [run(model, limit) for _ in range(3)]
            break
        except lowtide.BudgetError as error:
            named = error.minimum
        finally:
            if fitted is not None:
                fitted.remove()
        assert named > nbytes
        nbytes = named
        refusals += 1
    assert 1 <= refusals <= 4
    assert nbytes <= 2 * plain  # convolutions of a few KiB take a scratchpad of up to 40 KiB
    assert max(peaks) <= nbytes


class Looks(nn.Module):
    """A value that the plan holds is first read by an operation whose result is discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: Tensor) -> Tensor:
        wide = x @ self.weight
        assert wide.sum().item() < float("inf")
        return torch.stack([(wide + i).sin().sum() for i in range(10)]).sum()


def test_a_held_value_outlives_a_first_reader_that_makes_nothing() -> None:
    torch.manual_seed(0)
    model, x = Looks(), torch.randn(512, 256)
    budget, step = budgeted(model, x, 0.6)
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    for _ in range(4):
        assert step() <= budget.limit
        assert torch.equal(model.weight.grad, gradient)
    budget.report()
    plan = budget._loop._plans.expected(0)
    assert ANCHOR in plan.choices  # the product is held although nothing saves it
    assert budget._loop._reported.last is not None
    assert not budget._loop._reported.last.switched


def test_whoever_makes_a_budget_for_every_step_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such a budget keeps its limit, but has nothing to plan from."""
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)

    def one_step(budget: lowtide.Budget) -> None:
        with budget:
            loss = model(x).square().mean()
        loss.backward()

    for _ in range(12):
        one_step(lowtide.budget("123 MiB"))
    told = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    assert len(told) == 1
    assert "one before the loop" in told[0]
    assert "5 budgets of 123.0 MiB" in told[0]
    caplog.clear()
    for _ in range(12):
        budget = lowtide.budget("124 MiB")
        one_step(budget)
        one_step(budget)
    assert not caplog.records
    for _ in range(12):
        with lowtide.budget("125 MiB"):  # an epoch in one context: the budget plans inside it
            for _ in range(2):
                model(x).square().mean().backward()
    assert not caplog.records
    for more in range(200):  # such a program is not remembered limit by limit
        one_step(lowtide.budget((1 << 27) + more))
    assert len(lowtide.budget.__globals__["_beginners"]) <= 64


def test_steps_are_measured_in_vain_ever_more_seldom() -> None:
    """Where nobody knows which step comes next, the one that begins may never be the one that is to
    be measured."""
    settled = SimpleNamespace(lessons=2, measured=True, tried=True, grown=False, of_plain=None)
    due = SimpleNamespace(lessons=1, measured=True, tried=False, grown=False, of_plain=None)
    effort, measured = Effort(), []

    def steps(count: int) -> list[int]:
        measured.clear()
        for number in range(count):
            if effort.to_measure(due, lambda: False):  # type: ignore[arg-type]
                measured.append(number)
                effort.measured(settled)  # type: ignore[arg-type]
        return measured

    assert steps(1_000) == [0, 1, 4, 11, 26, 57, 120, 247, 502, 757]
    effort.measured(due)  # type: ignore[arg-type]
    assert steps(100) == [0, 31, 94]  # one came after all: more patience than before


def test_a_step_that_begins_under_another_ones_plan_is_measured_under_its_own() -> None:
    """Both are at one place of the loop, and the one that comes seldom was measured before it had
    the plan that it follows."""
    seen = SimpleNamespace(parameters={})
    plan = {"lessons": 2, "measured": True, "grown": False, "of_plain": None, "seconds": 0.0}
    often = SimpleNamespace(**plan, tried=True, digest=1, seen=seen)
    seldom = SimpleNamespace(**plan, tried=False, digest=2, seen=seen)
    effort = Effort()
    for number, follows in enumerate([often, often, often, seldom] * 3):
        effort.begins(number)
        measured = effort.to_measure(often, lambda: False)  # type: ignore[arg-type]
        if measured:
            effort.measured(follows)  # type: ignore[arg-type]
        if follows is seldom and measured:
            break
        effort.followed(follows, covered=False, measured=measured)  # type: ignore[arg-type]
    assert number == 7  # the second time that it came
