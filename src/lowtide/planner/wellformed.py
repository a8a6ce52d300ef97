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

EXTERNAL = -1
"""The producer of a value that was made outside the recorded operations."""


def check(graph: Graph) -> None:
    """Raise `UsageError` unless the graph is well-formed."""
    _check_ops(graph)
    _check_values(graph)
    _check_events(graph)


def _check_ops(graph: Graph) -> None:
    count = len(graph.values)
    made: set[int] = set()
    for index, op in enumerate(graph.ops):
        where = f"operation {index} ({op.name})"
        _check_ids(where, (*op.inputs, *op.outputs), count)
        _check_sizes(where, op.workspace, op.other, op.peak_other)
        if not 0 <= op.seconds < float("inf"):
            raise UsageError(
                f"{where} takes {op.seconds} seconds; a time is finite and not negative"
            )
        for value in op.inputs:
            if graph.values[value].producer >= index:
                raise UsageError(
                    f"{where} reads value {value}, which operation "
                    f"{graph.values[value].producer} makes only later; list operations in "
                    "recorded order"
                )
        for value in op.overwrites:
            if value not in op.inputs:
                raise UsageError(
                    f"{where} writes value {value} in place, which is not one of its inputs"
                )
        for value in op.outputs:
            if value in made or graph.values[value].producer != index:
                raise UsageError(
                    f"{where} lists value {value} as an output, whose producer is "
                    f"{graph.values[value].producer}; a value has one producer"
                )
            made.add(value)


def _check_values(graph: Graph) -> None:
    made = {value for op in graph.ops for value in op.outputs}
    for value, node in enumerate(graph.values):
        _check_sizes(f"value {value}", node.nbytes)
        for what, until, end in (
            ("named", node.named, 1),
            ("saved", node.forgotten, node.owned),
            ("there", node.cut, 0),
        ):
            if not -1 <= until < len(graph.ops) + end:
                raise UsageError(
                    f"value {value} is {what} up to operation {until}; the graph has "
                    f"{len(graph.ops)} operations"
                )
        if node.producer != EXTERNAL and value not in made:
            raise UsageError(
                f"value {value} names producer {node.producer}, which does not list it"
            )
        if node.cut >= 0 and (node.producer == EXTERNAL or node.pinned):
            raise UsageError(
                f"value {value} is said to be cut off from its operation: that can be said of "
                "values that an operation makes and that are not pinned"
            )
        if node.owned and (node.producer != EXTERNAL or node.pinned or value < graph.recorded):
            raise UsageError(
                f"value {value} is said to be in memory only for the record: that can be said of "
                "externals that are not pinned, and they follow all other values"
            )


def _check_events(graph: Graph) -> None:
    _check_sizes("what follows the forward", graph.turn)
    released: dict[int, int] = {}
    for index, event in enumerate(graph.events):
        where = f"event {index}"
        _check_ids(where, (event.value, *event.releases), len(graph.values))
        _check_sizes(where, event.other, event.peak_other, event.after)
        if event.value in released:
            raise UsageError(
                f"{where} unpacks value {event.value}, which event {released[event.value]} released"
            )
        for value in event.releases:
            if value in released:
                raise UsageError(f"{where} releases value {value} a second time")
            released[value] = index


def _check_ids(where: str, ids: tuple[int, ...], count: int) -> None:
    for value in ids:
        if not 0 <= value < count:
            raise UsageError(f"{where} names value {value}; the graph has values 0 to {count - 1}")


def _check_sizes(where: str, *sizes: int) -> None:
    for size in sizes:
        if size < 0:
            raise UsageError(f"{where} has a size of {size} bytes; sizes are not negative")
