"""No step, planned, measured, given up or refused, leaves anything for Python's garbage collector,
which large training runs switch off (rules 8 and 10)."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import lowtide

Step = Callable[[], object]


def net() -> nn.Sequential:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.BatchNorm1d(32), nn.Dropout(0.1))

    return nn.Sequential(*(block() for _ in range(4)))


def loss_of(model: Callable[[Tensor], Tensor], rows: int = 256) -> Tensor:
    return model(torch.randn(rows, 32)).square().mean()


def outside(limit: object) -> Step:
    """The backward runs outside of the budget."""
    model, budget = net(), lowtide.budget(limit)  # type: ignore[arg-type]

    def step() -> None:
        with budget:
            loss = loss_of(model)
        loss.backward()
        model.zero_grad()

    return step


def whole(limit: object) -> Step:
    model, budget = net(), lowtide.budget(limit)  # type: ignore[arg-type]

    def step() -> None:
        with budget:
            loss_of(model).backward()
        model.zero_grad()

    return step


def changing() -> Step:
    model, budget = net(), lowtide.budget(0.6)
    rows = iter(range(128, 256))

    def step() -> None:
        with budget:
            loss_of(model, next(rows)).backward()
        model.zero_grad()

    return step


def twice() -> Step:
    """A second derivative inside the budget."""
    model, budget = (
        nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)),
        lowtide.budget("1 GB"),
    )

    def step() -> None:
        x = torch.randn(64, 32, requires_grad=True)
        with budget:
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = slope.square().mean()
        loss.backward()
        model.zero_grad()

    return step


def without_backward() -> Step:
    model, budget = net(), lowtide.budget(0.6)

    def step() -> None:
        with budget:
            loss_of(model)

    return step


def raising() -> Step:
    model, budget = net(), lowtide.budget(0.6)

    def step() -> None:
        try:
            with budget:
                loss_of(model)
                raise ValueError
        except ValueError:
            pass

    return step


def refused() -> Step:
    model, budget = net(), lowtide.budget("20 KB")

    def step() -> None:
        try:
            with budget:
                loss_of(model).backward()
        except lowtide.BudgetError:
            return
        raise AssertionError("20 KB were enough")

    return step


def region() -> Step:
    model = net()

    def step() -> None:
        y = torch.randn(64, 32, requires_grad=True)
        for block in model:
            y = lowtide.checkpoint(block, y)
        y.sum().backward()
        model.zero_grad()

    return step


def fitted() -> Step:
    model = net()
    lowtide.fit(model, 0.6)

    def step() -> None:
        loss_of(model).backward()
        model.zero_grad()

    return step


def of_lowtide(garbage: object) -> str | None:
    """What it is, if it is lowtide's: torch leaves functions that refer to themselves."""
    kind = garbage if hasattr(garbage, "__qualname__") else type(garbage)
    ours = str(getattr(kind, "__module__", "")).startswith(("lowtide", "_lowtide"))
    return getattr(kind, "__qualname__", None) if ours else None


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    gc.collect()


STEPS: dict[str, Callable[[], Step]] = {
    "all kept": lambda: outside("1 GB"),
    "replayed": lambda: outside(0.6),
    "whole, all kept": lambda: whole("1 GB"),
    "whole, replayed": lambda: whole(0.6),
    "changing": changing,
    "second derivative": twice,
    "without backward": without_backward,
    "raising": raising,
    "refused": refused,
    "region": region,
    "fitted": fitted,
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", STEPS)
def test_no_step_waits_for_the_garbage_collector(kind: str) -> None:
    STEPS[kind]()()  # what is imported and cached by the first step of a process is not its own
    step = STEPS[kind]()
    gc.collect()
    gc.freeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(12):
        step()
    gc.collect()
    assert Counter(filter(None, map(of_lowtide, gc.garbage))) == {}
