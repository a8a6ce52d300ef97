"""``lowtide batch TARGET --limit LIMIT``: the largest batch that fits, plain and with lowtide.

Problem: a batch size is found by running out of memory again and again, on the machine that costs
most. Invariant: a model is built once if its arguments do not depend on the batch size; N stands
for the number of samples, and for nothing else. Imports largest, target. Rejected: to scale the
first size of each input, which for a mask or a position is no batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from lowtide.cli import arguments as common
from lowtide.cli.output import show, show_json
from lowtide.cli.progress import Progress
from lowtide.cli.target import Target, find, made_of, model_of, of_model
from lowtide.dryrun.run import Dry, dry_run
from lowtide.errors import UsageError
from lowtide.largest import limit_in_bytes, search

_SIZE = "N"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    parser.add_argument(
        "--limit", required=True, metavar="LIMIT", help='"6 GiB", or a number of bytes'
    )
    parser.add_argument(
        "--multiple-of",
        type=int,
        default=1,
        metavar="COUNT",
        help="only look at multiples of this (default: %(default)s)",
    )
    parser.add_argument(
        "--at-most", type=int, metavar="COUNT", help="look at no larger batches than this"
    )


def main(arguments: argparse.Namespace) -> None:
    limit = limit_in_bytes(arguments.limit)
    with Progress(12) as progress:
        progress.stage("loading the target")
        sized = _sized(arguments.target, arguments.shape, arguments.set)

        def run(size: int) -> Dry:
            progress.stage(f"analysing a step of {size} samples")
            target = sized(size)
            step: Dry = common.running(
                target,
                progress,
                lambda: dry_run(
                    target.function, target.args, target.kwargs, arguments.on, real=False
                ),
            )
            progress.stage("planning")
            return step

        found = search(run, limit, arguments.multiple_of, arguments.at_most)
    if arguments.json:
        show_json(found.to_dict())
    else:
        show(str(found))


def _sized(text: str, shapes: Sequence[str], settings: Sequence[str]) -> Callable[[int], Target]:
    """The target's step for each number of samples."""
    if _with_size(shapes, settings, 1) == (list(shapes), list(settings)):
        raise UsageError(
            f"write {_SIZE} where the number of samples stands: --shape {_SIZE}x3x224x224, or "
            f"--set batch_size={_SIZE} if the function takes it by this name."
        )
    found = find(text)
    first = _with_size(shapes, settings, 1)
    if first[1] == list(settings):
        model = model_of(text, found, *first)
        assert model is not None  # there are shapes
        return lambda size: of_model(text, model, _with_size(shapes, settings, size)[0])
    return lambda size: made_of(text, found, *_with_size(shapes, settings, size))


def _with_size(
    shapes: Sequence[str], settings: Sequence[str], size: int
) -> tuple[list[str], list[str]]:
    """The two options, with a number in place of `N`."""
    filled = []
    for shape in shapes:
        sizes, colon, dtype = shape.partition(":")
        parts = [str(size) if part == _SIZE else part for part in sizes.split("x")]
        filled.append("x".join(parts) + colon + dtype)
    ends = f"={_SIZE}"
    return filled, [
        f"{pair[: -len(_SIZE)]}{size}" if pair.endswith(ends) else pair for pair in settings
    ]
