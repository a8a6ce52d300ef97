"""Rule 13 where data decides the sizes: no step is larger than another in everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from lowtide.learning.effort import LESSONS
from lowtide.learning.knowledge import Knowledge
from lowtide.learning.known_plans import KnownPlans
from lowtide.learning.learned import MOST_GROWN, Learned
from lowtide.learning.resizing import Resizing
from lowtide.learning.varying import LARGER, Varying, sizes_of, total
from lowtide.planner import plain_peak
from lowtide.running.prepared import Prepared, Signature, covers
from once import on_one_recorder
from one_step import rows
from test_changing_sizes import Pair, peak_of, train

# What steps of many kinds are planned as, whoever records them.
pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


class Mixture(nn.Module):
    """Layers of experts; a router sends each row to two of them."""

    def __init__(self, layers: int = 3, experts: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routers = nn.ModuleList(nn.Linear(32, experts) for _ in range(layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                for _ in range(experts)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.layers, strict=True):
            weight, chosen = router(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):  # type: ignore[arg-type]
                rows, place = torch.where(chosen == number)
                out.index_add_(0, rows, expert(x[rows]) * weight[rows, place, None])
            x = x + out
        return x


def batch(seed: int, count: int = 256) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def test_steps_of_data_dependent_routing_follow_one_plan(replayed: Callable[[], int]) -> None:
    model = Mixture()
    most = max(peak_of(copy.deepcopy(model), batch(seed)) for seed in range(40))
    limit = lowtide.budget(int(0.6 * most))
    train(model, limit, map(batch, range(20)))
    replayed()
    ways = train(model, limit, map(batch, range(20, 40)))
    assert ways.count("covered") >= 16  # all are new
    assert ways.count("planned") == 0
    assert replayed() > 0
    plans = list(limit._loop._plans)
    assert any(plan.apart for plan in plans)
    assert len(plans) < 12  # not one for each step


def test_with_lengths_that_vary_as_well() -> None:
    """There are plans for shorter batches too, in which each expert may get its usual share."""
    model = Mixture()
    most = max(peak_of(copy.deepcopy(model), batch(seed, 400)) for seed in range(5))
    limit = lowtide.budget(int(0.6 * most))
    count = [400, 200, 300, 120] * 20  # plans for short ones wait until steps have paid for them
    ways = train(model, limit, map(batch, range(80), count))
    assert ways[25:].count("covered") >= 20
    limit._loop._beside.wait()
    sizes = {plan.allocates for plan in limit._loop._plans if plan.apart}
    assert min(sizes) < 0.7 * max(sizes)


def test_a_step_above_the_bounds_is_inside_the_limit_all_the_same() -> None:
    model = Mixture()
    most = max(peak_of(copy.deepcopy(model), batch(seed)) for seed in range(10))
    limit = lowtide.budget(int(0.7 * most))
    train(model, limit, map(batch, range(12)))
    biased = batch(99) * 0.01 + batch(1)[:1]  # all rows go to the same experts
    assert train(model, limit, [biased]) == ["none"]
    train(model, limit, map(batch, range(12, 16)))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_steps_that_come_again_have_plans_of_their_own(count: int) -> None:
    """Of which each makes more somewhere: one plan for all would recompute too much of each."""
    model = Pair()
    batches = [(rows(400 + 40 * n), rows(1000 - 60 * n)) for n in range(count)]
    most = max(peak_of(copy.deepcopy(model), x) for x in batches)
    limit = lowtide.budget(int(0.6 * most))
    ways: list[str] = []
    for _ in range(10):
        ways.append("")
        for x in batches:
            ways[-1] += train(model, limit, [x])[0][0]
            limit.report()
            limit._loop._beside.wait()
    # "planned", not "covered". Where a plan costs little more than another, times decide.
    assert ways[-1].count("p") >= count // 2, ways


# --- what is known of the sizes ------------------------------------------------------------------


def signatures(*sizes: int) -> list[Signature]:
    return [("mul", (size,), (-1,), 4) for size in sizes]


def test_what_never_varied_has_no_slack() -> None:
    varying = Varying()
    for first in (100, 140, 120, 110):
        varying.note(signatures(8, first, 240 - first), 0)
    seen = signatures(8, 120, 120)
    assert varying.apart(seen, 0)
    # The most, and the range of four once more.
    assert varying.bounds(seen, 0) == ((8, 4), (180, 4), (180, 4))
    for _ in range(36):
        varying.note(seen, 0)
    assert varying.bounds(seen, 0) == ((8, 4), (162, 4), (162, 4))


def test_larger_steps_are_not_apart() -> None:
    varying = Varying()
    for size in (100, 300, 200, 250):
        seen = signatures(8, size, size + 4)
        for _ in range(2):
            varying.note(seen, 0)
            assert not varying.apart(seen, 0)
    varying.note(signatures(8, 252, 252), 0)  # by less than what counts
    assert not varying.apart(signatures(8, 1, 1), 0)
    varying.note(signatures(8, 290, 180), 0)
    assert varying.apart(signatures(8, 1, 1), 0)


def test_steps_that_come_again() -> None:
    varying = Varying()

    def ended(*sizes: int) -> None:
        varying.came(signatures(*sizes))
        varying.note(signatures(*sizes), 0)

    for size in (10, 20):
        ended(size, 100 - size)
        assert not varying.apart(signatures(1, 1), 0)  # too few to tell
        assert not varying.again
    ended(20, 80)
    assert varying.apart(signatures(1, 1), 0)
    assert varying.again
    varying.bounds(signatures(1, 1), 0)
    assert not varying.served(signatures(20, 80), 0)
    ended(20, 81)
    assert not varying.again
    assert varying.served(signatures(20, 81), 0)
    for size in range(1000):  # as many as are remembered
        varying.came(signatures(size, 7))
    varying.came(signatures(20, 81))
    assert not varying.again


def test_other_steps_have_other_bounds() -> None:
    varying = Varying()
    varying.note(signatures(8, 9), 0)
    assert not varying.served(signatures(8, 9), 0)
    varying.note(signatures(8, 10), 1)
    varying.note([("mul", (8,), (-1,), 4), ("mul", (10,), (0,), 4)], 0)
    varying.note(signatures(8, 10, 11), 0)
    assert varying.bounds(signatures(8, 7), 0) == ((8, 4), (9, 4))
    assert varying.served(signatures(1, 1), 0)
    assert not varying.served(signatures(1, 1), 1)
    for count in range(3, 12):  # as many kinds are known as there are places for
        varying.note(signatures(*range(count)), 0)
    assert not varying.served(signatures(1, 1), 0)


def test_sizes_beyond_all_memory() -> None:
    varying = Varying()
    seen = [("expand", (8,), (-1,), 1 << 70)]
    varying.note(seen, 0)
    assert varying.bounds(seen, 0) == ((8, 1 << 62),)


def test_bounds_for_steps_of_about_the_same_bytes() -> None:
    varying = Varying()
    for whole, share in [(1000, 0.45), (1000, 0.5), (400, 0.45), (500, 0.5)] * 10:
        varying.note(signatures(int(whole * share), int(whole * (1 - share))), 0)
    found = varying.smaller(signatures(160, 240), 0)
    assert found is not None
    whole = 408 * LARGER  # with the gradients
    assert abs(found[0][0] - whole * (0.5 + 0.55 * 0.05)) < 5
    assert abs(found[1][0] - whole * (0.55 + 0.55 * 0.05)) < 5
    assert found[0][1] == 4
    assert varying.smaller(signatures(500, 500), 0) is None  # that is what all may take
    # It is itself one of them.
    itself = varying.smaller(signatures(390, 10), 0)
    assert itself is not None
    assert itself[0] == (390, 4)


def test_bounds_are_asked_for_ever_more_seldom_where_they_do_not_hold() -> None:
    varying, asked = Varying(), []
    for step in range(40):
        seen = signatures(8, 10 + 2**step)
        varying.note(seen, 0)
        if varying.due(seen, 0):
            varying.bounds(seen, 0)
            asked.append(step)
    assert asked == [0, 2, 5, 9, 14, 20, 27, 35]


# --- a plan for them ------------------------------------------------------------------------------


MODEL = Mixture(2, 3)  # whose parameters the plans are for


def learned_step() -> Learned:
    model = MODEL
    limit = lowtide.budget(int(0.8 * peak_of(copy.deepcopy(model), batch(0))))
    peak_of(model, batch(0), limit)
    limit.report()
    [prepared] = limit._loop._plans
    return Learned.of(prepared)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1.0, 1.6), min_size=200, max_size=200), st.floats(0, 1))
def test_bounds_are_bounds(factors: list[float], share: float) -> None:
    learned = LEARNED.setdefault("step", None) or learned_step()
    LEARNED["step"] = learned
    now = sizes_of(learned.signatures)
    sizes = tuple(
        [
            tuple([int(size * factor) if number < share * len(now) else size for size in made])
            for number, (made, factor) in enumerate(zip(now, factors, strict=False))
        ]
    )
    assert len(sizes) == len(now)
    found = learned.bounded(sizes)
    assert found is not None
    assert found.grown
    assert found.apart
    assert found.lessons == LESSONS
    assert sizes_of(found.signatures) == sizes
    assert all(map(covers, found.signatures, learned.signatures))
    for more, less in (
        (found.graph.values, learned.graph.values),
        (found.graph.ops, learned.graph.ops),
        (found.graph.events, learned.graph.events),
    ):
        for one, other in zip(more, less, strict=True):
            for name in ("nbytes", "workspace", "other", "peak_other", "after"):
                assert getattr(one, name, 0) >= getattr(other, name, 0)
    if sizes == now:
        assert found.graph == learned.graph
    else:
        assert plain_peak(found.graph) >= plain_peak(learned.graph)


LEARNED: dict[str, Any] = {}


def test_no_plan_for_far_too_much() -> None:
    learned = learned_step()
    now = sizes_of(learned.signatures)
    sizes = tuple([tuple([int(size * MOST_GROWN * 1.01) for size in made]) for made in now])
    assert learned.bounded(sizes) is None


def test_it_replaces_those_of_single_steps() -> None:
    learned = learned_step()
    single = learned.search(1 << 40)
    assert single is not None
    now = sizes_of(learned.signatures)
    plans = KnownPlans()
    plans.add(single)
    smaller = tuple([tuple([size * 19 // 20 for size in made]) for made in now])
    for sizes in (smaller, now, tuple([tuple([size * 11 // 10 for size in m]) for m in now])):
        bounds = learned.bounded(sizes)
        assert bounds is not None
        found = bounds.search(1 << 40)
        assert isinstance(found, Prepared)
        plans.add(found)
        if sizes is smaller:
            assert list(plans) == [found, single]  # whose step does not fit in
        else:
            assert list(plans) == [found]
    # What they were made from is still known.
    larger = [replace_sizes(one, 12) for one in learned.signatures]
    near, ratio = plans.outgrown(larger, single.seen.place)
    assert near is single
    assert abs(ratio - 1.2) < 0.01
    assert total(sizes_of(larger)) > total(sizes_of(found.signatures))


def replace_sizes(signature: Signature, tenths: int) -> Signature:
    name, made, reads, wanted = signature
    return name, tuple([size * tenths // 10 for size in made]), reads, wanted * tenths // 10


def test_plans_for_much_smaller_steps_stay() -> None:
    learned = learned_step()
    now = sizes_of(learned.signatures)
    half = tuple([tuple([size // 2 for size in made]) for made in now])
    plans = KnownPlans()
    for sizes in (half, now):
        bounds = replace(learned.of_sizes(sizes), grown=True, apart=True)
        found = bounds.search(1 << 40)
        assert found is not None
        assert found.apart
        plans.add(found)
    assert [plan.allocates for plan in plans] == sorted((p.allocates for p in plans), reverse=True)
    assert len(list(plans)) == 2


def test_what_a_step_takes_above_its_bounds_is_kept_free_from_then_on() -> None:
    learned = learned_step()
    seen, place = learned.signatures, learned.seen.place
    part = Resizing(Knowledge(learned.plain_peak, None))
    single = learned.search(learned.plain_peak * 2)
    assert single is not None
    part._plans.add(single)
    for tenths in ((9, 12), (12, 9), (11, 10)):  # none is larger than another
        outgrown = [replace_sizes(one, tenths[i % 2]) for i, one in enumerate(seen)]
        part._varying.note(outgrown, place)
    larger = part._larger(learned, outgrown, place)
    assert larger is not None
    assert larger.apart
    assert larger.missing == 0
    bounds = larger.search(larger.plain_peak * 2)
    assert bounds is not None
    part._plans.add(bounds)
    took = SimpleNamespace(before=0, timeline=SimpleNamespace(peak=bounds.peak + 1000))
    followed: Any = SimpleNamespace(seen=outgrown)
    assert part.outdone(bounds, followed, took)  # type: ignore[arg-type]
    assert list(part._plans) == []
    part._plans.add(single)
    again = part._larger(learned, outgrown, place)
    assert again is not None
    assert again.missing == 1000
    found = again.search(again.plain_peak + 1000)
    assert found is not None
    assert found.peak == bounds.peak + 1000


def test_a_step_is_noted_once_even_if_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slack of bounds shrinks with the number of steps."""
    learned = learned_step()
    part = Resizing(Knowledge(learned.plain_peak, None))
    larger = learned.search(int(0.7 * learned.plain_peak))
    assert larger is not None
    seen = [replace_sizes(one, 6) for one in learned.signatures]
    planned: list[Any] = []
    monkeypatch.setattr(part._beside, "ask", planned.append)
    for count in range(1, 7):
        part.plan_smaller(larger, seen)
        [known] = part._varying._seen.values()
        assert known.steps == count
    assert planned
