"""The bound over several moments against every plan of tiny graphs; heights against plain lists."""

from __future__ import annotations

import random

import pytest
from brute_force import brute_force
from graphs import random_graph, unet
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_solve import tiny

from lowtide.planner import (
    Event,
    Graph,
    OpNode,
    Simulator,
    ValueNode,
    keep_all,
    simulate,
    solve,
)
from lowtide.planner.branch import Branch, Tree
from lowtide.planner.cut import CutModel, hull, lower_bound, moment_weights, room_at
from lowtide.planner.heights import BLOCK, Heights
from lowtide.planner.moments import Moments, raise_bound, worst_moments
from lowtide.planner.repair import Problem
from once import on_one_recorder

pytestmark = on_one_recorder


def contested(seed: int, ops: int, share: float) -> tuple[Graph, int, float]:
    """A tiny graph, a limit between its lowest and its plain peak, and the least time under it."""
    graph = tiny(seed, ops)
    assume(graph.events)
    plain = simulate(graph, keep_all(graph).retain).peak
    _, lowest = brute_force(graph, 0)
    limit = lowest + int((plain - lowest) * share)
    best, _ = brute_force(graph, limit)
    assert best is not None
    return graph, limit, best.result.seconds


def some_moments(graph: Graph, most: int) -> st.SearchStrategy[list[int]]:
    """Of the forward and of backward, in order."""
    numbers = st.integers(-len(Simulator(graph).forward_peak), len(graph.events) - 1)
    return st.sets(numbers, min_size=1, max_size=most).map(sorted)


def profile(graph: Graph) -> list[int]:
    trace = simulate(graph, keep_all(graph).retain, trace=True).trace
    assert trace is not None
    return trace.backward


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(3, 6),
    st.floats(0, 1),
    st.lists(st.floats(0, 5e-3), min_size=40, max_size=40),
)
def test_no_prices_prove_more_than_the_best_plan_takes(
    seed: int, ops: int, share: float, prices: list[float]
) -> None:
    graph, limit, best = contested(seed, ops, share)
    moments = list(range(-len(Simulator(graph).forward_peak), len(graph.events)))
    model = Moments(Simulator(graph), moments, limit)
    seconds, _ = model.bound(prices[: len(moments)])
    assert seconds <= best + 1e-9
    raised, _ = raise_bound(model, [0.0] * len(moments), best, 12)
    assert raised <= best + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 6), st.floats(0, 1), st.data())
def test_no_branches_prove_more_than_the_best_plan_takes(
    seed: int, ops: int, share: float, data: st.DataObject
) -> None:
    graph, limit, best = contested(seed, ops, share)
    moments = data.draw(some_moments(graph, 3))
    prices = [best / limit / len(moments)] * len(moments)
    # Asked for more than there is, it branches to the end.
    target = best * 2 + 1e-3
    tree = Tree(Branch(Problem(Simulator(graph)), moments, limit), [prices], target)
    assert tree.grow(20_000) > 0
    assert tree.bound <= best + 1e-9


def test_what_is_larger_than_the_room_is_not_there() -> None:
    # Two inputs of 8 are asked for at the end, with 7 left: the cut at a price holds part of one.
    values = (ValueNode(1, -1), ValueNode(8, 0), ValueNode(8, 1), ValueNode(1, 2))
    ops = tuple(OpNode(name, 1.0, (i,), (i + 1,)) for i, name in enumerate("abc"))
    events = (Event(3, releases=(3,)), Event(2, releases=(2,)), Event(1, releases=(1,)))
    problem = Problem(Simulator(Graph(values, ops, events)))
    tree = Tree(Branch(problem, [0], 8), [[0.0]], 10.0)
    assert tree.bound == pytest.approx(sum(problem.sim.cost[:2]))


def test_one_moment_proves_what_its_cut_proves() -> None:
    graph = random_graph(3, 40)
    sim = Simulator(graph)
    backward = profile(graph)
    event = backward.index(max(backward))
    limit = max(backward) * 6 // 10
    at = "backward", event
    room = room_at(sim, at, limit)
    model = CutModel(sim, moment_weights(sim, at), event)
    moments = Moments(sim, [event], limit)
    for price in (1e-5, 1e-4, 1e-3):
        cut = model.solve(price)
        seconds, over = moments.bound([price])
        assert abs(seconds - (cut.seconds + price * (cut.nbytes - room))) < 1e-9
        assert over == [cut.nbytes - room]


def test_more_moments_prove_more_where_several_are_high() -> None:
    graph = unet()
    sim = Simulator(graph)
    backward = profile(graph)
    limit = max(backward) // 2
    event = backward.index(max(backward))
    at = "backward", event
    room = room_at(sim, at, limit)
    one = lower_bound(room, hull(CutModel(sim, moment_weights(sim, at), event), sim, room))
    assert worst_moments(backward, limit, 3) != [event]
    quick, proved = solve(graph, limit), solve(graph, limit, prove=True)
    assert proved.plan == quick.plan
    assert proved.lower_bound is not None
    assert quick.lower_bound is not None
    assert quick.lower_bound == pytest.approx(one)
    assert one * 1.01 < proved.lower_bound <= proved.seconds


@given(st.integers(0, 10**9), st.integers(0, 4 * BLOCK + 3))
@settings(max_examples=60, deadline=None)
def test_heights_are_a_list(seed: int, length: int) -> None:
    rng = random.Random(seed)
    plain = [rng.randint(0, 50) for _ in range(length)]
    heights = Heights(plain)
    for _ in range(20):
        begin, stop = sorted((rng.randint(0, length), rng.randint(0, length + 5)))
        assert heights.highest(begin, stop) == max(plain[begin:stop], default=0)
        heights.add(begin, stop, 7)
        plain[begin:stop] = [height + 7 for height in plain[begin:stop]]


def test_what_no_replay_can_make_is_held_although_it_is_overwritten() -> None:
    """A bound that took it for gone proved more than the best plan takes."""
    values = (
        ValueNode(2, -1, overwritten=True),
        ValueNode(2, 0, overwritten=True),
        ValueNode(2, 1),
        ValueNode(5, 1, named=2),
        ValueNode(1, 2),
    )
    ops = (
        OpNode("a", 0.004, (0,), (1,), 6, replayable=False, other=2, peak_other=8, overwrites=(0,)),
        OpNode("b", 0.005, (1,), (2, 3), other=9, peak_other=9, overwrites=(1,)),
        OpNode("c", 0.005, (3,), (4,), 7, other=6, peak_other=13),
    )
    events = (Event(4, 1, 13, (4,)), Event(2, 7, 7), Event(3, 7, 9, (2, 3)))
    graph = Graph(values, ops, events)
    assert graph.must_hold == {1}
    assert 1 not in graph.fleeting
    limit = 18
    best, _ = brute_force(graph, limit)
    assert best is not None
    seconds = best.result.seconds
    assert 0 < seconds == pytest.approx(0.005, rel=0.01)
    found = solve(graph, limit, prove=True)
    assert found.seconds == seconds
    assert (found.lower_bound or 0.0) <= seconds
    for moment in range(len(events)):
        tree = Tree(Branch(Problem(Simulator(graph)), [moment], limit), [[0.1]], 1.0)
        tree.grow(20_000)
        assert tree.bound <= seconds + 1e-9
