"""A first step's backward that does not ask for all that it was modelled to ask for (rule 13)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from by_hand import same
from lowtide import engine
from lowtide.errors import BudgetError
from lowtide.observing.reached import UNKNOWN
from lowtide.planner.retention import HOLD, NEVER
from lowtide.running.expected import Expected
from lowtide.tape.values import Value

pytestmark = pytest.mark.usefixtures("one_thread")


def beside(x: Tensor, limit: Any) -> tuple[Tensor, ...]:
    """A step that holds the graph of a number in a variable, which its backward does not reach."""
    x.grad = None
    with limit:
        h = x
        for place in range(16):
            h = h.sin()
            if place == 12:
                aside = h.pow(3).mean()
        loss = h.sin().sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), aside.detach(), x.grad


@pytest.mark.parametrize("recorder", ["python", engine.name()])
@pytest.mark.parametrize("share", [0.4, 0.45, 0.5])
def test_what_only_an_unreached_graph_keeps_is_dropped(recorder: str, share: float) -> None:
    """A first step that drops what another machine's times say is dearer may be refused."""
    x = torch.linspace(0, 1, 1 << 14).requires_grad_()
    plain = beside(x, contextlib.nullcontext())
    peak = lowtide.measure(lambda: beside(x, contextlib.nullcontext()), device="cpu").peak_bytes
    with engine.use(recorder):
        limit, ran = lowtide.budget(int(share * peak)), 0
        for _ in range(4):
            found: list[tuple[Tensor, ...]] = []
            with contextlib.suppress(BudgetError):
                took = lowtide.measure(lambda to=found: to.append(beside(x, limit)), device="cpu")
                assert took.peak_bytes <= share * peak
                assert same(plain, found[0])
                ran += 1
        assert ran >= 3


class Made:
    """Stands for a value that a replay has retained."""

    def __init__(self, number: int) -> None:
        self.number, self.op, self.held = number, self, object()


def expected(order: list[tuple[int, tuple[int, int]]], *choices: list[int]) -> Expected:
    def no_values() -> Iterator[Value]:
        return iter(())

    return Expected(order, lambda: (), no_values, *choices)


def test_a_request_that_is_not_made_moves_what_was_decided_for_later_ones() -> None:
    choices = [0, 1, 2, 3, HOLD, NEVER]
    order = [(5, (9, 9)), (6, (7, 8)), (7, (6, 6)), (8, (5, 5))]
    backward = expected(order, choices)
    backward.asked(0, 5, 9)
    backward.asked(1, 7, 6)
    assert choices == [0, 1, 1, 2, HOLD, NEVER]
    backward.asked(2, 6, 8)  # another thread's node
    assert choices == [0, 1, 1, 2, HOLD, NEVER]
    backward.asked(3, 8, 5)
    assert choices == [0, 1, 1, 2, HOLD, NEVER]


def test_a_late_request_moves_them_back() -> None:
    choices = [0, 1, 2, 3, 4]
    backward = expected([(5, (9, 9)), (6, (7, 8)), (7, (6, 6)), (8, (5, 5))], choices)
    backward.asked(0, 7, 6)
    assert choices == [0, 0, 0, 1, 2]
    backward.asked(1, 6, 8)
    assert choices == [0, 0, 0, 1, 3]


def test_two_nodes_may_ask_for_one_value_in_another_order() -> None:
    choices = [0, 1, 2, 3, 4]
    order = [(5, (6, 6)), (5, (7, 8)), (6, (6, 6)), (7, (4, 4)), (8, (3, 3))]
    backward = expected(order, choices)
    for index, (value, node) in enumerate([(5, 8), (6, 6), (5, 6), (7, 4)]):
        backward.asked(index, value, node)
    assert not [*backward.outlived()]
    assert choices == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("order", "node"),
    [
        ([(5, (3, 3)), (6, (7, 7))], 7),  # what is expected is of an older node
        ([(5, UNKNOWN), (6, (7, 7))], 7),  # of one that is not known
        ([(5, (9, 9)), (6, (7, 7))], None),  # nobody knows which node asks
        ([(5, (9, 9)), (4, (7, 7))], 7),  # what is asked for is not expected
    ],
)
def test_in_doubt_nothing_is_changed(order: list[Any], node: int | None) -> None:
    choices = [0, 1, 2, 3]
    backward = expected(order, choices)
    backward.asked(0, 6, node)
    assert choices == [0, 1, 2, 3]


def test_what_lives_too_long_is_dropped_once_a_request_was_not_made() -> None:
    values: Any = [Made(number) for number in range(4)]
    values[1].op = None  # nothing would make it again
    order = [(0, (9, 9)), (1, (8, 8)), (2, (7, 7)), (3, (6, 6))]
    backward = Expected(order, lambda: [0, 0, 1, 3], lambda: iter(values))
    backward.asked(0, 0, 9)
    assert not [*backward.outlived()]
    backward.asked(1, 2, 7)
    assert {value.number for value in backward.outlived()} == {0, 2}
    assert not [*backward.outlived()]
