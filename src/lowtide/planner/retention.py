"""What to hold and what to recompute: one integer for each value of a recorded graph.

Problem: the engine needs a decision it can apply without thinking, and a user one they can store,
compare and load again.

Invariant: a `Retention` is immutable and says for which graph structure it was made. `retain[v]` is
- `HOLD` (-1): keep the value from the forward on; its link to its producer is cut;
- k >= 0: let it go; when a replay at event k or later reproduces it while a handle is pending,
  keep it until its release (0 keeps it the first time it comes back);
- `NEVER`: let it go and never keep it as a by-product. A value nobody saved is `HOLD` or `NEVER`.

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
        """Plain JSON text; `from_json` gives an equal plan."""
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
    """What plain autograd does: every saved value is held, everything else is let go."""
    return Retention(
        tuple(
            HOLD if release >= 0 or node.pinned or value in graph.must_hold else NEVER
            for value, (node, release) in enumerate(zip(graph.values, graph.release, strict=True))
        ),
        graph.fingerprint,
    )
