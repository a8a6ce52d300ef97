"""The simulator against hand-computed steps and against the rules followed literally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
from graphs import chain, random_graph, run_twice, with_cut, with_later, with_nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import peak_and_replays

from lowtide.errors import UsageError
from lowtide.learning.learned import Learned
from lowtide.observing.requests import Request, following
from lowtide.observing.seen import Seen
from lowtide.planner import HOLD, NEVER, Event, Graph, OpNode, Simulator, ValueNode, simulate
from lowtide.planner.graph import UNKNOWN
from lowtide.planner.simulate import ABSENT, REPLAY_OVERHEAD
from once import on_one_recorder

pytestmark = on_one_recorder  # it records nothing


def line(*, workspace: int = 0, pinned: bool = False) -> Graph:
    """x0 (external) -> f0 -> v1 (10) -> f1 -> v2 (20) -> f2 -> v3 (30); v1, v2, v3 saved."""
    values = (ValueNode(5, -1), ValueNode(10, 0, pinned), ValueNode(20, 1), ValueNode(30, 2))
    ops = (
        OpNode("f0", 1.0, (0,), (1,), 0, True, 10, 10),
        OpNode("f1", 2.0, (1,), (2,), workspace, True, 30, 30 + workspace),
        OpNode("f2", 4.0, (2,), (3,), 0, True, 50, 50),
    )
    events = (
        Event(3, 3, 4, (3,)),
        Event(2, 5, 6, (2,)),
        Event(1, 7, 8, (1,)),
    )
    return Graph(values, ops, events)


def seconds(*ops: float) -> float:
    return pytest.approx(sum(ops) + REPLAY_OVERHEAD * len(ops))  # type: ignore[return-value]


def test_everything_held() -> None:
    found = simulate(line(), (HOLD,) * 4, trace=True)
    # During f2: 50 of natural life (v2, v3) and v1, whose forward life ended at f1.
    assert found.trace is not None
    assert found.trace.forward == [10, 30, 60]
    # At v3's unpack: all three held. Each release frees one.
    assert found.trace.backward == [4 + 60, 6 + 30, 8 + 10]
    assert (found.peak, found.peak_at, found.seconds) == (64, ("backward", 0), 0.0)
    assert found.held_bytes_at_peak == 60


def with_external(*, named: int = -1, released: bool = False) -> Graph:
    """`line`, whose f1 also reads x4 (100), which only the record has."""
    graph = line()
    values = (*graph.values, ValueNode(100, -1, named=named, owned=True))
    ops = (graph.ops[0], replace(graph.ops[1], inputs=(1, 4)), graph.ops[2])
    last = replace(graph.events[2], releases=(1, 4)) if released else graph.events[2]
    return Graph(values, ops, (*graph.events[:2], last))


def test_what_is_cut_off_from_its_operation_is_held_while_a_reader_may_be_replayed() -> None:
    graph = line()
    values = [
        replace(node, cut=1 if number == 1 else -1) for number, node in enumerate(graph.values)
    ]
    cut = replace(graph, values=tuple(values))
    assert cut.must_hold == {1}
    assert cut.fingerprint == graph.fingerprint  # it is an observation
    assert Graph.from_json(cut.to_json()) == cut
    assert simulate(cut, (HOLD,) * 4) == simulate(graph, (HOLD,) * 4)
    held = (HOLD, HOLD, 0, 0)
    assert simulate(cut, held) == simulate(graph, held)
    with pytest.raises(UsageError, match="value 1, cut off from its operation, which cannot be"):
        simulate(cut, (HOLD, 0, 0, 0))


def test_a_plan_that_let_go_of_what_fsdp2_then_cut_off_held_it_all_the_same() -> None:
    graph = line()
    values = [
        replace(node, cut=1 if number == 1 else -1) for number, node in enumerate(graph.values)
    ]
    cut = replace(graph, values=tuple(values))
    ran = Learned(cut, cast(Seen, None), [HOLD, 0, HOLD, HOLD], measured=True, lessons=1)
    assert ran.peak_as_it_ran == simulate(cut, (HOLD,) * 4).peak


def test_an_external_that_only_the_record_has_lives_as_long_as_a_reader_may_be_replayed() -> None:
    held = simulate(with_external(), (HOLD,) * 5, trace=True)
    plain = simulate(line(), (HOLD,) * 4, trace=True)
    assert held.trace is not None
    assert plain.trace is not None
    assert (held.trace.forward, held.trace.backward) == (plain.trace.forward, plain.trace.backward)
    assert held.trace.alive[4] == -1
    # v2 is made again at event 0 and retained until event 1: so long f1 may read x4.
    found = simulate(with_external(), (HOLD, HOLD, 0, 0, HOLD), trace=True)
    assert found.trace is not None
    assert found.trace.alive[4] == 1
    assert found.trace.forward == [10, 30, 50 + 10 + 100]
    assert found.trace.replay == [3 + 110 + 20 + 30, 0, 0]
    assert found.trace.backward == [4 + 60 + 100, 6 + 30 + 100, 8 + 10]
    assert found.replayed_ops == 2  # it is never replayed itself


def test_an_external_may_be_in_memory_until_backward_whatever_a_plan_says() -> None:
    found = simulate(with_external(named=3), (HOLD, HOLD, 0, 0, HOLD), trace=True)
    assert found.trace is not None
    assert found.trace.forward == [10, 30, 50 + 10]  # part of what was measured
    assert found.trace.backward == [4 + 60 + 100, 6 + 30 + 100, 8 + 10]


def test_an_external_that_autograd_saved_lives_until_its_release() -> None:
    found = simulate(with_external(released=True), (HOLD,) * 5, trace=True)
    assert found.trace is not None
    assert found.trace.backward == [4 + 60 + 100, 6 + 30 + 100, 8 + 10 + 100]


def test_a_plan_cannot_let_go_of_an_external() -> None:
    graph = with_external()
    assert graph.must_hold == {4}
    with pytest.raises(UsageError, match=r"lets go of value 4, an external, which cannot be"):
        simulate(graph, (HOLD, HOLD, 0, 0, 0))


def test_cached_once_recomputed() -> None:
    found = simulate(line(workspace=7), (HOLD, HOLD, 0, 0), trace=True)
    assert found.trace is not None
    assert found.trace.forward == [10, 37, 60]
    # Event 0: f1 makes v2 beside v1, with its workspace; f2 makes v3 beside both.
    assert found.trace.replay == [3 + 10 + 20 + 30, 0, 0]
    assert found.trace.backward == [4 + 60, 6 + 30, 8 + 10]
    assert found.trace.replays == [0, 1, 1]
    assert found.trace.start == [-1, -1, 0, 0]
    assert found.seconds == seconds(2.0, 4.0)
    assert found.replayed_ops == 2


def test_retained_later_is_recomputed_again() -> None:
    found = simulate(line(), (HOLD, HOLD, 1, 0), trace=True)
    assert found.trace is not None
    # v2 is a temporary at event 0, gone after f2; at event 1 it is made again and retained.
    assert found.trace.replay == [3 + 10 + 20 + 30, 5 + 10 + 20, 0]
    assert found.trace.backward == [63, 6 + 30, 8 + 10]
    assert found.trace.replays == [0, 2, 1]
    assert found.peak_at == ("replay", 0)
    assert found.held_bytes_at_peak == 10
    assert found.trace.peak_op == 2


def test_nothing_held() -> None:
    found = simulate(line(), (HOLD, NEVER, NEVER, NEVER), trace=True)
    assert found.trace is not None
    # Every event runs the chain from the external; a temporary dies after its last reader.
    assert found.trace.replay == [3 + 50, 5 + 30, 7 + 10]
    assert found.trace.backward == [53, 5 + 30, 8 + 10]
    assert found.trace.replays == [3, 2, 1]
    assert found.trace.start == [-1, ABSENT, ABSENT, ABSENT]


def test_pinned_values_are_free() -> None:
    found = simulate(line(pinned=True), (HOLD, NEVER, 0, 0), trace=True)
    assert found.trace is not None
    assert found.trace.forward == [10, 30, 50]
    assert found.trace.replays == [0, 1, 1]
    assert found.trace.backward == [4 + 50, 6 + 20, 8]


def test_what_has_a_name_counts_as_held_only_after_it() -> None:
    """v1 has a name until f2 is over: it is among the others of f2, whatever a plan says."""
    graph = line()
    values = (graph.values[0], replace(graph.values[1], named=2), *graph.values[2:])
    ops = (*graph.ops[:2], replace(graph.ops[2], other=60, peak_other=60))
    named = Graph(values, ops, graph.events)
    for first in (HOLD, 0):
        found = simulate(named, (HOLD, first, HOLD, HOLD), trace=True)
        assert found.trace is not None
        assert found.trace.forward == [10, 30, 60]
    held = simulate(named, (HOLD,) * 4, trace=True)
    assert held.trace is not None
    assert held.trace.backward == [4 + 60, 6 + 30, 8 + 10]  # the name has gone


def test_unsaved_value_held_for_a_replay_lives_as_long_as_its_reader() -> None:
    values = (ValueNode(1, -1), ValueNode(100, 0), ValueNode(10, 1))
    ops = (OpNode("a", 1.0, (0,), (1,)), OpNode("b", 1.0, (1,), (2,)))
    events = (Event(0), Event(2, releases=(2,)), Event(0, releases=(0,)))
    found = simulate(Graph(values, ops, events), (HOLD, HOLD, 0), trace=True)
    assert found.trace is not None
    assert found.trace.alive == [2, 1, 1]
    assert found.trace.backward == [100, 110, 0]
    # Once its reader is held, nobody refers to it any more.
    cut = simulate(Graph(values, ops, events), (HOLD, HOLD, HOLD), trace=True)
    assert cut.trace is not None
    assert cut.trace.alive == [2, -1, 1]
    assert cut.trace.backward == [10, 10, 0]


def test_what_a_release_frees_is_not_there_after_it() -> None:
    """Rule 5: operations that saved nothing have their backwards between two requests."""
    graph = line()
    first, second, third = graph.events
    graph = replace(graph, events=(replace(first, after=20), second, replace(third, after=70)))
    held = simulate(graph, (HOLD, HOLD, HOLD, HOLD), trace=True)
    assert held.trace is not None
    assert held.trace.backward == [4 + 60, 6 + 30, 70]
    assert (held.peak, held.peak_at, held.held_bytes_at_peak) == (70, ("backward", 2), 0)
    # What was recomputed for an event, and is not kept, is gone as well.
    dropped = simulate(graph, (HOLD, HOLD, HOLD, NEVER), trace=True)
    assert dropped.trace is not None
    assert dropped.trace.backward == [4 + 60, 6 + 30, 70]
    higher = replace(graph, events=(replace(first, after=40), second, third))
    assert simulate(higher, (HOLD, HOLD, HOLD, NEVER)).peak == 40 + 30


def test_unwanted_outputs_count_while_the_operation_runs() -> None:
    values = (ValueNode(1, -1), ValueNode(10, 0), ValueNode(100, 0), ValueNode(7, 1))
    ops = (OpNode("split", 1.0, (0,), (1, 2)), OpNode("b", 1.0, (1,), (3,)))
    graph = Graph(values, ops, (Event(3, releases=(3,)),))
    found = simulate(graph, (HOLD, NEVER, NEVER, 0), trace=True)
    assert found.trace is not None
    assert found.trace.replay == [110]
    assert found.trace.backward == [110]
    assert found.trace.peak_op == 0


def test_a_replay_in_place_writes_what_it_is_the_last_to_read() -> None:
    """x0 -> a -> v1 -> relu_ -> v2, which is saved."""
    values = (ValueNode(1, -1), ValueNode(10, 0, overwritten=True), ValueNode(10, 1))
    make, write = OpNode("a", 1.0, (0,), (1,)), OpNode("relu_", 1.0, (1,), (2,), overwrites=(1,))
    graph = Graph(values, (make, write), (Event(2, releases=(2,)),))
    assert simulate(graph, (HOLD, NEVER, 0)).peak == 10
    copied = replace(graph, ops=(make, replace(write, overwrites=())))
    assert simulate(copied, (HOLD, NEVER, 0)).peak == 20
    # What is held, or retained by the plan, is copied.
    saved = replace(graph, events=(*graph.events, Event(1, releases=(1,))))
    assert simulate(saved, (HOLD, 0, 0)).peak == 20
    assert simulate(replace(saved, events=saved.events[::-1]), (HOLD, HOLD, 0)).peak == 20
    # So is what a later operation of the same replay reads.
    values = (values[0], values[1], values[2], ValueNode(3, 2))
    late = OpNode("b", 1.0, (1, 2), (3,))
    graph = Graph(values, (make, write, late), (Event(3, releases=(3,)),))
    assert simulate(graph, (HOLD, NEVER, NEVER, 0)).peak == 23


def test_a_missing_value_that_cannot_be_replayed_is_an_error() -> None:
    values = (ValueNode(1, -1), ValueNode(10, 0))
    graph = Graph(
        values, (OpNode("draw", 1.0, (0,), (1,), replayable=False),), (Event(1, releases=(1,)),)
    )
    with pytest.raises(UsageError, match=r"operation 0 \(draw\), which cannot be replayed"):
        simulate(graph, (HOLD, 0))
    assert simulate(graph, (HOLD, HOLD)).seconds == 0.0


def test_wrong_length() -> None:
    with pytest.raises(UsageError, match="2 decisions for a graph of 4 values"):
        simulate(line(), (0, 0))


def test_a_run_can_be_cut_short() -> None:
    graph = chain(20)
    retain = [-1] + [NEVER] * (len(graph.values) - 1)
    sim = Simulator(graph)
    assert sim.run(retain).complete
    cut = sim.run(retain, seconds_limit=graph.seconds)
    assert not cut.complete
    assert cut.seconds > graph.seconds
    assert sim.evaluations == 2


def test_what_a_node_was_given_counts_until_it_is_over() -> None:
    """v3's node asks for v2 as well, and the graph is retained for v2 to be asked for again."""
    graph = line()
    ask3, ask2, ask1 = graph.events
    together = replace(ask3, more=1)
    graph = replace(graph, events=(together, replace(ask2, releases=(), more=0), ask2, ask1))
    assert graph.asked[2] == (1, 2)
    assert graph.ends == (1, 1, 2, 3)
    assert graph.latest == (-1, 3, 2, 0)
    assert Graph.from_json(graph.to_json()) == graph

    # v3 (30) is not retained, but there while v2 is asked for, and gone when it is the second time.
    found = simulate(graph, (HOLD, HOLD, HOLD, NEVER), trace=True)
    assert found.trace is not None
    held = 10 + 20
    assert found.trace.backward == [max(4, 3) + held + 30, 6 + held + 30, 6 + held, 8 + 10]

    # v2 (20) is made twice: the first node that asks has it to its end, the second one to its.
    found = simulate(graph, (HOLD, HOLD, 2, HOLD), trace=True)
    assert found.trace is not None
    assert found.trace.start[2] == 2
    assert found.seconds == seconds(2.0, 2.0)
    assert found.trace.backward == [4 + 10 + 30, 6 + 10 + 20, 6 + 10 + 20, 8 + 10]


def test_a_node_is_over_if_the_next_request_shows_it() -> None:
    def ask(*nodes: tuple[int, int] | None, ended: Sequence[int] = ()) -> list[int]:
        requests = [Request(0, 0, 0, 0, node) for node in nodes]
        return following(requests, frozenset(ended))

    one, two, inner = (5, 1), (5, 2), (6, 9)
    assert ask(two, two, one) == [1, 0, 0]
    assert ask(two, inner, two, one, ended=[2]) == [2, 0, 0, 0]  # and again when that is over
    # Is it over, or does it run the next one? One that has ended does not.
    assert ask(two, inner, one) == [UNKNOWN, UNKNOWN, 0]
    assert ask(two, inner, one, ended=[1, 2]) == [0, 0, 0]
    assert ask(two, None, one) == [UNKNOWN, UNKNOWN, 0]


def test_a_node_of_which_nothing_is_known_has_what_it_was_given_until_that_is_released() -> None:
    graph = line()
    ask3, ask2, ask1 = graph.events
    unknown = replace(ask2, releases=(), more=UNKNOWN)
    graph = replace(graph, events=(ask3, unknown, ask1, ask2))
    assert graph.ends == (0, 3, 2, 3)
    assert graph.latest == (-1, 2, 1, 0)
    found = simulate(graph, (HOLD, HOLD, 3, HOLD), trace=True)
    assert found.trace is not None
    assert found.trace.backward == [4 + 10 + 30, 6 + 10 + 20, 8 + 10 + 20, 6 + 10 + 20 + 20]


def test_a_step_without_operations() -> None:
    empty = simulate(Graph((), (), ()), ())
    assert (empty.peak, empty.seconds, empty.replayed_ops) == (0, 0.0, 0)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 14), st.randoms(use_true_random=False))
def test_against_the_rules_followed_literally(seed: int, ops: int, random: object) -> None:
    graph = with_cut(with_later(random_graph(seed, ops), seed), seed)
    pick = random.choice  # type: ignore[attr-defined]
    graph = pick((graph, run_twice(graph)))
    graph = pick((graph, with_nodes(graph, seed)))
    last = len(graph.events)
    retain = [
        HOLD if v in graph.must_hold else pick((HOLD, 0, 0, pick(range(last + 1)), NEVER))
        for v in range(len(graph.values))
    ]
    found = simulate(graph, retain)
    peak, replayed = peak_and_replays(graph, retain)
    assert found.peak == peak
    assert found.replayed_ops == len(replayed)
    assert found.seconds == seconds(*(graph.ops[op].seconds for op in replayed))
