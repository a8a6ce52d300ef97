"""``lowtide plan TARGET --limit LIMIT``: what would be kept and recomputed, and the price.

Problem: whether a job fits should be known before it starts. Invariant: the plan that is written is
the plan that is shown, and `lowtide.load_plan` reads it. Imports plans. Rejected: running it here,
which ``lowtide run`` does.
"""

from __future__ import annotations

import argparse

from lowtide.cli import arguments as common
from lowtide.cli.output import (
    add_output,
    add_rows,
    free_place,
    rows_of,
    show,
    show_json,
    writing,
    wrote,
)
from lowtide.cli.progress import Progress
from lowtide.dryrun.standins import OUTSIDE
from lowtide.export.document import plan_dict
from lowtide.limits import format_bytes
from lowtide.plans import ModuleDecision, Plan
from lowtide.texttable import count_of, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser, "50%")
    add_output(parser, "the plan to write, for lowtide.load_plan")
    add_rows(parser, "modules")


def main(arguments: argparse.Namespace) -> None:
    rows = rows_of(arguments)
    path = free_place(arguments)
    limit = common.limit_of(arguments)
    with Progress(3) as progress:
        subject = common.study_of(arguments, progress)
        progress.stage("planning")
        plan = subject.plan(limit)
    if path is not None:
        with writing(path):
            plan.save(path)
        wrote(path)
    if arguments.json:
        show_json(plan_dict(plan))
    else:
        show(format_plan(plan, rows))


def format_plan(plan: Plan, rows: int | None = 24) -> str:
    """A plan with one row per module, most recomputed first; columns add up to the total."""
    bound = "not proved" if plan.lower_bound is None else f"{plan.lower_bound:.1%}"
    head = [
        f"limit           {format_bytes(plan.limit)}",
        f"predicted peak  {format_bytes(plan.peak)} of {format_bytes(plan.plain_peak)} plain "
        f"({plan.peak / max(1, plan.plain_peak):.0%})",
        f"overhead        {plan.overhead:.1%} more time; no plan under this limit needs less than "
        f"{bound}",
        f"times           {'modelled' if plan.source == 'fake' else 'measured'}, "
        f"{plan.step.device}",
        "",
    ]
    modules = sorted(plan.modules, key=lambda m: (-m.recomputed_bytes, -m.kept_bytes))
    modules = [m for m in modules if m.recomputed_bytes or m.kept_bytes]
    shown = modules if rows is None else modules[:rows]
    rest = modules[len(shown) :]
    cells = [
        [
            format_bytes(m.kept_bytes),
            format_bytes(m.recomputed_bytes),
            str(m.replayed_operations),
            m.module or OUTSIDE,
        ]
        for m in shown
    ]

    def summed(label: str, some: list[ModuleDecision]) -> list[str]:
        kept, redone = sum(m.kept_bytes for m in some), sum(m.recomputed_bytes for m in some)
        times = sum(m.replayed_operations for m in some)
        return [format_bytes(kept), format_bytes(redone), str(times), label]

    if rest:
        cells.append(summed(f"({count_of(len(rest), 'module')} not shown)", rest))
    cells.append(summed("total", modules))
    titles = ("kept", "recomputed", "replays", "module")
    return "\n".join([*head, *table(titles, cells, right=3, total=True)])
