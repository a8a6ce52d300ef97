"""Guessing which known step comes next, so that it begins under its own plan.

A wrong guess costs time only: rule 13 of docs/semantics.md holds under any plan.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle, islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.learning import turns
from lowtide.learning.turns import Turns
from once import on_one_recorder

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


def plan(digest: int, place: int = 0) -> Any:
    return SimpleNamespace(digest=digest, seen=SimpleNamespace(place=place))


def right(steps: list[int]) -> list[bool]:
    """For each step but the first, whether it was expected."""
    known, found = Turns(), []
    known.followed(plan(steps[0]))
    for last, now in pairwise(steps):
        guess = known.next(0)
        found.append(now == (last if guess is None else guess))
        known.followed(plan(now))
    return found


@pytest.mark.parametrize(
    "turn",
    [[1], [1, 2], [1, 2, 3], [1, 1, 1, 2], [1] * 7 + [2], [1, 2, 1, 3], [1, 1, 2, 2, 3]],
    ids=str,
)
def test_steps_that_take_turns_are_expected(turn: list[int]) -> None:
    found = right(list(islice(cycle(turn), 8 * len(turn))))
    assert all(found[5 * len(turn) :])


def test_a_loop_with_a_last_batch_expects_the_usual_one() -> None:
    found = right(([1] * 99 + [2]) * 4)
    assert found.count(False) == 4 + 3  # the last batch, and the step after it


def test_where_steps_are_drawn_at_random_the_last_one_is_as_good_a_guess() -> None:
    draw = random.Random(0)
    steps = [draw.randrange(20) for _ in range(5_000)]
    last = sum(map(int.__eq__, steps, steps[1:]))
    assert sum(right(steps)) > 0.7 * last


def test_each_place_in_a_context_has_its_own_turns() -> None:
    known = Turns()
    for number in range(20):
        known.followed(plan(number % 2))
        known.followed(plan(7, place=1))
    assert known.next(0) == 0
    assert known.next(1) is None  # the last one


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_KEPT", 100)
    known = Turns()
    for number in range(1_000):
        known.followed(plan(number))
    assert len(known._after) <= 100
    assert len(known._history[0]) == 8


# ---------------------------------------------------------------------- in a loop


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def layers(count: int) -> nn.Sequential:
            each = (
                nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in "a" * count
            )
            return nn.Sequential(*each)

        self.trunk, self.heads = layers(4), nn.ModuleList(map(layers, (1, 2, 4)))

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](self.trunk(x)).square().mean()
        return out


def in_turns() -> Iterator[int]:
    return cycle([0, 2, 1, 1])


def test_steps_in_turns_begin_under_their_own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Heads(), torch.randn(256, 32)
    other = copy.deepcopy(model)
    most = lowtide.measure(lambda: model(x, 2).backward(), device="cpu").peak_bytes
    budget = lowtide.budget(int(0.7 * most))
    changed: list[int] = []
    change = lowtide.running.forward.ForwardDecisions._changed
    monkeypatch.setattr(
        lowtide.running.forward.ForwardDecisions,
        "_changed",
        lambda self, *args: (changed.append(1), change(self, *args))[1],
    )
    for number, head in enumerate(islice(in_turns(), 60)):
        if number == 40:
            changed.clear()
        for net, context in ((model, budget), (other, nullcontext())):
            net.zero_grad()
            with context:
                loss = net(x, head)
            loss.backward()
        for mine, plain in zip(model.parameters(), other.parameters(), strict=True):
            assert (mine.grad is None) == (plain.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, plain.grad)
    assert not changed
    assert budget.report().planned
    assert budget.report().highest_peak <= budget.limit
