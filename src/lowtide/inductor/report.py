"""What a `CompileBudget` reports about the graphs it has compiled.

Problem: users need to see what the limit did to each graph. Invariant: numbers only; no graph and
no tensor is held. Imports limits. Rejected: the planner's own objects, which hold the traced
graphs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide.limits import format_bytes, format_limit


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One call of one compiled graph. Sizes are in bytes.

    Attributes:
        operations: operations of the forward, without views.
        recomputed: how many of them run again in backward; with Inductor, most run inside kernels.
        saved_bytes: held between its forward and its backward.
        plain_saved_bytes: the same if torch alone decides what to save.
        peak: peak of its forward and backward.
        plain_peak: the same if torch alone decides what to save.
        time_ratio: modelled time, divided by that if torch alone decides what to save.
    """

    operations: int
    recomputed: int
    saved_bytes: int
    plain_saved_bytes: int
    peak: int
    plain_peak: int
    time_ratio: float


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What a `CompileBudget` has planned. Sizes are in bytes; None: not known yet.

    Attributes:
        limit: the limit in bytes.
        planned_peak: peak of all calls of the last step together.
        plain_peak: the same if torch alone decides what to save.
        graphs: the graphs, in the order in which they were compiled.
        fraction: the fraction of a plain peak that was given as limit; None: it was given bytes.
    """

    limit: int | None
    planned_peak: int | None
    plain_peak: int | None
    graphs: tuple[GraphReport, ...]
    fraction: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON types, by the names of the attributes: sizes in bytes, None
        for what is not known."""
        return {**asdict(self), "graphs": [asdict(graph) for graph in self.graphs]}

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import text_html

        return text_html(str(self))

    def __str__(self) -> str:
        lines = [f"limit         {format_limit(self.limit, self.fraction)}"]
        if self.planned_peak is not None:
            lines.append(f"planned peak  {format_bytes(self.planned_peak)}")
        if self.plain_peak is not None:
            lines.append(f"plain peak    {format_bytes(self.plain_peak)}")
        if not self.graphs:
            lines.append("graphs        none compiled yet, so no peak is known")
        for number, graph in enumerate(self.graphs):
            lines.append(
                f"graph {number}       saves {format_bytes(graph.saved_bytes)} of "
                f"{format_bytes(graph.plain_saved_bytes)}, runs {graph.recomputed} of "
                f"{graph.operations} operations again"
            )
        return "\n".join(lines)
