"""A step as a trace: for Perfetto, `chrome://tracing` and torch's memory viewer.

Problem: people know these viewers. Invariant: the counters of a trace are the moments of a
timeline, to the byte; its clock is a position in the step, so that the plain and the planned step
can be compared moment by moment. Imports explain, snapshot, trials. Rejected: modelled times on the
axis, by which the two steps would not line up.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch

from lowtide._compat import profiling
from lowtide.analysis.study import Study, study
from lowtide.analysis.timeline import KINDS, Timeline
from lowtide.dryrun.found import Found
from lowtide.errors import UsageError
from lowtide.explain import Explanation
from lowtide.export.snapshot import PICKLE_PROTOCOL, snapshot
from lowtide.export.trials import run_step
from lowtide.files import replace_file
from lowtide.limits import parse_limit
from lowtide.plans import Plan

_TICK = 1000  # microseconds of the viewer's clock for one moment


def trace_events(told: Explanation) -> dict[str, Any]:
    """Convert an explanation to trace events that Perfetto and Chrome open, as JSON types.

    There is one process for the plain step and, if there is a plan, one for the planned step. Each
    has a counter of live bytes by kind, and a slice for every moment with its operator, module and
    line. The clock is a position in the step, not time.

    Args:
        told: from `lowtide.explain`.

    Returns:
        A dictionary to write with `json.dump`.

    Raises:
        UsageError: ``told`` is something else, such as the step itself.
    """
    if not isinstance(told, Explanation):
        raise UsageError(
            f"trace_events takes what lowtide.explain returns; got {type(told).__name__}. Write "
            "lowtide.explain(step, ...) around the step."
        )
    events: list[dict[str, Any]] = []
    lines = [("plain", told.plain)]
    if told.planned is not None:
        lines.append(("planned", told.planned))
    places = _places(line for _, line in lines)
    for process, (name, line) in enumerate(lines, 1):
        events.append(
            {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{name} step"}}
        )
        events += _moments(process, line, places)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "lowtide",
            "clock": "position in the step, not time",
            "plain peak": told.plain.peak,
            "planned peak": None if told.planned is None else told.planned.peak,
        },
    }


def _places(lines: Any) -> dict[tuple[str, int], int]:
    """The position of each moment; a replay comes just before the event that it is for."""
    order = {"forward": 0, "replay": 1, "backward": 1}
    found = {(m.phase, m.place) for line in lines for m in line.moments}
    ranked = sorted(found, key=lambda key: (order[key[0]], key[1], key[0] == "backward"))
    return {key: rank for rank, key in enumerate(ranked)}


def _moments(
    process: int, line: Timeline, places: dict[tuple[str, int], int]
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for moment in line.moments:
        at = places[moment.phase, moment.place] * _TICK
        events.append(
            {
                "ph": "C",
                "pid": process,
                "ts": at,
                "name": "live bytes",
                "args": {kind: getattr(moment, kind) for kind in KINDS},
            }
        )
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": 1,
                "ts": at,
                "dur": _TICK,
                "name": moment.site.operator or moment.phase,
                "cat": moment.phase,
                "args": {
                    "module": moment.site.module,
                    "line": moment.site.line,
                    "live bytes": moment.total,
                },
            }
        )
    return events


def memory_snapshot(
    path: str | os.PathLike[str],
    fn: Callable[..., Any],
    /,
    *args: Any,
    limit: int | float | str | None = None,
    run: bool = True,
    **kwargs: Any,
) -> None:
    """Write a step as a memory snapshot, for https://pytorch.org/memory_viz.

    A step on CUDA is run once, and the snapshot comes from its allocator; that has not been tried
    on a device yet. Any other step is only run on fake tensors, and the snapshot has the blocks of
    its timeline (see `lowtide.export.snapshot`).

    Args:
        path: the file to write. It must not exist yet.
        fn: the step, as for `lowtide.plan`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        limit: show the step under a plan for this limit, as for `lowtide.plan`; None: the plain
            step.
        run: False: do not run a step on CUDA either.

    Raises:
        UsageError: the file exists or cannot be written; ``fn`` cannot be called; the limit cannot
            be read; or called inside a budget or region, or with grad disabled.
        BudgetError: the limit cannot be kept.
    """
    if os.path.exists(path):
        raise UsageError(f"{os.fspath(path)} exists and is not overwritten. Name another file.")
    subject = study(fn, args, kwargs, halve=False)
    plan = subject.plan(None if limit is None else parse_limit(limit))
    write_snapshot(path, subject, plan, (fn, args, kwargs) if run else None)


def write_snapshot(
    path: str | os.PathLike[str],
    subject: Study,
    plan: Plan,
    step: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None,
) -> None:
    """Write the snapshot of a studied step; overwrites. `step`: what may be run."""
    try:
        if step is not None and _on_cuda(Found(*step)):
            with profiling.cuda_history():
                run_step(*step, plan, subject.ledger.own_backward)
                torch.cuda.synchronize()
                profiling.write_cuda_snapshot(os.fspath(path))
        else:
            made = snapshot(subject, plan)
            replace_file(path, pickle.dumps(made, PICKLE_PROTOCOL))
    except OSError as error:
        raise UsageError(
            f"cannot write {os.fspath(path)}: {error.strerror}. Name another file."
        ) from error


def _on_cuda(found: Found) -> bool:
    return any(tensor.is_cuda for tensor in (*found.state(), *found.tensors))
