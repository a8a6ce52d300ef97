"""Plans and curves as text.

Problem: a plan is printed in Python, in notebooks and by the command line, and must say the same in
all of them. Invariant: the columns of a plan's table add up to its total; a bound that was not
proved is not stated. Imports alike, limits, texttable, found. Rejected: text made where it is
printed, which had other words and other figures in each place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.alike import stems, together
from lowtide.dryrun.found import OUTSIDE
from lowtide.limits import format_bytes
from lowtide.texttable import count_of, table

if TYPE_CHECKING:
    from lowtide.plans import ModuleDecision, Plan


def format_plan(plan: Plan, rows: int | None = 12) -> str:
    """A plan with one row per module, largest first; None: all rows. Modules that repeat and have
    the same fate share a row."""
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
    modules = [m for m in plan.modules if m.recomputed_bytes or m.kept_bytes]
    groups = _alike(plan, modules)
    shown = groups if rows is None else groups[:rows]
    rest = [m for group in groups[len(shown) :] for m in group]
    cells = [_summed(together({m.module for m in group}) or OUTSIDE, group) for group in shown]
    if rest:
        cells.append(_summed(f"({count_of(len(rest), 'module')} not shown)", rest))
    cells.append(_summed("total", modules))
    titles = ("kept", "recomputed", "replays", "module")
    return "\n".join([*head, *table(titles, cells, right=3, total=True)])


def _alike(plan: Plan, modules: list[ModuleDecision]) -> list[list[ModuleDecision]]:
    """Modules that share a row: of one stem and the same operators, all kept, all recomputed, or
    some of each."""
    stem = stems({op.module for op in plan.operations})
    made: dict[str, set[str]] = {}
    for op in plan.operations:
        made.setdefault(op.module, set()).add(op.name)
    groups: dict[Any, list[ModuleDecision]] = {}
    for m in modules:
        fate = (bool(m.kept_bytes), bool(m.recomputed_bytes))
        key = (stem(m.module), frozenset(made[m.module]), fate)
        groups.setdefault(key, []).append(m)
    return sorted(groups.values(), key=lambda group: -sum(_bytes_of(m) for m in group))


def _bytes_of(row: ModuleDecision) -> int:
    return row.kept_bytes + row.recomputed_bytes


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
