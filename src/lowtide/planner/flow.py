"""Maximum flow, and the minimum cut it proves, on graphs of a few thousand arcs.

Problem: the planner's cuts are solved many times for capacities that only grow, and in plain Python
where there is no compiled core.

Invariant: capacities and flows are integers, so the cut is exact and the same on every machine.
A flow stays feasible while capacities grow: `maximise` continues from the current flow.

Imports: the standard library.

Rejected: push-relabel, as augmenting paths are short here (a replay's cost is one or two arcs away
from the bytes that it would free) and a level graph needs few phases; recursion, because a chain of
a thousand operations is deeper than the interpreter allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

INFINITE = 1 << 100
MOST = 1 << 60
"""Networks for `CutWith` must have finite capacities that sum to less than this."""


class CutWith(Protocol):
    """Finds minimum cuts faster; `flow.h` says how."""

    def __call__(self, nodes: int, heads: list[int], rooms: list[int], /) -> bytes:
        """For each node, whether it is on the source's side of the smallest minimum cut."""
        ...


class Network:
    """Nodes 0 (source), 1 (sink) and up; arcs in pairs, arc `a ^ 1` being the reverse of `a`."""

    SOURCE = 0
    SINK = 1

    compiled: ClassVar[Callable[[], CutWith | None]] = staticmethod(lambda: None)
    """What finds the same cuts faster than this class; None: nothing does."""

    def __init__(self, nodes: int, cut_with: CutWith | None = None) -> None:
        self.cut_with = cut_with
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]
        self.head: list[int] = []
        self.room: list[int] = []

    def node(self) -> int:
        """Add a node; returns its number."""
        self.arcs.append([])
        return len(self.arcs) - 1

    def arc(self, tail: int, head: int, capacity: int) -> int:
        """Add an arc; its number is its index in `head` and `room`."""
        number = len(self.head)
        self.head += (head, tail)
        self.room += (capacity, 0)
        self.arcs[tail].append(number)
        self.arcs[head].append(number + 1)
        return number

    def snapshot(self) -> list[int]:
        """The residual capacities of all arcs, which are the flow."""
        return self.room.copy()

    def restore(self, snapshot: list[int]) -> None:
        """Go back to a flow that `snapshot` returned."""
        self.room = snapshot.copy()

    def maximise(self) -> int:
        """Push flow until no augmenting path is left; returns the amount added."""
        added = 0
        while levels := self._levels():
            added += self._block(levels)
        return added

    def cut(self) -> Sequence[int]:
        """The smallest minimum cut, as `source_side` returns it. The flow may not be kept; to
        continue from a flow, call `maximise`."""
        if self.cut_with is not None:
            return self.cut_with(len(self.arcs), self.head, self.room)
        self.maximise()
        return self.source_side()

    def source_side(self) -> list[bool]:
        """For each node, whether the source still reaches it: the smallest minimum cut."""
        reached = [False] * len(self.arcs)
        reached[self.SOURCE] = True
        stack = [self.SOURCE]
        arcs, head, room = self.arcs, self.head, self.room
        while stack:
            for a in arcs[stack.pop()]:
                node = head[a]
                if room[a] and not reached[node]:
                    reached[node] = True
                    stack.append(node)
        return reached

    def _levels(self) -> list[int]:
        """Distance of each node to the sink, or an empty list if the source cannot reach it."""
        far = len(self.arcs)
        levels = [far] * far
        levels[self.SINK] = 0
        queue = [self.SINK]
        arcs, head, room = self.arcs, self.head, self.room
        for node in queue:
            distance = levels[node] + 1
            for a in arcs[node]:
                tail = head[a]
                if levels[tail] == far and room[a ^ 1]:
                    levels[tail] = distance
                    if tail == self.SOURCE:
                        return levels
                    queue.append(tail)
        return []

    def _block(self, levels: list[int]) -> int:
        """Saturate every shortest path (Dinic), with an explicit stack for the path."""
        arcs, head, room = self.arcs, self.head, self.room
        place = [0] * len(arcs)
        path: list[int] = []
        node, added = self.SOURCE, 0
        while True:
            if node == self.SINK:
                amount = min([room[a] for a in path])
                added += amount
                keep = len(path)
                for position in range(len(path) - 1, -1, -1):
                    a = path[position]
                    room[a] -= amount
                    room[a ^ 1] += amount
                    if not room[a]:
                        keep = position
                node = head[path[keep] ^ 1]
                del path[keep:]
                continue
            out, level = arcs[node], levels[node] - 1
            index = place[node]
            while index < len(out):
                a = out[index]
                if room[a] and levels[head[a]] == level:
                    break
                index += 1
            place[node] = index
            if index < len(out):
                path.append(a)
                node = head[a]
            elif path:
                levels[node] = len(arcs)
                node = head[path.pop() ^ 1]
            else:
                return added
