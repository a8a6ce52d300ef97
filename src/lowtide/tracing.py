"""A step as a trace: for Perfetto, `chrome://tracing` and, on CUDA, torch's memory viewer.

Problem: people know their way about in those viewers. Invariant: the counters of a trace are the
moments of a timeline, to the byte; its clock is a position in the step, since moments of the plain
and the planned step share one. Imports explain. Rejected: modelled times on the axis, on which the
two could not be laid over each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from lowtide._compat import profiling
from lowtide.errors import UsageError
from lowtide.explain import Explanation
from lowtide.timeline import KINDS, Timeline

_TICK = 1000  # microseconds of the viewer's clock for one moment


def trace_events(told: Explanation) -> dict[str, Any]:
    """What Perfetto and Chrome open, as what JSON knows.

    One process for the plain step and one for the planned one, if there is a plan: a counter of
    live bytes by kind, and a slice for every moment with its operator, module and line.
    """
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
    """Where each moment stands: a replay just before the event that it is for."""
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


def memory_snapshot(step: Callable[[], object], path: str | os.PathLike[str]) -> None:
    """Run a step on CUDA and write what its allocator did, for https://pytorch.org/memory_viz.

    Args:
        step: called once, without arguments.
        path: the file to write; not overwritten if it is there.

    Raises:
        UsageError: there is no CUDA device, or the file exists.

    Not yet tried on a device.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "a memory snapshot is what CUDA's allocator recorded, and there is no CUDA device "
            "here. On the CPU, `lowtide trace` and `lowtide report` show the same step."
        )
    if os.path.exists(path):
        raise UsageError(f"{os.fspath(path)} exists and is not overwritten. Name another file.")
    with profiling.cuda_history():
        step()
        torch.cuda.synchronize()
        profiling.write_cuda_snapshot(os.fspath(path))
