"""What is dropped while a step runs that has no plan."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.running import online
from lowtide.running.online import Evictor
from once import on_one_recorder

pytestmark = on_one_recorder


class Op:
    def __init__(self, seconds: float, reads: list[FakeValue]) -> None:
        self.seconds, self.reads = seconds, reads

    def values(self) -> list[FakeValue]:
        return self.reads


class FakeValue:
    def __init__(self, number: int, nbytes: int, op: Op | None, held: bool = True) -> None:
        self.number, self.nbytes, self.op = number, nbytes, op
        self.held: object | None = object() if held else None


class Forward:
    """Values that are made one after the other, and those of them that were dropped."""

    def __init__(self) -> None:
        self.live = [0]
        self.evictor: Any = Evictor(self.live)
        self.values: list[FakeValue] = []
        self.dropped: list[int] = []

    def make(
        self, seconds: float, *reads: FakeValue, nbytes: int = 10, held: bool = True
    ) -> FakeValue:
        value = FakeValue(len(self.values), nbytes, Op(seconds, list(reads)), held)
        self.live[0] += nbytes if held else 0
        self.values.append(value)
        self.evictor.add([value])
        return value

    def drop(self, value: FakeValue) -> None:
        value.held = None
        self.live[0] -= value.nbytes
        self.dropped.append(value.number)

    def shrink(self, target: int) -> bool:
        enough: bool = self.evictor.shrink(target, self.drop)
        return enough


def test_the_cheapest_per_byte_goes_first() -> None:
    forward = Forward()
    for seconds, nbytes in ((3.0, 10), (1.0, 10), (4.0, 100), (2.0, 10)):
        forward.make(seconds, nbytes=nbytes)
    assert forward.shrink(130)
    assert forward.dropped == []
    assert forward.shrink(29)
    assert forward.dropped == [2, 1]
    assert not forward.shrink(-1)
    assert forward.dropped == [2, 1, 3, 0]
    assert forward.evictor.drops == 4


def test_what_a_dropped_ancestor_makes_dearer_is_looked_at_again() -> None:
    forward = Forward()
    first = forward.make(1.0)
    second = forward.make(1.1, first)
    forward.make(1.2, second)
    forward.make(2.0)
    forward.shrink(30)
    assert forward.dropped == [0]
    forward.shrink(20)  # the second would now take 2.1
    assert forward.dropped == [0, 2]
    forward.shrink(10)
    assert forward.dropped == [0, 2, 3]


def test_what_nobody_holds_is_paid_for() -> None:
    forward = Forward()
    unheld = forward.make(1.0, held=False)
    for _ in range(3000):  # deeper than Python recurses
        unheld = forward.make(1.0, unheld, held=False)
    forward.make(0.5, unheld)
    forward.make(100.0)
    forward.shrink(10)
    assert forward.dropped == [3002]


def test_what_comes_to_be_held_unnoticed_is_found() -> None:
    forward = Forward()
    forward.make(1.0)
    later = forward.make(5.0, held=False)
    later.held = object()
    forward.live[0] += later.nbytes
    assert forward.shrink(0)
    assert forward.dropped == [0, 1]
    forward.evictor.held(later)  # it is not held
    assert not forward.shrink(-1)
    assert forward.dropped == [0, 1]


def test_what_is_not_freed_is_dropped_once() -> None:
    forward = Forward()
    forward.make(1.0)
    kept = forward.make(2.0)
    tried = []

    def drop(value: FakeValue) -> None:
        tried.append(value.number)
        if value is not kept:
            forward.drop(value)

    assert not forward.evictor.shrink(0, drop)
    assert tried == [0, 1]


def test_each_is_priced_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = 0
    price = online.Evictor._price

    def counting(evictor: Evictor, value: Any) -> float:
        nonlocal priced
        priced += 1
        return price(evictor, value)

    monkeypatch.setattr(online.Evictor, "_price", counting)
    forward = Forward()
    value = forward.make(1.0)
    for _ in range(2000):
        value = forward.make(1.0, value)
        assert forward.shrink(200)
    assert len(forward.dropped) == 1981
    assert priced < 8 * 2000
