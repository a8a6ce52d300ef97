"""``lowtide verify TARGET``: whether real steps with lowtide leave the bits of the plain step.

Problem: who deploys a training wants one command that says yes or no. Invariant: exit status 0
means that all was compared, nothing differs, and the limit was kept. Imports verify. Rejected: a
part of ``run``, which measures and does not compare.
"""

from __future__ import annotations

import argparse

from lowtide.cli import arguments as common
from lowtide.cli.output import show, show_json
from lowtide.cli.progress import Progress
from lowtide.errors import LowtideError, UsageError
from lowtide.limits import parse_limit
from lowtide.verify import verify_step
from lowtide.verifying.verification import Verification


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser)
    parser.add_argument(
        "--steps", type=int, default=4, help="steps under the limit (default: %(default)s)"
    )


def main(arguments: argparse.Namespace) -> None:
    if arguments.steps < 1:
        raise UsageError(f"--steps is how many steps to run, at least 1; got {arguments.steps}.")
    limit = None if arguments.limit is None else parse_limit(arguments.limit)
    with Progress(5 + arguments.steps) as progress:
        progress.stage("loading the target")
        target = common.target_of(arguments)
        found: Verification = common.running(
            target,
            progress,
            lambda: verify_step(
                target.function,
                target.args,
                target.kwargs,
                limit,
                arguments.steps,
                progress.stage,
            ),
        )
    if arguments.json:
        show_json(found.to_dict())
    else:
        show(str(found))
    if not found:
        raise LowtideError(found.verdict)
