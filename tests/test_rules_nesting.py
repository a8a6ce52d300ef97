"""Rule 9: nested regions free their insides, and no depth is bounded by Python's stack.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import Way, check, counted, gradients, leaf
from by_hand import same


def once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def nested(depth: int, way: Way, x: Tensor, w: Tensor) -> Tensor:
    y = (x * w).sin()
    if depth:
        out: Tensor = way(nested, depth - 1, way, y, w)
        return out
    return y


def test_regions_inside_regions() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(6), leaf(6)

        def inner(x: Tensor, times: float) -> Tensor:
            return (x * w * times).sin().exp()

        def outer(x: Tensor) -> tuple[Tensor, Tensor]:
            a = way(inner, x, 2.0)
            b = way(inner, a.tanh(), 0.5)
            return way(lambda a, b: (a * b).cos(), a, b), a

        a, b = way(outer, x)
        return gradients((a.exp() + b * a).sum(), x, w)

    check(scenario)


@pytest.mark.parametrize("depth", [3, 200])
def test_depth(depth: int) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(6), leaf(6)
        return gradients(way(nested, depth, way, x, w).sum(), x, w)

    assert check(scenario).operations >= depth


def test_a_region_of_twenty_thousand_operations() -> None:
    """It is searched, replayed and freed without recursion."""
    x = leaf(2)

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x
            for _ in range(20_000):
                y = y.neg()
        return x * y

    y = lowtide.checkpoint(region, x)
    with counted() as replayed:
        y.sum().backward()
    assert replayed.operations == 20_000
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach())  # negated an even number of times


def test_a_chain_of_twenty_thousand_saved_operations() -> None:
    x = leaf(2)

    def region(x: Tensor) -> Tensor:
        for _ in range(20_000):
            x = x.sin()
        return x

    with counted() as replayed:
        lowtide.checkpoint(region, x).sum().backward()
    # one replay makes everything that the region's backward needs: the last sine is not replayed
    assert replayed.operations == 19_999
    kept = leaf(2)
    kept.data.copy_(x.data)
    region(kept).sum().backward()
    assert x.grad is not None
    assert kept.grad is not None
    assert torch.equal(x.grad, kept.grad)


@pytest.mark.parametrize("saved", [False, True], ids=["unsaved", "saved"])
def test_a_long_chain_is_freed_without_a_backward(saved: bool) -> None:
    """Twenty thousand records that hold each other are freed with the last handle."""
    x = leaf(2)

    def region(x: Tensor) -> Tensor:
        y = x
        with torch.set_grad_enabled(saved):
            for _ in range(20_000):
                y = y.sin()
        return x * y

    y = lowtide.checkpoint(region, x)
    del y


class Block(nn.Module):
    """Many wide activations that only its own backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x @ self.weight).sin()
        return x


def test_nesting_takes_less_memory_than_one_flat_region() -> None:
    gc.collect()  # budgets that other tests abandoned after a forward may still be measuring
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(6))
    x = torch.randn(1024, 64)

    def run(inside: Way) -> Callable[[Tensor], Tensor]:
        def region(x: Tensor) -> Tensor:
            for block in blocks:
                x = inside(block, x)
            return x

        return region

    def peak(outside: Way, inside: Way) -> int:
        blocks.zero_grad()
        region = run(inside)

        def step() -> None:
            outside(region, x).sum().backward()

        return lowtide.measure(step, device="cpu").peak_bytes

    def grads() -> list[Tensor]:
        return [p.grad.clone() for p in blocks.parameters() if p.grad is not None]

    plain = peak(once, once)
    expected = grads()
    flat = peak(lowtide.checkpoint, once)
    assert same(grads(), expected)
    deep = peak(lowtide.checkpoint, lowtide.checkpoint)
    assert same(grads(), expected)
    activation = 1024 * 64 * 4
    # A flat replay recomputes all 36 products and sines; a nested one, the insides of one block and
    # the inputs of the others.
    assert flat < plain + 4 * activation
    assert deep < flat - 20 * activation, f"{deep} against {flat} and {plain} plain"


def test_a_nested_replay_runs_each_inside_once_more_than_its_level() -> None:
    """An operation at depth d is replayed at most d times: once for each region around it."""
    x, w = leaf(6), leaf(6)
    depth = 4
    with counted() as replayed:
        lowtide.checkpoint(nested, depth, lowtide.checkpoint, x, w).sum().backward()
    assert replayed["mul"] <= sum(level + 1 for level in range(depth + 1))


def test_an_inner_policy_holds_inside_an_outer_region() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(4, 4), leaf(4, 4)

        def inner(x: Tensor) -> Tensor:
            return (x @ w).sin().exp()

        def outer(x: Tensor) -> Tensor:
            if way is lowtide.checkpoint:
                x = way(inner, x, policy=lowtide.policies.KeepProducts())
            else:
                x = inner(x)
            return (x @ w).cos()

        return gradients(way(outer, x).sum(), x, w)

    # The product inside is kept; the one outside of it is replayed.
    assert check(scenario)["mm"] == 1


def test_a_region_inside_a_budget_marks_a_part_of_its_tape() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(6), leaf(6)

        def around(function: Callable[..., Any], *args: Any) -> Any:
            if way is lowtide.checkpoint:
                with lowtide.budget(0.6):
                    return function(*args)
            return function(*args)

        return gradients(around(nested, 5, way, x, w).sum(), x, w)

    check(scenario)


@pytest.mark.parametrize("policy", [None, lowtide.policies.KeepEverything()])
def test_inside_a_budget_the_limit_decides_and_no_region(policy: Any) -> None:
    model = nn.Sequential(*[
        nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)
    ])  # fmt: skip
    x = torch.randn(64, 8)
    replays: dict[float | str, int] = {}
    with lowtide.checkpoint_modules(model, "*", policy=policy):
        for limit in ("1 GiB", 0.75):
            budget = lowtide.budget(limit)
            for _ in range(2):
                with budget:
                    loss = model(x).sum()
                loss.backward()
                model.zero_grad()
            replays[limit] = budget.report().replayed_operations
    assert replays["1 GiB"] == 0 < replays[0.75]


def test_the_limit_of_a_fitted_part_holds_where_no_other_is_open() -> None:
    """As the docstring of `lowtide.fit` says: the one around it decides."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    whole, part = lowtide.fit(model, "1 MiB"), lowtide.fit(model[0], "1 B")
    with pytest.warns(
        lowtide.UncountedWarning, match=r"The limit of this model, 1 byte, holds for"
    ):
        model(torch.ones(2, 4)).sum().backward()
    assert (whole.report().steps, part.report().steps) == (1, 0)
    whole.remove()
    with pytest.raises(lowtide.BudgetError):
        model(torch.ones(2, 4)).sum().backward()
