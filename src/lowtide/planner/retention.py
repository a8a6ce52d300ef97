"""What to hold and what to recompute: one integer for each value of a recorded graph.

Problem: the engine needs decisions that it can apply with a table look-up, and users need plans
that they can store, compare and load again.

Invariant: a `Retention` is immutable and names the graph structure it was made for. `retain[v]` is
- `HOLD` (-1): keep the value from the forward on; its link to its producer is cut;
- k >= 0: drop it; when a replay at event k or later recomputes it while a handle is pending, keep
  ("retain") it until its release. 0 retains it the first time it is recomputed;
- `NEVER`: drop it and never retain it. A value that nothing saved is `HOLD` or `NEVER`.

Imports: `lowtide.errors`, `lowtide.planner.fields` and `lowtide.planner.graph`.

Rejected: a list of replays for each event. It is longer than the graph, can contradict itself,
and says nothing that these integers and the replay rule do not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from lowtide.errors import UsageError
from lowtide.planner.fields import read_document
from lowtide.planner.graph import Graph

HOLD = -1
NEVER = 1 << 60
FORMAT = "lowtide.retention"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Retention:
    """One decision for each value of the graph with this fingerprint."""

    retain: tuple[int, ...]
    fingerprint: str

    def __post_init__(self) -> None:
        for value, choice in enumerate(self.retain):
            if type(choice) is not int or not (-1 <= choice <= NEVER):
                raise UsageError(
                    f"a plan cannot say {choice!r} for value {value}: use -1 to {NEVER}"
                )

    def check(self, graph: Graph) -> None:
        """Raise `UsageError` unless the plan was made for a graph of this structure."""
        if self.fingerprint != graph.fingerprint or len(self.retain) != len(graph.values):
            raise UsageError(
                f"this plan is for graph {self.fingerprint} with {len(self.retain)} values, not "
                f"for graph {graph.fingerprint} with {len(graph.values)}: the step has changed. "
                "Solve again for the new graph"
            )

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads an equal one back."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "fingerprint": self.fingerprint,
                "retain": [None if h == NEVER else h for h in self.retain],
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Retention:
        """Read what `to_json` wrote. Anything else is a `UsageError`; nothing is executed."""
        data = read_document(text, FORMAT, VERSION)
        retain, fingerprint = data.get("retain"), data.get("fingerprint")
        if not isinstance(retain, list) or not isinstance(fingerprint, str):
            raise UsageError("damaged document: a plan needs a 'retain' list and a 'fingerprint'")
        return Retention(tuple(NEVER if h is None else h for h in retain), fingerprint)


def keep_all(graph: Graph) -> Retention:
    """What plain autograd does: every saved value is held, everything else is dropped."""
    return Retention(all_held(graph), graph.fingerprint)


def all_held(graph: Graph) -> tuple[int, ...]:
    """The decisions of `keep_all`, without the hash of the graph, which takes longer to make."""
    return tuple(
        [
            HOLD if release >= 0 or node.pinned or value in graph.must_hold else NEVER
            for value, (node, release) in enumerate(zip(graph.values, graph.release, strict=True))
        ]
    )
