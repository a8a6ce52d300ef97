"""Maximum flow against small cases and against enumeration of every cut."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planner.flow import INFINITE, Network
from once import on_one_recorder

pytestmark = on_one_recorder  # it records nothing


def test_two_paths() -> None:
    network = Network(4)
    network.arc(0, 2, 5)
    network.arc(2, 1, 3)
    network.arc(0, 3, 4)
    network.arc(3, 1, 9)
    assert network.maximise() == 7
    assert network.source_side() == [True, False, True, False]


def test_flow_is_sent_back() -> None:
    # The shortest path takes the middle arc; the maximum has to undo it.
    network = Network(6)
    for tail, head in ((0, 2), (2, 3), (3, 1), (0, 4), (4, 3), (2, 5), (5, 1)):
        network.arc(tail, head, 1)
    assert network.maximise() == 2


def test_continues_after_widening() -> None:
    network = Network(3)
    first = network.arc(0, 2, 1)
    network.arc(2, 1, 10)
    start = network.snapshot()
    assert network.maximise() == 1
    network.room[first] += 4
    assert network.maximise() == 4
    network.restore(start)
    assert network.maximise() == 1


def test_a_long_chain_needs_no_recursion() -> None:
    count = 20_000
    network = Network(count)
    network.arc(0, 2, INFINITE)
    for node in range(2, count - 1):
        network.arc(node, node + 1, 7)
    network.arc(count - 1, 1, 8)
    assert network.maximise() == 7


arcs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 9)), max_size=20)


@settings(max_examples=200, deadline=None)
@given(arcs)
def test_equals_the_smallest_cut(edges: list[tuple[int, int, int]]) -> None:
    edges = [(a, b, c) for a, b, c in edges if a != b]
    network = Network(7)
    for tail, head, capacity in edges:
        network.arc(tail, head, capacity)
    cuts = []
    for rest in product((True, False), repeat=5):
        side = (True, False, *rest)
        cuts.append(sum(c for a, b, c in edges if side[a] and not side[b]))
    assert network.maximise() == min(cuts)
    side = tuple(network.source_side())
    assert sum(c for a, b, c in edges if side[a] and not side[b]) == min(cuts)
