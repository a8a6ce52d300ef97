"""``lowtide plan TARGET --limit LIMIT``: what would be kept and recomputed, and the price.

Problem: whether a job fits should be known before it starts. Invariant: the plan that is written is
the plan that is shown, and `lowtide.load_plan` reads it. Imports plantext. Rejected: running it
here, which ``lowtide run`` does.
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
from lowtide.plantext import format_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser, "50%")
    add_output(parser, "the plan to write, for lowtide.load_plan")
    add_rows(parser)


def main(arguments: argparse.Namespace) -> None:
    rows = rows_of(arguments)
    path = free_place(arguments)
    with Progress(3) as progress:
        subject = common.study_of(arguments, progress)
        progress.stage("planning")
        plan = common.plan_of(arguments, progress, subject)
    if path is not None:
        with writing(path):
            plan.save(path)
        wrote(path)
    if arguments.json:
        show_json(plan.to_dict())
    else:
        show(format_plan(plan, rows))
    common.say_if_no_backward(subject)
