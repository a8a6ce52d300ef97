"""Forwards that an error, or a generator that is closed, ends early, and their backwards (rule 10).

A hook that raises ends a forward whose deepest features nobody wants (perceptual losses); a loop
that leaves a generator closes the budget in it. What was made until then has a graph like any
other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide import BudgetError
from one_step import gradients

pytestmark = pytest.mark.usefixtures("one_thread")

PEAK = 0.6


class Enough(Exception):
    pass


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(6)
        ]
    )


def batch(seed: int, count: int = 256) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def features(model: nn.Sequential, x: Tensor, layer: int) -> Tensor:
    """What this layer makes, and nothing after it runs."""
    found: list[Tensor] = []

    def stop(module: nn.Module, args: object, out: Tensor) -> None:
        found.append(out)
        raise Enough

    handle = model[layer].register_forward_hook(stop)
    try:
        model(x)
    except Enough:
        pass
    finally:
        handle.remove()
    return found.pop()


def peak_of(model: nn.Sequential, x: Tensor, layer: int | None) -> int:
    model.zero_grad()

    def run() -> None:
        torch.manual_seed(1)
        out = model(x) if layer is None else features(model, x, layer)
        out.square().mean().backward()

    return lowtide.measure(run, device="cpu").peak_bytes


@pytest.mark.parametrize("early", [[0, 1, 2, 3], [1, 4], [2, 3, 5]])
@pytest.mark.parametrize("share", [PEAK, 4.0])  # tight, and with room to spare
def test_a_forward_that_a_hook_ends(share: float, early: list[int]) -> None:
    model = blocks()
    twin = copy.deepcopy(model)
    limit = int(share * max(peak_of(twin, batch(0), layer) for layer in (None, 4)))
    lowtide.fit(model, limit)
    for number in range(8):
        layer = (4 if number % 3 else 2) if number in early else None
        peak_of(twin, batch(number), layer)
        assert peak_of(model, batch(number), layer) <= limit
        assert same(gradients(model), gradients(twin))


def parts(model: nn.Sequential, x: Tensor, budget: lowtide.Budget) -> Generator[Tensor]:
    with budget:
        for part in model:
            x = part(x)
            yield x


def test_a_budget_in_a_generator_that_is_closed() -> None:
    model, budget = blocks(), lowtide.budget(0.6)
    twin = copy.deepcopy(model)
    for number in range(6):
        for one in (model, twin):
            one.zero_grad()
            torch.manual_seed(number)
            out, steps = batch(number), parts(model, batch(number), budget)
            for place in range(4):
                out = next(steps) if one is model else twin[place](out)
            steps.close()
            out.mean().backward()
        assert same(gradients(model), gradients(twin))


def then_raising(
    budget: lowtide.Budget, make: Callable[[], Tensor], then: Callable[[Tensor], object]
) -> Tensor:
    """What is made in the budget before an error ends it."""
    made: list[Tensor] = []
    with suppress(Enough, KeyboardInterrupt, BudgetError, torch.OutOfMemoryError), budget:
        made.append(make())
        then(made[0])
        raise AssertionError
    return made.pop()


def raising(error: type[BaseException]) -> Callable[[Tensor], object]:
    def end(made: Tensor) -> None:
        raise error

    return end


def test_what_a_refused_forward_has_made_has_its_gradients() -> None:
    model, budget = blocks(), lowtide.budget(700_000)
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    half = then_raising(budget, lambda: model[:3](batch(0)), lambda x: model[3:](x.repeat(16, 1)))
    half.mean().backward()
    torch.manual_seed(0)
    twin[:3](batch(0)).mean().backward()
    assert same(gradients(model), gradients(twin))
    with budget:
        out = model[:3](batch(1))
    out.mean().backward()  # the budget serves on
    assert budget.report().steps == 2


def test_steps_that_all_end_early_are_learned_from() -> None:
    model = blocks()
    limit = int(PEAK * peak_of(model, batch(0), 4))
    budget = lowtide.fit(model, limit)
    for number in range(5):
        assert peak_of(model, batch(number), 4) <= limit
    report = budget.report()
    assert report.planned
    assert report.measured_steps >= 2
    assert report.measured_peak is not None
    assert report.measured_peak <= limit


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_half_a_step_teaches_nothing(error: type[BaseException]) -> None:
    model, budget = blocks(), lowtide.budget(10**9)
    for _ in range(5):
        then_raising(budget, lambda: model(batch(0)).mean(), raising(error)).backward()
    report = budget.report()
    assert report.measured_steps == 0
    assert not list(budget._loop._plans)


def test_a_forward_that_failed_gives_way_to_a_measurement() -> None:
    """The traceback may have its graph for long; it is then not measured to its end."""
    model, budget = blocks(), lowtide.budget(10**9)
    out = then_raising(budget, lambda: model(batch(0)).mean(), raising(Enough))
    assert peak_of(blocks(), batch(0), None) > 0  # no UsageError
    out.backward()
    assert budget.report().measured_steps == 0
