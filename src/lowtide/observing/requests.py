"""What backward asks for.

Problem: a node of autograd's graph has what it was given until its backward is over, whatever a
plan says, and nothing tells when that is. Invariant: a node counts as over after the last request
that it makes only if another node of the same backward asks next, or that backward has ended;
else it may be running another backward. Imports `lowtide.planner.graph`. Rejected: what an
operation saved as the requests of one node, as a node may be that of several operations, and an
operation may have several nodes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
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
    """The numbers of the backward and of the node that asks; None: no node does, or what it is
    given is also kept by the graph of its own backward."""


def following(requests: Sequence[Request], ended: Container[int]) -> list[int]:
    """For each request, how many requests it takes from it to the last of the same node, or
    `UNKNOWN`. `ended`: how many requests there were when backwards ended.

    Requests of another node may lie between them: those of a backward that a custom one runs.
    """
    last = {request.node: index for index, request in enumerate(requests)}
    found = []
    for index, request in enumerate(requests):
        end = last[request.node] + 1
        over = end == len(requests) or end in ended or _one_backward(request, requests[end])
        found.append(end - 1 - index if over and request.node is not None else UNKNOWN)
    return found


def _one_backward(request: Request, other: Request) -> bool:
    return (request.node or (0,))[0] == (other.node or (-1,))[0]
