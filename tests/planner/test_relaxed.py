"""Linear programs over a few moments: never more than the best plan takes, and more than cuts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from brute_force import choices
from graphs import random_graph, with_cut, with_later
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_moments import contested

from lowtide import engine
from lowtide.planner import Simulator
from lowtide.planner.relaxed import PriceWith, Relaxed, relaxed
from lowtide.planner.repair import Problem, trace_of
from lowtide.planner.rows import NOTHING, Rows
from once import on_one_recorder

pytestmark = on_one_recorder
anyhow = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    for span, (begin, stop) in enumerate(
        zip([-1, *moments], [*moments, len(sim.event_value)], strict=True)
    ):
        counted = [replays_up_to(problem, retain, event + 1) for event in (begin, stop)]
        for op, runs in rows.runs.items():
            if counted[1][op] > counted[0][op]:
                x[runs[span]] = 1.0
    for op, later in rows.later.items():
        for place in reversed(range(len(moments))):
            if later[place] != NOTHING:
                x[later[place]] = max(x[rows.runs[op][place]], x[later[place + 1]])
    return x


def replays_up_to(problem: Problem, retain: list[int], count: int) -> list[int]:
    """How often each operation is replayed by the first events: those of a step that is cut short
    have the same replays, as long as every life is the same."""
    from lowtide.planner.simulate import _Run

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
    changed=st.sampled_from((with_cut, with_later, None)),
    data=st.data(),
)
def test_every_plan_keeps_the_rows(seed: int, ops: int, changed: Any, data: st.DataObject) -> None:
    graph = random_graph(seed, ops)
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
    tree = Relaxed(problem, moments, forward, limit, target, price_with)
    tree.climb()
    tree.grow(3_000_000)
    assert tree.bound * target <= best + 1e-9
    assert relaxed(problem, limit, target, moments, forward, price_with) <= best + 1e-9
