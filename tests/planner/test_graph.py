"""Graphs and plans are checked when built, and survive being written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from brute_force import choices
from graphs import NETWORKS, chain, random_graph, with_later

from lowtide.errors import UsageError
from lowtide.planner import (
    HOLD,
    NEVER,
    Event,
    Graph,
    OpNode,
    Retention,
    Simulator,
    ValueNode,
    keep_all,
    solve,
)
from lowtide.planner.repair import Problem
from once import on_one_recorder

pytestmark = on_one_recorder  # it records nothing

OP = OpNode("f", 1.0, (0,), (1,))
VALUES = (ValueNode(8, -1), ValueNode(8, 0))


def test_derived_facts() -> None:
    graph = Graph(
        (ValueNode(1, -1), ValueNode(2, 0), ValueNode(3, 1), ValueNode(4, 1)),
        (OpNode("f", 1.0, (0,), (1,)), OpNode("g", 2.0, (1, 0, 1), (2, 3), replayable=False)),
        (Event(1), Event(3), Event(1, releases=(1,)), Event(0, releases=(2,))),
    )
    assert graph.consumers == ((0, 1), (1,), (), ())
    assert graph.last_use == (1, 1, 1, 1)
    assert graph.stays == graph.last_use
    assert graph.first_event == (3, 0, -1, 1)
    assert graph.last_event == (3, 2, -1, 1)
    # Value 3 is never released: its handle lives to the end. Value 2 is saved, never unpacked.
    assert graph.release == (3, 2, 3, 3)
    assert graph.must_hold == {2, 3}
    assert graph.seconds == 3.0


def test_a_name_keeps_a_value_in_memory_after_its_last_use() -> None:
    values = (ValueNode(1, -1), *(ValueNode(1, k, named=n) for k, n in enumerate((2, 1, -1))))
    ops = tuple(OpNode("f", 1.0, (k,), (k + 1,)) for k in range(3))
    graph = Graph(values, ops, ())
    assert graph.last_use == (0, 1, 2, 2)
    assert graph.stays == (0, 2, 2, 2)
    assert Graph.from_json(graph.to_json()) == graph
    unnamed = Graph(tuple(ValueNode(1, v.producer) for v in values), ops, ())
    assert unnamed.fingerprint == graph.fingerprint  # it is an observation


def test_what_only_the_record_has_is_an_observation() -> None:
    graph = Graph(
        (*VALUES, ValueNode(8, -1, named=1, owned=True)), (replace(OP, inputs=(0, 2)),), ()
    )
    assert (graph.owned, graph.recorded) == ((2,), 2)
    assert Graph.from_json(graph.to_json()) == graph
    released = replace(graph, events=(Event(1, releases=(1, 2)),))
    assert released.fingerprint == Graph(VALUES, (OP,), (Event(1, releases=(1,)),)).fingerprint


def test_must_hold_needs_a_reader_that_can_replay() -> None:
    values = (ValueNode(1, -1), ValueNode(1, 0), ValueNode(1, 1), ValueNode(1, 2))
    first = OpNode("f", 0.0, (0,), (1,), replayable=False)
    last = OpNode("h", 0.0, (2,), (3,))
    blocked = OpNode("g", 0.0, (1,), (2,), replayable=False)
    assert Graph(values, (first, blocked, last), ()).must_hold == {2}
    open_ = OpNode("g", 0.0, (1,), (2,))
    assert Graph(values, (first, open_, last), ()).must_hold == {1}


@pytest.mark.parametrize(
    ("values", "ops", "events", "text"),
    [
        (VALUES, (OpNode("f", 1.0, (7,), (1,)),), (), "names value 7; the graph has values 0 to 1"),
        (VALUES, (OpNode("f", -1.0, (0,), (1,)),), (), "takes -1.0 seconds"),
        (VALUES, (OpNode("f", float("nan"), (0,), (1,)),), (), "takes nan seconds"),
        (VALUES, (OpNode("f", 1.0, (1,), (1,)),), (), "list operations in recorded order"),
        (VALUES, (OpNode("f", 1.0, (), (0,)),), (), "a value has one producer"),
        (VALUES, (OpNode("f", 1.0, (), (1, 1)),), (), "a value has one producer"),
        (
            VALUES,
            (OpNode("f", 1.0, (), (1,), overwrites=(0,)),),
            (),
            "writes value 0 in place, which is not one of its inputs",
        ),
        (VALUES, (OpNode("f", 1.0, (), ()),), (), "names producer 0, which does not list it"),
        ((ValueNode(-8, -1),), (), (), "value 0 has a size of -8 bytes"),
        (
            (ValueNode(8, -1), ValueNode(8, 0, named=2)),
            (OP,),
            (),
            "value 1 is named up to operation 2; the graph has 1 operations",
        ),
        ((ValueNode(8, -1, named=-2),), (), (), "value 0 is named up to operation -2"),
        ((ValueNode(8, -1, named=1, owned=True),), (), (), "value 0 is named up to operation 1"),
        ((ValueNode(8, 0, owned=True),), (OpNode("f", 0, (), (0,)),), (), "only for the record"),
        (
            (ValueNode(8, -1, cut=0), ValueNode(8, 0)),
            (OP,),
            (),
            "value 0 is said to be cut off from its operation",
        ),
        ((ValueNode(8, -1, cut=0),), (), (), "value 0 is there up to operation 0"),
        ((ValueNode(8, -1, owned=True), ValueNode(8, -1)), (), (), "they follow all other values"),
        ((ValueNode(8, -1, forgotten=0),), (), (), "value 0 is saved up to operation 0"),
        (VALUES, (OP,), (Event(2),), "event 0 names value 2"),
        (VALUES, (OP,), (Event(1, releases=(1,)), Event(1)), "which event 0 released"),
        (VALUES, (OP,), (Event(0, releases=(1, 1)),), "releases value 1 a second time"),
        (VALUES, (OP,), (Event(0, other=-1),), "event 0 has a size of -1 bytes"),
    ],
)
def test_contradictions_are_refused(
    values: tuple[ValueNode, ...],
    ops: tuple[OpNode, ...],
    events: tuple[Event, ...],
    text: str,
) -> None:
    with pytest.raises(UsageError, match=text):
        Graph(values, ops, events)


@pytest.mark.parametrize("name", [*NETWORKS, "random"])
def test_graph_round_trip(name: str) -> None:
    graph = with_later(random_graph(3, 12), 3) if name == "random" else NETWORKS[name]()
    assert any(event.after for event in graph.events) is (name == "random")
    assert any(op.overwrites for op in graph.ops) is (name == "random")
    again = Graph.from_json(graph.to_json())
    assert again == graph
    assert again.fingerprint == graph.fingerprint


def test_fingerprint_is_structure_only() -> None:
    graph = chain(3)
    ops = [OpNode("f", 9.0, o.inputs, o.outputs, 5, True, 1, 2) for o in graph.ops[:-1]]
    slower = Graph(graph.values, (*ops, graph.ops[-1]), graph.events)
    assert slower.fingerprint == graph.fingerprint
    assert chain(4).fingerprint != graph.fingerprint
    assert chain(3, nbytes=7).fingerprint != graph.fingerprint
    # Written down, because plans are stored: a change here breaks every stored plan.
    assert chain(1, nbytes=8).fingerprint == "3120f7bd7d9ff95cc201f987152b6cd9"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "pickle"}, "its format is 'pickle'"),
        ({"version": 1}, "has version 1; this release of lowtide reads version 4"),
        ({"values": 3}, "'values' must be a list of rows of 4 fields"),
        ({"values": [[1, 2]]}, "'values' must be a list of rows of 4 fields"),
        ({"values": [["8", -1, False, -1]]}, "'8' stands where a whole number belongs"),
        ({"values": [[8, -1, 0, -1]]}, "0 stands where true or false belongs"),
        ({"values": [[True, -1, False, -1]]}, "True stands where a whole number belongs"),
        ({"values": [[8, -1, False, None]]}, "None stands where a whole number belongs"),
        ({"events": [[0, 0, 0, {}, 0]]}, "{} stands where a list of ids belongs"),
        ({"overwritten": None}, "None stands where a list of ids belongs"),
        ({"cut": [[1]]}, "'cut' must be a list of rows of 2 fields"),
        ({"forgotten": [[1, None]]}, "None stands where a whole number belongs"),
        ({"overwrites": None}, "'overwrites' must be a list of rows of 2 fields"),
        ({"more": [0]}, "2 events, 1 entries in more"),
        ({"more": [-2, 0]}, "followed by -2 events of its node; the graph has 2"),
        ({"more": [0, 1]}, "followed by 1 events of its node; the graph has 2"),
        ({"ops": [[1, 0.0, [], [], 0, True, 0, 0]]}, "1 stands where text belongs"),
        ({"ops": [["f", None, [], [], 0, True, 0, 0]]}, "None stands where a number belongs"),
        ({"turn": None}, "None stands where a whole number belongs"),
    ],
)
def test_damaged_graphs_are_refused(change: dict[str, object], text: str) -> None:
    data = json.loads(chain(2).to_json()) | change
    with pytest.raises(UsageError, match=text):
        Graph.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "import os", "[" * 100_000])
def test_text_that_is_not_json(text: str) -> None:
    with pytest.raises(UsageError, match="the text is not JSON"):
        Graph.from_json(text)


def test_other_documents_are_no_graphs() -> None:
    with pytest.raises(UsageError, match=r"its format is 'lowtide\.plan'"):
        Graph.from_json('{"format": "lowtide.plan", "version": 1}')


def test_plan_refuses_what_means_nothing() -> None:
    assert Retention((HOLD, 0, 7, NEVER)).retain == (-1, 0, 7, NEVER)
    with pytest.raises(UsageError, match="cannot say -2 for value 1"):
        Retention((0, -2))
    with pytest.raises(UsageError, match="cannot say '0' for value 0"):
        Retention(("0",))  # type: ignore[arg-type]


def test_keep_all_holds_what_cannot_be_replayed() -> None:
    for seed in range(20):
        graph = random_graph(seed, 8)
        retain = keep_all(graph).retain
        assert all(retain[v] == -1 for v in graph.must_hold)
        assert all(retain[v] == -1 for v, r in enumerate(graph.release) if r >= 0)


def test_what_is_written_in_place_and_not_saved_is_held_by_no_plan() -> None:
    values = tuple(ValueNode(8, k - 1, overwritten=k in (1, 2)) for k in range(4))
    ops = tuple(OpNode(f"op{k}", 1.0, (k,), (k + 1,), other=16, peak_other=16) for k in range(3))
    graph = Graph(values, ops, (Event(2, 8, 8, (2,)), Event(3, 0, 0, (3,))))
    assert graph.fleeting == {1}  # the other one is saved: nobody saves what others write
    assert Graph.from_json(graph.to_json()) == graph
    for limit in range(0, 64, 4):
        assert solve(graph, limit).plan.retain[1] != HOLD
    problem = Problem(Simulator(graph))
    assert problem.start({1, 2})[1] == NEVER
    assert choices(problem, 1) == (NEVER,)
