"""Values too small to matter are held, where that costs nothing and saves time."""

from __future__ import annotations

import functools

import pytest
from graphs import NETWORKS, random_graph

from lowtide.planner import HOLD, Graph, Simulator, Solution, keep_all, minimum, simulate, solve
from lowtide.planner import auto as solvers
from lowtide.planner.repair import Candidate, Problem
from lowtide.planner.search import Search
from lowtide.planner.small import SHARE, holding_small
from once import on_one_recorder

pytestmark = on_one_recorder


@functools.cache
def network(name: str) -> tuple[Graph, Solution]:
    """A step, and its plan of the lowest peak."""
    graph = NETWORKS[name]()
    return graph, minimum(graph)


def search_of(graph: Graph, limit: int, lowest: Solution) -> Search:
    """A search that has found the plan of the lowest peak, which drops all that it can."""
    search = Search(Problem(Simulator(graph)), limit, float("inf"))
    retain = list(lowest.plan.retain)
    search.best = Candidate(retain, search.problem.run(retain))
    return search


def limit_at(name: str, share: float) -> int:
    """Between the lowest peak (0) and that with everything kept (1)."""
    graph, lowest = network(name)
    most = simulate(graph, keep_all(graph).retain).peak
    return lowest.peak + int(share * (most - lowest.peak))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_it_fits_takes_no_longer_and_changes_only_small_values(name: str, share: float) -> None:
    graph, lowest = network(name)
    limit = limit_at(name, share)
    search = search_of(graph, limit, lowest)
    before = search.best
    found, settled = holding_small(search)
    assert found.result.peak <= limit
    assert found.result.seconds <= before.result.seconds
    changed = {
        v for v, (a, b) in enumerate(zip(before.retain, found.retain, strict=True)) if a != b
    }
    assert changed <= settled
    assert all(found.retain[value] == HOLD for value in settled)
    assert sum(graph.values[value].nbytes for value in settled) <= SHARE * limit
    assert search.best is before  # the caller decides


def test_nothing_that_may_not_be_held_is_held() -> None:
    held = 0
    for seed in range(60):
        graph = random_graph(seed, 30)
        limit = 10**6 * max(value.nbytes for value in graph.values)
        search = search_of(graph, limit, minimum(graph))
        _, settled = holding_small(search)  # under such a limit, every value is small
        assert not settled & (
            search.problem.gone | {v for v, f in enumerate(search.problem.fixed) if f}
        )
        held += len(settled)
    assert held


def test_it_saves_time_near_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = network("unet")
    limit = limit_at("unet", 0.02)
    found = solve(graph, limit)
    assert found.method == "small"
    assert found.peak <= limit
    again = simulate(graph, found.plan.retain)
    assert (again.peak, again.seconds) == (found.peak, found.seconds)
    monkeypatch.setattr(solvers, "holding_small", lambda search: (search.best, frozenset()))
    assert solve(graph, limit).seconds > found.seconds
