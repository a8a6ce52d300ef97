"""Plans for backwards of known steps that hold something else than their plans do.

Problem: a step that changes from one known plan to another may lack what the first has dropped, so
the rest of it is planned when its backward begins. That may take as long as the step, and loops
that take turns change between the same plans again and again. Invariant: what is remembered is
exactly what planning would find again. Imports the planner. Rejected: a plan of the whole step for
each plan that it may come from, of which most are never needed.
"""

from __future__ import annotations

from lowtide.planner import Graph
from lowtide.planner.repair import Candidate
from lowtide.planner.resume import forward_over, with_margin

_KEPT = 250_000  # values of all graphs together, each with an answer: about ten MiB

_Question = tuple[int, frozenset[int], int, float, bool]


class Rests:
    """What was found for the backwards of known graphs, the last ones."""

    def __init__(self) -> None:
        # With the graph, whose id is in the question and must not get another owner.
        self._known: dict[_Question, tuple[Graph, Candidate]] = {}
        self._size = 0

    def of(
        self, graph: Graph, held: set[int], limit: int, margin: float, *, search: bool
    ) -> Candidate:
        """As `with_margin`, for a step whose forward is over."""
        question = id(graph), frozenset(held), limit, margin, search
        known = self._known.pop(question, None)
        if known is None:
            found = with_margin(forward_over(graph, held), held, limit, margin, search=search)
            known = graph, found
            self._size += len(graph.values)
            while self._size > _KEPT and self._known:
                oldest, _ = self._known.pop(next(iter(self._known)))
                self._size -= len(oldest.values)
        self._known[question] = known
        return known[1]
