"""A backward that is planned when part of its forward was already dropped."""

from __future__ import annotations

import random

import pytest
from graphs import chain, random_graph, with_cut
from hypothesis import given
from hypothesis import strategies as st

from lowtide.planner import HOLD, Graph, simulate
from lowtide.planner.resume import forward_over, from_held, settled_in, with_margin
from once import on_one_recorder

pytestmark = on_one_recorder  # it records nothing


def stopped(seed: int, *, cut: bool = False) -> tuple[Graph, set[int], random.Random]:
    """A forward that is over, and what it happens to hold."""
    rng = random.Random(seed)
    graph = random_graph(seed, rng.randint(6, 16))
    graph = with_cut(graph, seed) if cut else graph
    may = [v for v, node in enumerate(graph.values) if node.producer >= 0]
    held = {v for v in may if v not in graph.fleeting and rng.random() < 0.4}
    held |= graph.must_hold
    return forward_over(graph, held), held, rng


@given(st.integers(0, 1 << 16), st.floats(0.5, 1.5))
def test_only_what_is_held_is_held(seed: int, share: float) -> None:
    graph, held, _ = stopped(seed, cut=True)
    least = from_held(graph, held, 0).result.peak
    found = with_margin(graph, held, int(share * least), 0.1, search=True)
    kept = {v for v, choice in enumerate(found.retain) if choice == HOLD}
    assert {v for v in kept if graph.values[v].producer >= 0} <= held
    assert found.result.peak == simulate(graph, found.retain).peak


@pytest.mark.parametrize("seed", [60, 179, 197, 209, 247, 291])
def test_a_margin_that_is_not_found_refuses_no_limit_that_is_kept(seed: int) -> None:
    """The search is led by the excess over its goal: a goal below the limit may lead it astray."""
    graph, held, rng = stopped(seed)
    limit = int(from_held(graph, held, 0).result.peak * rng.uniform(1, 1.1))
    assert from_held(graph, held, int(limit * 0.9)).result.peak > limit
    assert with_margin(graph, held, limit, 0.1, search=True).result.peak <= limit


def test_what_is_settled_is_held() -> None:
    """An earlier backward has cut the link from a value to what it was made from."""
    graph = chain(8)
    held = {value for value, release in enumerate(graph.release) if release >= 0}
    middle = sorted(held)[len(held) // 2]
    least = from_held(graph, held, 0)
    assert least.retain[middle] != HOLD
    settled = settled_in(graph, {middle})
    assert middle in settled.must_hold
    assert from_held(settled, held, 0).retain[middle] == HOLD
    assert settled_in(graph, set()) is graph
