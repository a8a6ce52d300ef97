"""What to hold and what to recompute: one integer for each value of a recorded graph.

Problem: the engine needs decisions that it can apply with a table look-up, and a plan from a file
must not get further than here if it means nothing.

Invariant: a `Retention` is immutable. `retain[v]` is
- `HOLD` (-1): keep the value from the forward on; its link to its producer is cut;
- k >= 0: drop it; when a replay at event k or later recomputes it while a handle is pending, keep
  ("retain") it until its release. 0 retains it the first time it is recomputed;
- `NEVER`: drop it and never retain it. A value that nothing saved is `HOLD` or `NEVER`.

Imports: `lowtide.errors` and `lowtide.planner.graph`.

Rejected: a list of replays for each event. It is longer than the graph, can contradict itself,
and says nothing that these integers and the replay rule do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as brief  # of what a file may say

from lowtide.errors import UsageError
from lowtide.planner.graph import Graph

HOLD = -1
NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Retention:
    """One decision for each value of a graph."""

    retain: tuple[int, ...]

    def __post_init__(self) -> None:
        for value, choice in enumerate(self.retain):
            if type(choice) is not int or not (-1 <= choice <= NEVER):
                raise UsageError(
                    f"a plan cannot say {brief(choice)} for value {value}: use -1 to {NEVER}"
                )


def keep_all(graph: Graph) -> Retention:
    """What plain autograd does: every saved value is held, everything else is dropped."""
    return Retention(
        tuple(
            [
                HOLD if release >= 0 or node.pinned or value in graph.must_hold else NEVER
                for value, (node, release) in enumerate(
                    zip(graph.values, graph.release, strict=True)
                )
            ]
        )
    )
