"""Plans and curves as text.

Problem: a plan is printed in Python, in notebooks and by the command line, and must say the same in
all of them. Invariant: the columns of a plan's table add up to its total; a bound that was not
proved is not stated. Imports limits, texttable, standins. Rejected: text made where it is printed,
which had other words and other figures in each place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.dryrun.standins import OUTSIDE
from lowtide.limits import format_bytes
from lowtide.texttable import count_of, table

if TYPE_CHECKING:
    from lowtide.plans import ModuleDecision, Plan


def format_plan(plan: Plan, rows: int | None = 12) -> str:
    """A plan with one row per module, most recomputed first; None: all rows."""
    graph = plan.step.graph
    bound = ""
    if plan.limit is not None and plan.lower_bound is not None:
        bound = f"; no plan under this limit needs less than {plan.lower_bound:.1%}"
    head = [
        f"graph           {graph.fingerprint[:12]}, {count_of(len(graph.ops), 'operation')}, "
        f"{'nothing was run' if plan.source == 'fake' else 'one real step was run'}",
        f"limit           {'none' if plan.limit is None else format_bytes(plan.limit)}",
        f"predicted peak  {format_bytes(plan.peak)} of {format_bytes(plan.plain_peak)} plain "
        f"({plan.peak / max(1, plan.plain_peak):.0%})",
        f"overhead        {plan.overhead:.1%} more time{bound}",
        f"times           {'modelled' if plan.source == 'fake' else 'measured'}, "
        f"{plan.step.device}",
        "",
    ]
    modules = sorted(plan.modules, key=lambda m: (-m.recomputed_bytes, -m.kept_bytes))
    modules = [m for m in modules if m.recomputed_bytes or m.kept_bytes]
    shown = modules if rows is None else modules[:rows]
    rest = modules[len(shown) :]
    cells = [_summed(m.module or OUTSIDE, [m]) for m in shown]
    if rest:
        cells.append(_summed(f"({count_of(len(rest), 'module')} not shown)", rest))
    cells.append(_summed("total", modules))
    titles = ("kept", "recomputed", "replays", "module")
    return "\n".join([*head, *table(titles, cells, right=3, total=True)])


def _summed(label: str, some: list[ModuleDecision]) -> list[str]:
    kept, redone = sum(m.kept_bytes for m in some), sum(m.recomputed_bytes for m in some)
    times = sum(m.replayed_operations for m in some)
    return [format_bytes(kept), format_bytes(redone), str(times), label]


POINT = ("peak", "of plain", "overhead", "at least")


def point_cells(peak: int, plain: int, overhead: float, bound: str) -> list[str]:
    """A point of a curve, or a way of checkpointing beside it, under the titles `POINT`."""
    share = peak / plain if plain else 1.0
    return [format_bytes(peak), f"{share:.1%}", f"{overhead:.1%}", bound]


def plan_cells(plan: Plan, plain: int) -> list[str]:
    """A plan as a point of a curve with this plain peak."""
    bound = "?" if plan.lower_bound is None else f"{plan.lower_bound:.1%}"
    return point_cells(plan.peak, plain, plan.overhead, bound)
