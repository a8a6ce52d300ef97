"""What backward asks for.

Problem: a node of autograd's graph has what it was given until its backward is over, whatever a
plan says, and nothing tells when that is. Invariant: a node counts as over after the last request
that it makes, as the next one is another's; where no node is known to ask, nothing is said. Imports
`lowtide.planner.graph`. Rejected: what an operation saved as the requests of one node, as a node
may be that of several operations, and an operation may have several nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.planner.graph import UNKNOWN


class Request(NamedTuple):
    """Backward asks for a saved value."""

    value: int
    operation: int
    """How many operations were recorded when it was saved."""
    entry: int
    """The mark of the measurement when it is asked for."""
    answer: int
    """The mark when it is there."""
    node: tuple[int, int] | None
    """The numbers of the backward and of the node that asks; None: no node does."""


def following(requests: Sequence[Request]) -> list[int]:
    """For each request, how many requests it takes from it to the last of the same node, or
    `UNKNOWN`.

    Requests of another node may lie between them: those of a backward that a custom one runs.
    """
    last = {request.node: index for index, request in enumerate(requests)}
    return [
        UNKNOWN if request.node is None else last[request.node] - index
        for index, request in enumerate(requests)
    ]
