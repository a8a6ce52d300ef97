"""Whether a graph is one: every id is in range, every value has one producer, sizes are sizes.

Problem: graphs come from files and from measurements, and the solvers use their numbers as indices.
Invariant: what passes `check` can be simulated; anything else is a `UsageError` that names the
place. Imports `lowtide.errors`. Rejected: checks in the solvers, where each would be made again for
every plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.errors import UsageError

if TYPE_CHECKING:
    from lowtide.planner.graph import Graph
    from lowtide.planner.nodes import Event, OpNode, ValueNode

EXTERNAL = -1
"""The producer of a value that was made outside the recorded operations."""


class _FlawError(Exception):
    """What is wrong with a part of a graph; which part it is, `check` adds. Each plan begins with a
    check, so nothing says where it is before something is wrong."""


def check(graph: Graph) -> None:
    """Raise `UsageError` unless the graph is well-formed."""
    made: set[int] = set()
    released: dict[int, int] = {}
    kind, index = "operation", 0
    try:
        for index, op in enumerate(graph.ops):
            _check_op(graph, index, op, made)
        kind = "value"
        for index, node in enumerate(graph.values):
            _check_value(graph, index, node, made)
        kind = "event"
        for index, event in enumerate(graph.events):
            _check_event(graph, index, event, released)
    except _FlawError as flaw:
        name = f" ({graph.ops[index].name})" if kind == "operation" else ""
        raise UsageError(f"{kind} {index}{name} {flaw}") from None
    if graph.turn < 0:
        raise UsageError(
            f"what follows the forward has a size of {graph.turn} bytes; sizes are not negative"
        )


def _check_op(graph: Graph, index: int, op: OpNode, made: set[int]) -> None:
    values = graph.values
    _check_ids((*op.inputs, *op.outputs), len(values))
    _check_sizes(op.workspace, op.other, op.peak_other)
    if not 0 <= op.seconds < float("inf"):
        raise _FlawError(f"takes {op.seconds} seconds; a time is finite and not negative")
    for value in op.inputs:
        if values[value].producer >= index:
            raise _FlawError(
                f"reads value {value}, which operation {values[value].producer} makes only later; "
                "list operations in recorded order"
            )
    for value in op.overwrites:
        if value not in op.inputs:
            raise _FlawError(f"writes value {value} in place, which is not one of its inputs")
    for value in op.outputs:
        if value in made or values[value].producer != index:
            raise _FlawError(
                f"lists value {value} as an output, whose producer is {values[value].producer}; a "
                "value has one producer"
            )
        made.add(value)


def _check_value(graph: Graph, value: int, node: ValueNode, made: set[int]) -> None:
    _check_sizes(node.nbytes)
    for what, until, end in (
        ("named", node.named, 1),
        ("saved", node.forgotten, node.owned),
        ("there", node.cut, 0),
    ):
        if not -1 <= until < len(graph.ops) + end:
            raise _FlawError(
                f"is {what} up to operation {until}; the graph has {len(graph.ops)} operations"
            )
    if node.producer != EXTERNAL and value not in made:
        raise _FlawError(f"names producer {node.producer}, which does not list it")
    if node.cut >= 0 and (node.producer == EXTERNAL or node.pinned):
        raise _FlawError(
            "is said to be cut off from its operation: that can be said of values that an "
            "operation makes and that are not pinned"
        )
    if node.owned and (node.producer != EXTERNAL or node.pinned or value < graph.recorded):
        raise _FlawError(
            "is said to be in memory only for the record: that can be said of externals that are "
            "not pinned, and they follow all other values"
        )


def _check_event(graph: Graph, index: int, event: Event, released: dict[int, int]) -> None:
    _check_ids((event.value, *event.releases), len(graph.values))
    _check_sizes(event.other, event.peak_other, event.after)
    if not -1 <= event.more < len(graph.events) - index:
        raise _FlawError(
            f"is followed by {event.more} events of its node; the graph has {len(graph.events)}"
        )
    if event.value in released:
        raise _FlawError(
            f"unpacks value {event.value}, which event {released[event.value]} released"
        )
    for value in event.releases:
        if value in released:
            raise _FlawError(f"releases value {value} a second time")
        released[value] = index


def _check_ids(ids: tuple[int, ...], count: int) -> None:
    for value in ids:
        if not 0 <= value < count:
            raise _FlawError(f"names value {value}; the graph has values 0 to {count - 1}")


def _check_sizes(*sizes: int) -> None:
    for size in sizes:
        if size < 0:
            raise _FlawError(f"has a size of {size} bytes; sizes are not negative")
