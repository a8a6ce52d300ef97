"""``lowtide saved TARGET``: what autograd holds, by module, operation and source line.

Problem: "why is my memory not going down?" Invariant: the rows add up to the total. Imports saved.
Rejected: one row per storage by default: a transformer has thousands.
"""

from __future__ import annotations

import argparse

from lowtide.cli import arguments as common
from lowtide.cli.output import add_rows, rows_of, show, show_json
from lowtide.cli.progress import Progress
from lowtide.saved import KEYS, check_keys, format_saved_tensors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    parser.add_argument(
        "--by",
        default="module,operator,line",
        metavar="KEYS",
        help=f"what to sum by: any of {', '.join(KEYS)} (default: %(default)s)",
    )
    add_rows(parser)


def main(arguments: argparse.Namespace) -> None:
    rows, keys = rows_of(arguments), arguments.by.split(",")
    check_keys(keys)
    with Progress(2) as progress:
        subject = common.study_of(arguments, progress)
        held = subject.saved
        text = format_saved_tensors(held, by=keys, rows=rows)
    if arguments.json:
        show_json(held.to_dict())
    else:
        show(text)
    common.say_if_no_backward(subject)
