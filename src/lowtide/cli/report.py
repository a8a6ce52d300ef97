"""``lowtide report TARGET -o report.html``: one page that says where memory goes and what to do.

Problem: a person should understand within a minute. Invariant: one file, no network, no other file;
its figures are those of ``--json``. Imports explain, document, page, trials. Rejected: a server.
"""

from __future__ import annotations

import argparse

from lowtide.analysis.study import Study
from lowtide.cli import arguments as common
from lowtide.cli.output import add_output, free_place, show_json, write, wrote
from lowtide.cli.progress import Progress
from lowtide.cli.target import Target
from lowtide.dryrun.found import Found
from lowtide.explain import Explanation, explain_study
from lowtide.export.document import document
from lowtide.export.trials import Tried, device_of, fits
from lowtide.page import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser, "50%")
    add_output(parser, "the page to write", "report.html")
    parser.add_argument(
        "--no-run",
        action="store_true",
        help="do not run a real step: the page then has predictions only",
    )


def main(arguments: argparse.Namespace) -> None:
    path = free_place(arguments)
    assert path is not None
    limit = common.limit_of(arguments)
    with Progress(8) as progress:
        target = common.target_of(arguments)
        subject = common.study_of(arguments, progress, target, halve=True)
        progress.stage("planning")
        told = explain_study(subject, limit)
        if told.refused is not None:  # show one that can be kept, and say so
            told = _least(subject, told)
        progress.stage("planning for a dozen limits")
        curve = subject.curve
        tried = Tried() if arguments.no_run else _trials(subject, told, target, progress)
        refused = None if tried.refused is None else str(tried.refused)
        made = document(told, curve=curve, trials=tried.trials, trial_refused=refused)
        text = page(made)
    write(path, text)
    wrote(path)
    if arguments.json:
        show_json(made)


def _least(subject: Study, told: Explanation) -> Explanation:
    assert told.refused is not None
    nearest = explain_study(subject, max(told.refused.minimum, subject.smallest))
    return Explanation(subject, nearest.plan, told.refused)


def _trials(subject: Study, told: Explanation, target: Target, progress: Progress) -> Tried:
    """Real steps, if they fit with room to spare."""
    device = device_of(Found(target.function, target.args, target.kwargs))
    plain = fits(subject.plain.peak, device)
    if told.plan is None or not (plain or fits(told.plan.peak, device)):
        return Tried()
    return common.trials_of(target, progress, subject, told.plan, steps=2, plain=plain)
