"""``lowtide curve TARGET``: time against memory, compared with what people do today.

Problem: which limit is worth its price shows when prices are side by side. Invariant: the table has
every figure, so that the plot is never needed. Imports study, record, plantext, plot.
Rejected: a picture file: ``lowtide report`` makes one.
"""

from __future__ import annotations

import argparse

from lowtide.analysis.record import option_rows
from lowtide.analysis.study import Study
from lowtide.cli import arguments as common
from lowtide.cli.output import show, show_json
from lowtide.cli.plot import Mark, plot
from lowtide.cli.progress import Progress
from lowtide.plantext import POINT, plan_cells, point_cells
from lowtide.texttable import table

_LETTERS = "ABCDEFGHIJ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)


def main(arguments: argparse.Namespace) -> None:
    with Progress(4) as progress:
        subject = common.study_of(arguments, progress)
        progress.stage("planning for a dozen limits")
        points = subject.curve
        progress.stage("simulating today's options")
        options = subject.options
    if arguments.json:
        show_json({**points.to_dict(), "options": option_rows(options)})
    else:
        show(format_curve(subject))
    common.say_if_no_backward(subject)


def format_curve(subject: Study) -> str:
    """The frontier and the options as tables and as a plot."""
    points, options = subject.curve, subject.options
    marks = [Mark(p.peak, p.overhead, "o") for p in points]
    cells = [
        [
            "o",
            *plan_cells(p, points.plain_peak),
            "plain" if p.limit is None else f"lowtide.budget({p.limit})",
        ]
        for p in points
    ]
    for letter, option in zip(_LETTERS, options, strict=False):
        marks.append(Mark(option.peak, option.overhead, letter))
        cells.append(
            [
                letter,
                *point_cells(option.peak, points.plain_peak, option.overhead, ""),
                f"{option.name}: {option.how}",
            ]
        )
    text = table(("", *POINT, "how"), cells, right=5)
    return "\n".join([*text, "", *plot(marks), "", *_legend(len(options))])


def _legend(options: int) -> list[str]:
    lines = ["o  lowtide: the least time that it finds for each limit (predicted)"]
    if options:
        last = _LETTERS[options - 1]
        lines.append(
            f"A to {last}  what people do today, simulated on the same step with lowtide's regions"
        )
    return lines
