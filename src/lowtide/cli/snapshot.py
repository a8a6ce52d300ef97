"""``lowtide snapshot TARGET -o snapshot.pickle``: every block of memory, for torch's memory viewer.

Problem: some people work with https://pytorch.org/memory_viz. Invariant: a step that is not on CUDA
is not run, and its highest sum is the peak that the other verbs name. Imports tracing. Rejected: a
file ending that makes ``lowtide trace`` write another format.
"""

from __future__ import annotations

import argparse
import pickle

from lowtide.cli import arguments as common
from lowtide.cli.output import add_output, free_place, show_json, wrote
from lowtide.cli.progress import Progress
from lowtide.tracing import write_snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser)
    add_output(parser, "the snapshot to write; open it in pytorch.org/memory_viz",
               "snapshot.pickle")  # fmt: skip
    parser.add_argument("--no-run", action="store_true", help="do not run a step on CUDA either")


def main(arguments: argparse.Namespace) -> None:
    path = free_place(arguments)
    assert path is not None
    limit = common.limit_of(arguments)
    with Progress(4) as progress:
        target = common.target_of(arguments)
        subject = common.study_of(arguments, progress, target)
        progress.stage("planning")
        plan = subject.plan(limit)
        progress.stage("writing")
        step = (target.function, target.args, target.kwargs)
        common.running(
            target,
            progress,
            lambda: write_snapshot(path, subject, plan, None if arguments.no_run else step),
        )
    wrote(path)
    if arguments.json:
        show_json(pickle.loads(path.read_bytes()))
