"""Anchors: hold what crosses a few places of the forward, recompute everything between them.

Problem: at low limits the memory of replays dominates the peak, and a cut, which knows only one
moment, cannot see it. Checkpoints spread over the step keep every replay short.

Invariant: a boundary is a place between two operations; its crossing values, the anchors, are those
made before it and read after it. If they are held, no replay of a later value goes back past it.
Boundaries are spread by saved bytes and moved to the narrowest crossing nearby. Anchors can be
nested: those of a finer level are retained once a replay of their segment makes them.

Imports: `lowtide.planner.simulate`.

Rejected: square-root segments by number of operations. Bytes and crossings differ by orders of
magnitude along a real network.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from lowtide.planner.simulate import Simulator


class Boundaries:
    """Crossing bytes and saved bytes along the forward of one graph."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        count = len(sim.cost)
        steps = [0] * (count + 1)
        saved = [0] * (count + 1)
        for value, size in enumerate(sim.nbytes):
            if sim.free[value]:
                continue
            steps[sim.producer[value]] += size
            steps[max(sim.last_use[value], sim.producer[value])] -= size
            if sim.release[value] >= 0:
                saved[sim.producer[value]] += size
        # crossing[i]: bytes made by operations up to i and read after i.
        self.crossing = list(accumulate(steps))[:count]
        self.saved = list(accumulate(saved))[:count]

    def places(self, segments: int) -> list[int]:
        """Operations after which to divide the forward, for this number of segments."""
        if not self.saved or not self.saved[-1]:
            return []
        total = self.saved[-1]
        found: list[int] = []
        for number in range(1, segments):
            share = total * number
            reach = total // (3 * segments)
            low = bisect_left(self.saved, share // segments - reach)
            high = bisect_left(self.saved, share // segments + reach)
            near = range(low, min(max(high, low + 1), len(self.saved)))
            if near:
                found.append(min(near, key=lambda op: (self.crossing[op], op)))
        return sorted(set(found))

    def anchors(self, places: list[int]) -> frozenset[int]:
        """The values that cross any of these places."""
        sim = self.sim
        found = set()
        for value, free in enumerate(sim.free):
            if not free:
                first = bisect_left(places, sim.producer[value])
                if first < len(places) and places[first] < sim.last_use[value]:
                    found.add(value)
        return frozenset(found)

    def waiting(self, places: list[int]) -> dict[int, int]:
        """From which event on to retain the values that cross none of these places, if not held.

        That is when backward reaches their segment. A replay before then, on its way to a later
        segment, leaves only crossing values behind. This is what nests checkpoints.
        """
        sim, first_event = self.sim, self.sim.graph.first_event
        crossing = self.anchors(places)
        inside: dict[int, list[int]] = {}
        for value, free in enumerate(sim.free):
            if not free and first_event[value] >= 0 and value not in crossing:
                inside.setdefault(bisect_left(places, sim.producer[value]), []).append(value)
        return {
            value: event
            for values in inside.values()
            for event in [min(first_event[value] for value in values)]
            for value in values
        }
