"""``lowtide explain TARGET``: what is in memory at the peak, why, and what would help.

Problem: a table helps only those who know what to look for. Invariant: the sentences are those of
`lowtide.explain`. Imports explain. Rejected: making this the default of another verb.
"""

from __future__ import annotations

import argparse

from lowtide.cli import arguments as common
from lowtide.cli.output import show, show_json
from lowtide.cli.progress import Progress
from lowtide.explain import explain_study, format_explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser)


def main(arguments: argparse.Namespace) -> None:
    limit = common.limit_of(arguments)
    with Progress(3) as progress:
        subject = common.study_of(arguments, progress, halve=True)
        progress.stage("planning")
        told = explain_study(subject, limit)
        text = format_explanation(told)
    if arguments.json:
        show_json(told.to_dict())
    else:
        show(text)
