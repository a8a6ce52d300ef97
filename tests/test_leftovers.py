"""What a step made is freed with it, even in the first step of a process and if it is refused:
nothing waits for Python's garbage collector (rules 8 and 10)."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lowtide
from once import on_one_recorder

ALIVE: list[weakref.ref[Tensor]] = []


class Skips(nn.Module):
    """User code holds every activation, so a small limit refuses the step halfway."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
            kept.append(x)
            ALIVE.append(weakref.ref(x))
        total = kept[0].sin()
        for each in kept[1:]:
            total = total + each.sin()
        return total


def attempt(limit: lowtide.Budget, model: nn.Module) -> str:
    """One step; returns whether it "ran" or was "refused"."""
    try:
        with limit:
            loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
    except lowtide.BudgetError:
        return "refused"
    return "ran"


def left_alive() -> int:
    count = sum(weak() is not None for weak in ALIVE)
    assert ALIVE
    ALIVE.clear()
    return count


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    ALIVE.clear()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection", "one_thread")
@pytest.mark.parametrize("share", [0.3, 0.4, 0.8, 1.0])
def test_nothing_of_a_step_outlives_it(share: float) -> None:
    model = Skips()
    plain = lowtide.plan(lambda x: model(x).square().mean(), torch.randn(512, 64)).plain_peak
    ALIVE.clear()
    limit = lowtide.budget(int(share * plain))
    said = set()
    for _ in range(4):
        model.zero_grad()
        said.add(attempt(limit, model))
        assert left_alive() == 0
    assert said == {"refused" if share < 0.7 else "ran"}


def test_an_error_that_is_said_again_is_another_one() -> None:
    """Keeping the first one would keep the frames in which it was raised."""
    first = lowtide.BudgetError("full", limit=3, minimum=5)
    again = first.again()
    assert again is not first
    assert (str(again), again.limit, again.minimum) == ("full", 3, 5)


FIRST = """
import gc; gc.disable()
import sys; sys.path[:0] = [{tests!r}]
import torch, lowtide, test_leftovers as here
assert "torch._dynamo" not in sys.modules
for limit in ({limit}, "1 GB"):
    print(here.attempt(lowtide.budget(limit), here.Skips()), here.left_alive())
assert "torch._dynamo" in sys.modules
"""


@on_one_recorder
def test_nor_in_the_first_step_of_a_process() -> None:
    """torch imports Dynamo there, which keeps the frames that it was imported from."""
    program = FIRST.format(tests=str(__file__).rpartition("/")[0], limit=600_000)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "0", "ran", "0"]
