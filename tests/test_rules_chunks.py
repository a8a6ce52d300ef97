"""Rule 4: parts of one memory with a version counter each, as `unsafe_chunk` makes them.

torch's recurrent cells consist of them. A write through one of them is shown to what autograd saved
through that very part, and to nothing else. Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import WAYS, Way, bits
from lowtide import engine
from lowtide.tape.recorder import Recorder

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
pytestmark = pytest.mark.usefixtures("one_thread")


def gradient(way: Way | None, function: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    p = torch.randn(64, 32, requires_grad=True)
    loss = function(p) if way is None else way(function, p)
    (found,) = torch.autograd.grad(loss, p)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    return bits(one) == bits(other)


def gates(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def run(p: Tensor) -> Tensor:
        one, two = (p * 2).unsafe_chunk(2, 1)
        summed = one.sigmoid_().sum()  # saves its result, through this part
        two.tanh_()
        change(one)
        return summed + two.sum()

    return run


def nothing(_: Tensor) -> None:
    pass


def in_grad_mode(part: Tensor) -> None:
    part.mul_(3)


@torch.no_grad()
def without_grad(part: Tensor) -> None:
    part.mul_(3)


@pytest.mark.parametrize("change", [in_grad_mode, without_grad])
@every_way
def test_what_was_saved_through_a_part_keeps_its_content_when_that_is_written(
    change: Callable[[Tensor], Any], way: Way
) -> None:
    """The plain step raises. Its gradient for the content that was saved is the right one."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(None, gates(change))
    assert same(gradient(way, gates(change)), gradient(None, gates(nothing)))


@every_way
def test_what_was_saved_through_a_part_follows_a_write_to_the_whole(way: Way) -> None:
    """The part's counter does not move, so autograd goes on with the new content."""

    def run(p: Tensor) -> Tensor:
        whole = p * 2
        one, _ = whole.unsafe_chunk(2, 1)
        squared = one.pow(2).sum()  # saves the part
        return squared + whole.exp_().sum()

    right = gradient(None, run)
    assert same(gradient(way, run), right)
    torch.manual_seed(0)
    p = torch.randn(64, 32)
    new = (2 * p).exp()
    expected = 2 * new
    expected[:, :16] += 4 * new[:, :16]  # not 4 * (2 * p)
    torch.testing.assert_close(right, expected)


@every_way
def test_a_write_that_some_of_what_was_saved_is_shown(way: Way) -> None:
    """The whole was saved, too: that keeps its content, while the part goes on with the new one."""

    def run(p: Tensor) -> Tensor:
        whole = p * 2
        sines = whole.sin().sum()  # saves the whole
        one, _ = whole.unsafe_chunk(2, 1)
        squared = one.pow(2).sum()  # saves the part
        with torch.no_grad():
            whole.mul_(3)
        return sines + squared

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(None, run)
    torch.manual_seed(0)
    p = torch.randn(64, 32)
    expected = 2 * (2 * p).cos()
    expected[:, :16] += 4 * (6 * p)[:, :16]
    torch.testing.assert_close(gradient(way, run), expected)


# ---------------------------------------------------------------------- programs by chance

IN_PLACE = ["sigmoid_", "tanh_", "relu_", "exp_", "neg_", "sin_"]


def program(seed: int) -> Callable[[Tensor], Tensor]:
    """Splits memory into parts and writes and reads them, by chance; the same for each call."""

    def run(p: Tensor) -> Tensor:
        draw = random.Random(seed)
        known = [p * 0.5, p.sin()]
        for _ in range(draw.randint(4, 12)):
            kind, x = draw.random(), draw.choice(known)
            y = draw.choice([other for other in known if other.shape == x.shape])
            if kind < 0.25 and x.shape[-1] % 2 == 0:
                split = draw.choice([Tensor.unsafe_chunk, Tensor.chunk])
                known.extend(split(x, 2, -1))
            elif kind < 0.3:
                known.append(draw.choice([x.data, x.detach()]))
            elif kind < 0.65:
                try:
                    getattr(x, draw.choice(IN_PLACE))() if draw.random() < 0.7 else x.mul_(y)
                except RuntimeError:  # parts of a `chunk` must not be written
                    continue
            else:
                known.append(draw.choice([x * y, (x + y).tanh(), x.exp(), x.pow(2), x.clone()]))
            if len(known) > 7:
                known.pop(draw.randrange(len(known)))
        return sum((x.square().mean() for x in known if x.requires_grad), p.sum() * 0.1)

    return run


@every_way
def test_programs_on_parts_do_what_the_plain_ones_do(way: Way) -> None:
    compared = 0
    for seed in range(60):
        try:
            plain = gradient(None, program(seed))
        except RuntimeError:  # autograd has noticed a write
            continue
        try:
            mine = gradient(way, program(seed))
        except lowtide.BudgetError:
            continue
        assert same(mine, plain), seed
        compared += 1
    assert compared > 20


# ---------------------------------------------------------------------- the compiled recorder


@pytest.mark.skipif(engine.name() != "compiled", reason="runs with the compiled recorder")
def test_a_planned_recurrent_cell_is_not_recorded_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(8, 16), torch.randn(10, 32, 8)

    def loss() -> Tensor:
        state = None
        for each in x:
            state = cell(each, state)
        return state[0].square().mean()

    peak = lowtide.measure(lambda: loss().backward(), device="cpu").peak_bytes
    budget = lowtide.budget(int(0.7 * peak))
    in_python: list[str] = []
    run = Recorder._run_recorded
    monkeypatch.setattr(
        Recorder,
        "_run_recorded",
        lambda self, facts, *rest: (in_python.append(facts.name), run(self, facts, *rest))[1],
    )
    for _ in range(12):
        cell.zero_grad()
        in_python.clear()
        with budget:
            value = loss()
        value.backward()
        budget._loop._beside.wait()
    report = budget.report()
    assert report.planned
    assert report.replayed_operations > 0
    assert "aten::sigmoid_" not in in_python
    assert "aten::unsafe_split" not in in_python


SAVED = ["one", "two", "one two", "two one", "whole one", "one whole", "whole two one"]


def parts(saved: str, way: Way | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    p = torch.randn(8, 4, requires_grad=True)
    found: dict[str, Tensor] = {}

    def run(p: Tensor) -> Tensor:
        whole = p * 2
        one, two = whole.unsafe_chunk(2)
        found.update(whole=whole, one=one, two=two)
        return torch.stack([found[name].sin().sum() for name in saved.split()]).sum()

    return p, run(p) if way is None else way(run, p), found


def with_room(function: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    """Everything is held, so that a write reaches it."""
    with lowtide.budget("1 MB"):
        return function(p)


@pytest.mark.parametrize("written", ["one", "two", "whole"])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("way", [*WAYS.values(), with_room], ids=[*WAYS, "with room"])
def test_a_part_that_is_written_while_nothing_records(way: Way, saved: str, written: str) -> None:
    """Where the plain step raises, this one does too or has the gradient of what was saved, which a
    replay makes. Where autograd goes on with the new content, so does what is held."""

    def gradient_after(way: Way | None, *, change: bool = True) -> Tensor | str:
        p, loss, found = parts(saved, way)
        if change:
            found[written].detach().mul_(3)
        try:
            return torch.autograd.grad(loss, p)[0]
        except RuntimeError as error:
            return str(error)

    plain, mine = gradient_after(None), gradient_after(way)
    if isinstance(mine, str):
        assert isinstance(plain, str)
        assert "modified by an in-place operation" in mine
        return
    right = gradient_after(None, change=False)
    assert isinstance(right, Tensor)
    assert same(mine, right) or (isinstance(plain, Tensor) and same(mine, plain))
