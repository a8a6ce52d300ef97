"""``lowtide run TARGET --limit LIMIT``: a few real steps, predicted against measured.

Problem: how far a prediction is off shows only on the machine itself. Invariant: what is printed as
measured was counted; an exceeded limit is reported and gives exit status 1; if a plan is refused,
the plain step still shows how good the predictions behind the refusal were. Imports document.
Rejected: training: parameters are not updated, only forward and backward run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from lowtide.cli import arguments as common
from lowtide.cli.output import show, show_json
from lowtide.cli.progress import Progress
from lowtide.errors import BudgetError, UsageError
from lowtide.export.document import Trial
from lowtide.limits import format_bytes
from lowtide.plans import Plan
from lowtide.texttable import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser, "50%")
    parser.add_argument(
        "--steps", type=int, default=3, help="planned steps to run (default: %(default)s)"
    )
    parser.add_argument(
        "--no-plain", action="store_true", help="leave out the plain steps, if they do not fit"
    )


def main(arguments: argparse.Namespace) -> None:
    if arguments.steps < 1:
        raise UsageError(f"--steps is how many steps to run, at least 1; got {arguments.steps}.")
    with Progress(4 + arguments.steps) as progress:
        target = common.target_of(arguments)
        subject = common.study_of(arguments, progress, target)
        progress.stage("planning")
        plan: Plan | None = None
        refused: BudgetError | None = None
        try:
            plan = common.plan_of(arguments, progress, subject, room=True)
        except BudgetError as error:
            if arguments.no_plain:
                raise
            refused = error
        plain = not arguments.no_plain
        tried = common.trials_of(
            target, progress, subject, plan, steps=arguments.steps, plain=plain
        )
    trials = tried.trials
    refused = refused or tried.refused
    allowed = plan.limit if plan is not None else None if refused is None else refused.limit
    if arguments.json:
        shown = None if plan is None else plan.to_dict()
        show_json({"plan": shown, "trials": [asdict(trial) for trial in trials]})
    else:
        show(format_trials(allowed, trials))
    if refused is not None:
        raise refused
    common.say_if_no_backward(subject)
    over = [t for t in trials if t.label != "plain" and allowed and t.measured > allowed]
    if over and allowed is not None:
        worst = max(trial.measured for trial in over)
        raise BudgetError(
            f"the limit of {format_bytes(allowed)} was exceeded: {format_bytes(worst)} were "
            "measured. This is a fault in lowtide: use a larger limit, and please report it.",
            limit=allowed,
            minimum=worst,
        )


def format_trials(limit: int | None, trials: Sequence[Trial]) -> str:
    """Predicted against measured, step by step."""
    cells = []
    for trial in trials:
        error = trial.predicted / trial.measured - 1 if trial.measured else 0.0
        error = round(error, 3) + 0.0  # never "-0.0%"
        held = "" if trial.label == "plain" or limit is None else (
            "held" if trial.measured <= limit else "EXCEEDED"
        )  # fmt: skip
        cells.append(
            [
                format_bytes(trial.predicted),
                format_bytes(trial.measured),
                f"{error:+.1%}",
                f"{trial.seconds:.3f}",
                trial.label,
                held,
            ]
        )
    titles = ("predicted", "measured", "error", "seconds", "step", "limit")
    head = ["limit  none" if limit is None else f"limit  {format_bytes(limit)}", ""]
    return "\n".join([*head, *table(titles, cells, right=4)])
