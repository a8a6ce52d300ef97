"""Cuts in C++ are those of Python, and prove what they may."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import random_graph, unet, with_cut, with_later
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_moments import contested, some_moments

from lowtide import engine
from lowtide.planner import Simulator, keep_all, simulate, solve
from lowtide.planner.branch import Branch, Tree
from lowtide.planner.cut import CutModel, moment_weights
from lowtide.planner.flow import INFINITE, MOST, CutWith, Network
from lowtide.planner.repair import Problem
from once import on_one_recorder

pytestmark = on_one_recorder


@pytest.fixture(scope="module")
def cut_with(core: Any) -> CutWith:
    found = engine.cutting()
    assert found is not None
    return found


capacities = st.one_of(st.integers(0, 9), st.just(INFINITE), st.integers(0, 1 << 54))
arcs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), capacities), max_size=40)
anyhow = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@anyhow
@given(edges=arcs)
def test_the_smallest_cut_of_any_network(
    cut_with: CutWith, edges: list[tuple[int, int, int]]
) -> None:
    here, there = Network(10), Network(10, cut_with)
    for tail, head, capacity in edges:
        if tail != head:
            here.arc(tail, head, capacity)
            there.arc(tail, head, capacity)
    rooms = there.snapshot()
    assert list(map(bool, there.cut())) == here.cut()
    assert there.room == rooms  # the flow is not kept


@anyhow
@given(
    seed=st.integers(0, 10**9),
    ops=st.integers(2, 12),
    changed=st.sampled_from((with_cut, with_later, None)),
    prices=st.lists(st.floats(0, 1e-6) | st.sampled_from((0.0, 1.0, 1e9)), min_size=1, max_size=5),
    event=st.integers(0, 12),
)
def test_the_cuts_of_a_search_are_the_same_in_both(
    cut_with: CutWith, seed: int, ops: int, changed: Any, prices: list[float], event: int
) -> None:
    graph = random_graph(seed, ops)
    sim = Simulator(graph if changed is None else changed(graph, seed))
    if not sim.event_value:
        return
    event %= len(sim.event_value)
    here, there = (CutModel(sim, moment_weights(sim, ("backward", event)), event) for _ in "ab")
    asked: list[int] = []

    def counted(nodes: int, heads: list[int], rooms: list[int]) -> bytes:
        asked.append(sum(room for room in rooms if room < INFINITE))
        return cut_with(nodes, heads, rooms)

    with pytest.MonkeyPatch.context() as patch:
        for price in prices:  # in any order, some above what the compiled cut may be asked
            patch.setattr(Network, "compiled", staticmethod(lambda: None))
            alone = here.solve(price)
            patch.setattr(Network, "compiled", staticmethod(lambda: counted))
            assert there.solve(price) == alone
    assert len(asked) >= sum(price <= 1e-6 for price in prices)
    assert all(capacity < MOST for capacity in asked)


def test_a_long_chain_needs_no_recursion(cut_with: CutWith) -> None:
    count = 20_000
    network = Network(count, cut_with)
    network.arc(0, 2, INFINITE)
    for node in range(2, count - 1):
        network.arc(node, node + 1, 7 - (node == count // 2))
    network.arc(count - 1, 1, 8)
    assert sum(network.cut()) == count // 2  # the source, and up to the narrowest arc


@pytest.mark.parametrize(
    ("nodes", "heads", "rooms"),
    [
        (3, [2, 3], [1, 0]),
        (3, [-1, 0], [1, 0]),
        (3, [2], [1]),
        (3, [2, 0], [1]),
        (1, [0, 0], [1, 0]),
        (3, [2, 0], [-1, 0]),
        (3, [2, 0], [-(1 << 70), 0]),
    ],
)
def test_what_is_no_network_is_refused(
    cut_with: CutWith, nodes: int, heads: list[int], rooms: list[int]
) -> None:
    with pytest.raises(RuntimeError, match="these lists are not a graph's"):
        cut_with(nodes, heads, rooms)


def test_what_is_no_number_at_all_is_refused(cut_with: CutWith) -> None:
    with pytest.raises(TypeError, match="integer"):
        cut_with(3, [2, 0], ["1", 0])  # type: ignore[list-item]


def test_prices_beyond_what_a_network_takes_prove_no_more_than_the_best_plan_takes(
    cut_with: CutWith,
) -> None:
    graph = unet()
    limit = int(0.45 * simulate(graph, keep_all(graph).retain).peak)
    best = solve(graph, limit)
    for way in (None, cut_with):
        branch = Branch(Problem(Simulator(graph)), [0, 4], limit, way)
        assert branch.decide(branch.start())
        for price in (1e-6, 1e-3, 1.0, 1e6, 1e30):
            assert branch.bound([price, price])[0] <= best.seconds


@anyhow
@given(st.integers(0, 10**9), st.integers(3, 6), st.floats(0, 1), st.data())
def test_branches_prove_the_same_and_never_more_than_the_best_plan_takes(
    cut_with: CutWith, seed: int, ops: int, share: float, data: st.DataObject
) -> None:
    graph, limit, best = contested(seed, ops, share)
    moments = data.draw(some_moments(graph, 4))
    prices = [best / limit / len(moments)] * len(moments)
    target = best * 2 + 1e-3
    trees = [
        Tree(Branch(Problem(Simulator(graph)), moments, limit, way), [prices], target)
        for way in (None, cut_with)
    ]
    assert [tree.grow(5000) for tree in trees] == [trees[0].done] * 2
    assert trees[0].bound == trees[1].bound <= best + 1e-9


# The figures are those reached with some room; they are there to catch a decline.
@pytest.mark.parametrize(("levels", "share", "proved"), [(4, 0.45, 0.95), (2, 0.4, 0.74)])
def test_more_is_proved_of_the_same_plan(
    cut_with: CutWith, levels: int, share: float, proved: float
) -> None:
    graph = unet(levels)
    limit = int(share * simulate(graph, keep_all(graph).retain).peak)
    ways = [solve(graph, limit, prove=True, cut_with=way) for way in (None, cut_with)]
    assert ways[0].plan == ways[1].plan
    lower = [way.lower_bound or 0.0 for way in ways]
    assert lower[0] < lower[1] <= ways[1].seconds
    assert lower[1] > proved * ways[1].seconds
    again = solve(graph, limit, prove=True, cut_with=cut_with)
    assert again.lower_bound == ways[1].lower_bound
