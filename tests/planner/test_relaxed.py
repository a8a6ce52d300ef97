"""Linear programs over a few moments: never more than the best plan takes, and more than cuts."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from brute_force import brute_force, choices
from graphs import random_graph, run_twice, with_cut, with_later, with_nodes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_moments import contested

from lowtide import engine
from lowtide.planner import Event, Graph, OpNode, Simulator, ValueNode, solve
from lowtide.planner.branch import Branch, Tree
from lowtide.planner.relaxed import PriceWith, Relaxed, relaxed
from lowtide.planner.repair import Problem, trace_of
from lowtide.planner.rows import NOTHING, Rows
from lowtide.planner.simulate import _Run
from once import on_one_recorder

pytestmark = on_one_recorder
anyhow = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def price_with(core: Any) -> PriceWith:
    found = engine.pricing()
    assert found is not None
    return found


def columns_of(rows: Rows, problem: Problem, retain: list[int]) -> list[float]:
    """What a plan gives to each column, replayed by the simulator one event at a time."""
    sim, moments = problem.sim, rows.moments
    trace = trace_of(sim.run(retain, trace=True))
    x = [0.0] * len(rows.cost)
    for value, there in rows.there.items():
        start, alive = trace.start[value], trace.alive[value]
        for at, column in zip([-1, *moments], there, strict=True):
            here = start <= at <= alive or (at < 0 and start < 0)
            assert not here or column != NOTHING
            if here:
                x[column] = 1.0
    counted = [[0] * len(problem.sim.cost)]
    for stop in (*moments, len(problem.sim.event_value)):
        counted.append(replays_up_to(problem, retain, stop + 1))
    for op, ranges in rows.ranges.items():
        for (first, last), column in ranges.items():
            if counted[last + 1][op] > counted[first][op]:
                assert column != NOTHING
                x[column] = 1.0
    return x


def replays_up_to(problem: Problem, retain: list[int], count: int) -> list[int]:
    """How often each operation is replayed by this many events of backward."""
    run = _Run(problem.sim, retain, float("inf"))
    run.forward()
    for event, value in enumerate(problem.sim.event_value[:count]):
        if run.start[value] > len(problem.sim.event_value):
            run.replay(event, value)
    return run.replays


@anyhow
@given(
    seed=st.integers(0, 10**9),
    ops=st.integers(3, 14),
    changed=st.sampled_from((with_cut, with_later, with_nodes, None)),
    twice=st.booleans(),
    data=st.data(),
)
def test_every_plan_keeps_the_rows(
    seed: int, ops: int, changed: Any, twice: bool, data: st.DataObject
) -> None:
    graph = random_graph(seed, ops)
    graph = run_twice(graph) if twice else graph
    problem = Problem(Simulator(graph if changed is None else changed(graph, seed)))
    events = len(problem.sim.event_value)
    assume(events)
    rng = random.Random(seed)
    retain = [rng.choice(choices(problem, v)) for v in range(len(problem.sim.nbytes))]
    plan = problem.sim.run(retain)
    moments = sorted(data.draw(st.sets(st.integers(0, events - 1), min_size=1, max_size=4)))
    rows = Rows(problem, moments, list(range(len(problem.sim.forward_peak))), plan.peak)
    x = columns_of(rows, problem, retain)
    assert all(value <= top for value, top in zip(x, rows.top, strict=True))
    for row, right in enumerate(rows.right):
        entries = range(rows.begin[row], rows.begin[row + 1])
        assert sum(rows.coefficients[e] * x[rows.columns[e]] for e in entries) <= right + 1e-9
    assert sum(c * value for c, value in zip(rows.cost, x, strict=True)) <= plan.seconds + 1e-9


@anyhow
@given(st.integers(0, 10**9), st.integers(3, 6), st.floats(0, 1), st.data())
def test_no_branches_prove_more_than_the_best_plan_takes(
    price_with: PriceWith, seed: int, ops: int, share: float, data: st.DataObject
) -> None:
    graph, limit, best = contested(seed, ops, share)
    problem = Problem(Simulator(graph))
    events = st.integers(0, len(graph.events) - 1)
    moments = sorted(data.draw(st.sets(events, min_size=1, max_size=4)))
    target = best * 2 + 1e-3
    forward = list(range(len(problem.sim.forward_peak)))
    tree = Relaxed(problem, moments, forward, limit, target, price_with, 3_000_000)
    tree.climb(2000)
    tree.grow()
    assert tree.bound * target <= best + 1e-9
    proved = relaxed(problem, limit, target, moments, forward, price_with, 3_000_000)
    assert proved <= best + 1e-9


def chained() -> tuple[Problem, int, float]:
    """The results of a chain, asked for with room for no other; the limit and the least time."""
    values = (ValueNode(1, -1), *(ValueNode(8, op) for op in range(4)))
    ops = tuple(OpNode(name, 1.0, (i,), (i + 1,)) for i, name in enumerate("abcd"))
    events = tuple(Event(value, peak_other=8, releases=(value,)) for value in (4, 3, 2, 1))
    graph = Graph(values, ops, events)
    best, _ = brute_force(graph, 23)
    assert best is not None
    return Problem(Simulator(graph)), 23, best.result.seconds


def test_what_cannot_stay_until_the_next_moment_is_replayed_again(price_with: PriceWith) -> None:
    problem, limit, best = chained()
    assert best == pytest.approx(6.0, rel=1e-3)  # the last is held; then three, two, one
    proved = relaxed(problem, limit, best * 2, [0, 1, 2, 3], [], price_with)
    assert proved == pytest.approx(best, rel=1e-2)
    cuts = Tree(Branch(problem, [0, 1, 2, 3], limit), [[0.1] * 4], best * 2)
    cuts.grow(100_000)
    assert cuts.bound < 0.9 * proved


def test_a_replay_needs_room_for_its_workspace(price_with: PriceWith) -> None:
    values = (ValueNode(1, -1), *(ValueNode(8, op) for op in range(3)))
    cost, workspace = (1.0, 0.1, 5.0), (0, 30, 0)
    ops = tuple(OpNode("op", cost[i], (0,), (i + 1,), workspace[i]) for i in range(3))
    events = tuple(
        Event(value, peak_other=8 * (value == 3), releases=(value,)) for value in (3, 1, 2)
    )
    problem = Problem(Simulator(Graph(values, ops, events)))
    best, _ = brute_force(problem.sim.graph, 31)
    assert best is not None
    seconds = best.result.seconds
    assert seconds == pytest.approx(1.0, rel=1e-3)  # the second would be cheaper
    assert Tree(Branch(problem, [0], 31), [[0.1]], seconds * 2).bound < 0.2
    proved = relaxed(problem, 31, seconds * 2, [0], [], price_with)
    assert proved == pytest.approx(seconds, rel=1e-2)


def test_prices_that_are_no_numbers_prove_nothing() -> None:
    def broken(rows: Any, low: Any, top: Any, x: Any, *_: Any) -> Any:
        return [(math.nan, math.inf, -1.0)[row % 3] for row in range(len(rows[-1]))], x, 1.0

    problem, limit, best = chained()
    assert relaxed(problem, limit, best, [0, 1], [], broken) == 0.0


@pytest.mark.parametrize("where", range(8))
def test_what_is_no_program_is_refused(price_with: PriceWith, where: int) -> None:
    rows: Any = [[1.0], [0, 1], [0], [-1.0], [-1.0]]
    rest: Any = [[0.0], [1.0], [0.0], [0.0], 1.0, 100, 1e9]
    prices, x, _ = price_with(tuple(rows), *rest)
    assert (prices, x) == (pytest.approx([1.0], abs=1e-2), pytest.approx([1.0], abs=1e-2))
    broken: Any = {0: [], 1: [0, 2], 2: [1], 3: [], 4: [1.0, 1.0]}
    if where in broken:
        rows[where] = broken[where]
    else:
        rest[where - 5] = [2.0, 2.0] if where == 7 else [math.nan]
    with pytest.raises(RuntimeError, match="these lists are not a graph's"):
        price_with(tuple(rows), *rest)


def test_a_proof_uses_them(price_with: PriceWith) -> None:
    problem, limit, best = chained()
    cuts, both, again = (
        solve(problem.sim.graph, limit, prove=True, price_with=way)
        for way in (None, price_with, price_with)
    )
    assert both.plan == cuts.plan
    assert both.seconds == best
    assert (cuts.lower_bound or 0.0) < 0.9 * best < (both.lower_bound or 0.0) <= best
    assert again.lower_bound == both.lower_bound
