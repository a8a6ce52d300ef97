"""The arguments that verbs share, and what becomes of them.

Problem: every verb takes a target, most a limit, and all must read them alike. Invariant: a limit
on the command line means what it means in Python, text included. Imports target, limits, study,
trials. Rejected: a parent parser, which hides from a verb's own file what it takes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Any

from lowtide.analysis.study import Study, study
from lowtide.cli.progress import Progress
from lowtide.cli.target import Target, load
from lowtide.errors import BudgetError, LowtideWarning
from lowtide.export.trials import Tried, try_steps
from lowtide.limits import exact_bytes, parse_limit
from lowtide.plans import Plan


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the target, and the options of every verb."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function that returns (model, batch) or a step; "
        "or a model class, or a function that returns a model, with --shape",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="SIZES",
        help="an input of a model that comes without a batch: 2x3x64x64, or 4x128:int64; repeat it "
        "for each input",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument for the class or function; repeat it for each argument",
    )
    parser.add_argument(
        "--on", metavar="DEVICE", help="model the times of this device, for instance H100"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def add_limit(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the memory limit."""
    more = f" (default: {default}, or the smallest that can be kept)" if default else ""
    parser.set_defaults(default_limit=default)
    parser.add_argument(
        "--limit",
        metavar="LIMIT",
        help='"6 GiB", a number of bytes, or a share of the plain peak: 0.5 or 50%%'
        + more.replace("%", "%%"),
    )


def of_default_limit(arguments: argparse.Namespace) -> str:
    """What to say of a refusal if it was the verb's own limit that cannot be kept."""
    default = getattr(arguments, "default_limit", None)
    if default is None or arguments.limit is not None:
        return ""
    return f" That limit is the default, {default} of the plain peak: --limit names another."


def limit_of(arguments: argparse.Namespace) -> int | float | None:
    """The limit as bytes or as a share, the verb's own one if none was given; None: no limit."""
    limit = arguments.default_limit if arguments.limit is None else arguments.limit
    return None if limit is None else parse_limit(limit)


def plan_of(
    arguments: argparse.Namespace, progress: Progress, subject: Study, *, room: bool = False
) -> Plan:
    """The plan for the limit. One that was given is kept or refused. Where the verb's own, which
    nobody asked for, cannot be kept, the plan is for the smallest that can, and a line says so.

    `room`: it is to be run, and a real step may take slightly more than was predicted.
    """
    try:
        return subject.plan(limit_of(arguments))
    except BudgetError as error:
        if arguments.limit is not None:
            raise
        least = max(error.minimum, subject.smallest) if room else error.minimum
        progress.note(
            f"lowtide: the default limit, {arguments.default_limit} of the plain peak, cannot be "
            f"kept. This is for the smallest that can{', with some room' if room else ''}: "
            f"{exact_bytes(least)}. --limit names another."
        )
        arguments.limit = str(least)
        return subject.plan(least)


def target_of(arguments: argparse.Namespace) -> Target:
    return load(arguments.target, arguments.shape, arguments.set)


def study_of(
    arguments: argparse.Namespace,
    progress: Progress,
    target: Target | None = None,
    *,
    halve: bool = False,
) -> Study:
    """Study the target's step; if that needs a real step, one line on stderr says so."""
    progress.stage("loading the target")
    if target is None:
        target = target_of(arguments)
    progress.stage("analysing the step")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Study = running(
            target,
            progress,
            lambda: study(
                target.function,
                target.args,
                target.kwargs,
                on=arguments.on,
                name=target.name,
                halve=halve,
            ),
        )
    return found


def trials_of(
    target: Target,
    progress: Progress,
    subject: Study,
    plan: Plan | None,
    *,
    steps: int,
    plain: bool,
) -> Tried:
    """Real steps of the target, see `try_steps`."""
    tried: Tried = running(
        target,
        progress,
        lambda: try_steps(
            target.function,
            target.args,
            target.kwargs,
            plan,
            subject.plain.peak,
            steps=steps,
            plain=plain,
            own_backward=subject.ledger.own_backward,
            tell=progress.stage,
        ),
    )
    return tried


def running(target: Target, progress: Progress, call: Callable[[], Any]) -> Any:
    """The result of `call`, which runs the target's step. Each of lowtide's own warnings becomes
    one line on stderr; others are shown as ever."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LowtideWarning)
            return target.running(call)
    finally:
        for message in dict.fromkeys(str(w.message) for w in caught if _own(w)):
            progress.note(f"lowtide: {message}")
        for w in caught:
            if not _own(w):
                warnings.showwarning(w.message, w.category, w.filename, w.lineno)


def say_if_no_backward(subject: Study) -> None:
    """Say on stderr that a step has no backward: mostly its loss was not returned, and then every
    figure is zero or that of the forward alone."""
    if subject.ledger.own_backward or any(o.requires_grad for o in subject.ledger.outputs):
        return
    print(
        "lowtide: nothing that the step returns requires grad, so there is no backward. If there "
        "should be one, return the loss.",
        file=sys.stderr,
    )


def _own(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, LowtideWarning)
