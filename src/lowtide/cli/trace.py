"""``lowtide trace TARGET -o trace.json``: live bytes over the step, for Perfetto and Chrome.

Problem: some people work in their trace viewer. Invariant: the counters are the moments on the
page, plain and planned; a limit that was given and cannot be kept is refused, and nothing is
written. Imports explain, tracing. Rejected: torch's own profiler format, which needs a run.
"""

from __future__ import annotations

import argparse
import json

from lowtide.cli import arguments as common
from lowtide.cli.output import add_output, free_place, show_json, write, wrote
from lowtide.cli.progress import Progress
from lowtide.explain import Explanation
from lowtide.tracing import trace_events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_target(parser)
    common.add_limit(parser, "50%")
    add_output(parser, "the trace to write; open it in ui.perfetto.dev", "trace.json")


def main(arguments: argparse.Namespace) -> None:
    path = free_place(arguments)
    assert path is not None
    with Progress(3) as progress:
        subject = common.study_of(arguments, progress)
        progress.stage("planning")
        made = trace_events(Explanation(subject, common.plan_of(arguments, progress, subject)))
    write(path, json.dumps(made, separators=(",", ":")) + "\n")
    wrote(path)
    if arguments.json:
        show_json(made)
