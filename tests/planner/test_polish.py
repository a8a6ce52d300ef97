"""What the compiled simulator says, and what annealing on it is worth."""

from __future__ import annotations

import threading
import time
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from brute_force import choices, tiny_graphs
from graphs import NETWORKS, random_graph, resnet, with_cut, with_later
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from apart import ran_apart
from lowtide import engine
from lowtide.errors import UsageError
from lowtide.planner import (
    HOLD,
    NEVER,
    Event,
    Graph,
    OpNode,
    Simulator,
    ValueNode,
    keep_all,
    minimum,
    simulate,
    solve,
)
from lowtide.planner.polish import Polish, choices_of
from lowtide.planner.repair import Problem
from lowtide.planner.simulate import Lists
from lowtide.plans import plan_step
from once import on_one_recorder

pytestmark = on_one_recorder


TIGHT = (0.3, 0.25)  # shares of the plain peak at which the searches alone end too soon


@pytest.fixture(scope="module")
def annealing(core: Any) -> Polish:
    found = engine.annealing()
    assert found is not None
    return found


def translator() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Transformer(64, 4, 3, 3, 256, dropout=0.0, batch_first=True)
    return model, torch.zeros(8, 64, 64), torch.zeros(8, 64, 64)


@cache
def dry_graph() -> Graph:
    """Of a small transformer: the times are those of formulas, so that it is always the same."""
    model, source, target = translator()
    return lowtide.plan(lambda: model(source, target).sum()).step.graph


def limit_at(share: float, graph: Graph) -> int:
    return int(share * simulate(graph, keep_all(graph).retain).peak)


# ------------------------------------------------------------------------------ the simulator


def compare(core: Any, graph: Graph, retain: list[int], cap: float = float("inf")) -> None:
    sim = Simulator(graph)
    here = sim.run(retain, seconds_limit=cap, trace=True)  # the first run is always in Python
    figures = astuple(replace(here, trace=None))
    there = core.Simulator(sim.lists())
    for _ in range(2):  # nothing is left of a run, cut short or not
        assert there.run(retain, cap, True) == (*figures[:-1], astuple(here.trace))
    assert there.run(retain, cap, False) == figures


def any_plan(graph: Graph, random: Any) -> list[int]:
    last = len(graph.events)
    return [
        HOLD
        if v in graph.must_hold
        else random.choice((HOLD, HOLD, 0, 0, random.choice(range(last + 1)), NEVER))
        for v in range(len(graph.values))
    ]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40), st.randoms(use_true_random=False))
def test_both_simulators_say_the_same(core: Any, seed: int, ops: int, random: Any) -> None:
    graph = with_cut(with_later(random_graph(seed, ops), seed), seed)
    retain = any_plan(graph, random)
    compare(core, graph, retain)
    compare(core, graph, retain, random.random() * graph.seconds)


@pytest.mark.parametrize("name", [*NETWORKS, "dry"])
def test_both_simulators_say_the_same_of_networks(core: Any, name: str) -> None:
    graph, random = dry_graph() if name == "dry" else NETWORKS[name](), Random(0)
    for turn in (graph, graph.retained()):
        compare(core, turn, list(keep_all(turn).retain))
        for _ in range(10):
            compare(core, turn, any_plan(turn, random))
    found = solve(graph, limit_at(0.5, graph), time_limit=1.0).plan
    compare(core, graph, list(found.retain))


def test_a_plan_that_cannot_be_replayed_and_lists_of_no_graph(core: Any) -> None:
    values = (ValueNode(1, -1), ValueNode(10, 0))
    ops = (OpNode("draw", 1.0, (0,), (1,), replayable=False),)
    sim = Simulator(Graph(values, ops, (Event(1, releases=(1,)),)))
    lists = sim.lists()
    there = core.Simulator(lists)
    held = there.run([HOLD, HOLD], 1.0, False)
    assert held == (10, ("backward", 0), 0.0, 0, 10, True, None)
    assert there.run([HOLD, 0], 1.0, True) is None
    assert there.run([HOLD, HOLD], 1.0, False) == held
    for _ in range(3):
        with pytest.raises(UsageError, match=r"operation 0 \(draw\), which cannot be replayed"):
            sim.run([HOLD, 0])
    for wrong in ([HOLD], [HOLD, "0"], 7):
        with pytest.raises((RuntimeError, TypeError)):
            there.run(wrong, 1.0, False)
    with pytest.raises(RuntimeError, match="not a graph's"):
        core.Simulator((*lists[:3], [7, 7], *lists[4:]))


@pytest.mark.parametrize("share", [0.9, 0.5, *TIGHT])
def test_the_compiled_simulator_changes_no_plan(
    core: Any, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    graph = dry_graph()
    found, asked = solve(graph, limit_at(share, graph)), []

    def spied(lists: Lists) -> Any:
        asked.append(lists)
        return core.Simulator(lists)

    monkeypatch.setattr(Simulator, "compiled", staticmethod(lambda: spied))
    assert solve(graph, limit_at(share, graph)).plan == found.plan
    assert len(asked) == 1
    monkeypatch.setattr(Simulator, "compiled", staticmethod(lambda: None))
    alone = solve(graph, limit_at(share, graph))
    assert (alone.plan, alone.evaluations) == (found.plan, found.evaluations)


# ------------------------------------------------------------------------------ annealing


@pytest.mark.parametrize("share", TIGHT)
def test_it_finds_what_no_exchange_does(annealing: Polish, share: float) -> None:
    graph = dry_graph()
    limit = limit_at(share, graph)
    without, found = solve(graph, limit), solve(graph, limit, polish_with=annealing)
    assert without.status == found.status == "fits"
    assert found.method == "annealing"
    assert found.seconds < without.seconds
    again = simulate(graph, found.plan.retain)
    assert (again.peak, again.seconds) == (found.peak, found.seconds)
    assert found.peak <= limit
    assert solve(graph, limit, polish_with=annealing).plan == found.plan


def test_it_lays_out_parts_of_the_step_anew(annealing: Polish) -> None:
    """By changes of up to three values, it ends at a plan that replays for 5.9 forwards."""
    graph = NETWORKS["chain"]()
    limit = int(1.15 * minimum(graph).peak)
    found = solve(graph, limit, polish_with=annealing)
    assert found.status == "fits"
    assert found.peak <= limit
    assert found.seconds < 5 * graph.seconds


def test_it_is_as_good_as_every_plan_of_tiny_graphs(annealing: Polish) -> None:
    tried = optimal = 0
    for graph, _, limit, best in tiny_graphs():
        problem, start = Problem(Simulator(graph)), minimum(graph)
        if start.peak > limit:
            continue
        lists, open_ = problem.sim.lists(), choices_of(problem)
        plan = annealing(lists, open_, list(start.plan.retain), limit, 200_000, 0.0, 10.0)
        found = simulate(graph, plan)
        assert found.peak <= limit
        assert found.seconds >= best.result.seconds - 1e-12
        tried += 1
        optimal += found.seconds <= best.result.seconds + 1e-12
    assert tried >= 40
    assert optimal >= tried * 0.95


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(4, 40), st.floats(0, 1), st.booleans())
def test_it_keeps_to_the_decisions_that_are_open(
    annealing: Polish, seed: int, ops: int, share: float, retained: bool
) -> None:
    graph = with_cut(with_later(random_graph(seed, ops), seed), seed)
    graph = graph.retained() if retained else graph
    lowest, plain = minimum(graph).peak, simulate(graph, keep_all(graph).retain).peak
    limit = lowest + int(share * (plain - lowest))
    found = solve(graph, limit, polish_with=annealing)
    without = solve(graph, limit)
    assert found.status == without.status
    assert found.seconds <= without.seconds
    problem = Problem(Simulator(graph))
    start = list(without.plan.retain)
    if without.status == "fits":
        changed = annealing(
            problem.sim.lists(), choices_of(problem), start, limit, 10**5, 0.0, 10.0
        )
        result = simulate(graph, changed)
        assert result.peak <= limit
        assert result.seconds <= without.seconds
        for value, choice in enumerate(changed):
            assert choice == start[value] or choice in choices(problem, value)


def test_the_decisions_are_those_of_the_reference() -> None:
    for seed in range(40):
        graph = random_graph(seed, 12)
        for turn in (graph, graph.retained()):
            problem = Problem(Simulator(turn))
            for value, latest, holds, never in choices_of(problem):
                dropped = (NEVER,) if never or latest < 0 else ()
                mine = (*(HOLD,) * holds, *range(latest + 1), *dropped)
                assert set(mine) - {HOLD} == set(choices(problem, value)) - {HOLD}


def test_a_plan_that_is_near_its_bound_or_too_large_is_left_alone() -> None:
    def never(*args: Any) -> list[int]:
        raise AssertionError("asked for nothing")

    graph = dry_graph()
    assert solve(graph, limit_at(1.0, graph), polish_with=never).seconds == 0.0
    assert solve(graph, limit_at(0.02, graph), polish_with=never).status == "infeasible"
    large = resnet(900)
    assert len(large.ops) > 2500
    with pytest.raises(AssertionError):  # the same shape, smaller: it would be asked
        solve(resnet(16), limit_at(0.35, resnet(16)), polish_with=never)
    solve(large, limit_at(0.35, large), polish_with=never, time_limit=2.0)


def test_other_threads_go_on_and_the_clock_ends_it(annealing: Polish) -> None:
    graph = dry_graph()
    problem = Problem(Simulator(graph))
    retain = list(solve(graph, limit_at(0.5, graph)).plan.retain)
    ticks, over = [], threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks.append(0)
            time.sleep(0.001)

    beside = threading.Thread(target=tick)
    beside.start()
    annealing(
        problem.sim.lists(), choices_of(problem), retain, limit_at(0.5, graph), 1 << 60, 0.0, 0.5
    )
    during = len(ticks)
    over.set()
    beside.join()
    assert during > 2  # with the lock held, one at most; and without the clock, this would not end


def test_a_search_that_nobody_waits_for_may_do_more(
    annealing: Polish, core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = []
    anneal = core.anneal

    def noting(*given: Any) -> list[int]:
        worked.append(given[4])
        found: list[int] = anneal(*given)
        return found

    monkeypatch.setattr(core, "anneal", noting)
    graph = dry_graph()
    limit = limit_at(TIGHT[0], graph)
    usual, longer = engine.annealing(), engine.annealing(5)
    found = [solve(graph, limit, polish_with=polish) for polish in (usual, longer)]
    assert worked[1] == 5 * worked[0]
    assert found[0].plan != found[1].plan
    assert max(solution.peak for solution in found) <= limit


def test_the_engine_decides_who_plans(annealing: Polish) -> None:
    """Without the core there is no annealing; what is planned with it costs less, and is proved to
    be nearer to the best."""
    model, source, target = translator()
    # One step for both: in a dry run under another engine, torch adds a bias in place or not.
    step = lowtide.plan(lambda: model(source, target).sum()).step
    overheads, bounds = [], []
    for way, polish in (("python", None), ("compiled", annealing)):
        with engine.use(way):
            assert (engine.annealing() is None) == (polish is None)
            assert (engine.cutting() is None) == (polish is None)
            plan = plan_step(step, TIGHT[0])
        graph, limit = step.graph, plan.limit or 0
        alone = solve(graph, limit, margin=int(0.02 * limit), polish_with=polish)
        assert plan.retention == alone.plan
        overheads.append(plan.overhead)
        bounds.append(plan.lower_bound or 0.0)
    assert max(bounds) <= overheads[1] < overheads[0]
    assert overheads[1] - bounds[1] < overheads[0] - bounds[0]


def test_same_plan_in_another_process(core: Any) -> None:
    code = (
        "from test_polish import *; graph = dry_graph();"
        "found = solve(graph, limit_at(TIGHT[1], graph), polish_with=engine.annealing());"
        "assert found.method == 'annealing'; print(found.plan.retain)"
    )
    # Here the seed is another one.
    there = ran_apart(code, PYTHONHASHSEED="1", LOWTIDE_ENGINE="compiled").stdout
    graph = dry_graph()
    here = solve(graph, limit_at(TIGHT[1], graph), polish_with=engine.annealing())
    assert there == f"{here.plan.retain}\n"


def test_whoever_only_plans_has_nothing_built(tmp_path: Path) -> None:
    code = (
        "import torch, lowtide\n"
        "from lowtide import engine\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(64, 64), torch.nn.Tanh()) * 6)\n"
        "plan = lowtide.plan(model, torch.randn(512, 64), limit=0.7)\n"
        "assert plan.overhead > 0\n"
        "assert engine.annealing() is None\n"
        "assert engine._choice.building is None\n"
    )
    assert ran_apart(code, LOWTIDE_ENGINE="auto", LOWTIDE_CACHE=str(tmp_path)).stderr == ""
    assert not list(tmp_path.iterdir())
