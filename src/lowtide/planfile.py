"""Plans as files: JSON, with a version, and nothing that could be executed.

Problem: a plan made on one machine is used on another, perhaps by another release. Invariant: what
cannot be read as it was meant is a `UsageError` that names the file and the reason; what can be
derived (peaks, overhead) is not in the file and so cannot contradict it. Imports dryrun, backward,
observing and the planner. Rejected: pickle, which runs what it reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from reprlib import repr as brief  # of a value that may be a whole file
from typing import Any, TypeVar

from lowtide.backward.modelled import look_closer
from lowtide.dryrun.run import Dry
from lowtide.errors import UsageError
from lowtide.observing.externals import externals_of
from lowtide.observing.logs import OpLog
from lowtide.observing.seen import Seen
from lowtide.planner import NEVER, Graph, Retention
from lowtide.planner.fields import is_whole, read_document

FORMAT = "lowtide.plan"
VERSION = 7
# Fields of each operation, see `OpLog`.
_LISTS = ("reads", "receivers", "viewing", "whole", "pieces", "piece_sizes")
_MOST = 2**63  # seconds, and bytes of a limit, are below
_NUMBERS = ("live", "workspace", "temporaries", "left", "wanted", "besides")

T = TypeVar("T", int, float)


def document(step: Dry, rest: dict[str, Any]) -> dict[str, Any]:
    """A plan as JSON types."""
    seen = step.seen
    # What is still to be asked of operators is asked now: these cannot be written into a file.
    look_closer(seen.ops, seen.carries_grad)
    names = list(dict.fromkeys(step.modules))
    place = {name: index for index, name in enumerate(names)}
    data = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": step.graph.fingerprint,
        "source": step.source,
        "device": step.device,
        "seconds": step.seconds,
        **rest,
        "module_names": names,
        "modules": [place[name] for name in step.modules],
        "forward": seen.forward,
        **{key: [list(getattr(log, key)) for log in seen.ops] for key in _LISTS},
        "saved": [None if log.saved is None else list(log.saved) for log in seen.ops],
        **{key: [getattr(log, key) for log in seen.ops] for key in _NUMBERS},
        "carries_grad": sorted(seen.carries_grad),
        "asked": None if seen.handles is None else list(seen.handles),
        "parameters": [list(pair) for pair in seen.parameters.values()],
        "graph": json.loads(step.graph.to_json()),
    }
    return {**data, "digest": _digest(data)}


def _digest(data: dict[str, Any]) -> str:
    """A hash of all the rest: of most numbers, nothing else shows that they are not those that were
    written. The order of the fields and the space between them do not count."""
    rest = {key: part for key, part in data.items() if key != "digest"}
    text = json.dumps(rest, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def retained(retention: Retention) -> list[int | None]:
    return [None if choice == NEVER else choice for choice in retention.retain]


def read(text: str) -> tuple[Dry, dict[str, Any]]:
    """The step of a plan file, and the rest of it."""
    data = read_document(text, FORMAT, VERSION)
    return _step(data), data


def check_digest(data: dict[str, Any]) -> None:
    """Refuse a file in which a number is not the one that was written, though it could be one."""
    digest = _digest(data)
    if data.get("digest") != digest:
        raise UsageError(
            f"damaged document: its digest is {brief(data.get('digest'))}, and not {digest}, that "
            "of the rest"
        )


def _step(data: dict[str, Any]) -> Dry:
    graph = Graph.from_json(json.dumps(data.get("graph")))
    if data.get("fingerprint") != graph.fingerprint:
        raise UsageError(
            f"damaged document: it is for graph {brief(data.get('fingerprint'))}, but the graph in "
            f"it is {graph.fingerprint}"
        )
    count = len(graph.ops)
    names = data.get("module_names")
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise UsageError("damaged document: 'module_names' must be a list of text")
    places = _whole(data, "modules", count)
    if any(not 0 <= place < len(names) for place in places):
        raise UsageError("damaged document: 'modules' points outside 'module_names'")
    seconds = data.get("seconds")
    if not isinstance(seconds, int | float) or not 0 <= seconds < _MOST:
        raise UsageError(f"damaged document: a step cannot take {brief(seconds)} seconds")
    source, device = data.get("source"), data.get("device")
    if source not in ("fake", "recorded") or not isinstance(device, str):
        raise UsageError(f"damaged document: source {brief(source)} and device {brief(device)}")
    modules = tuple(names[place] for place in places)
    return Dry(graph, _seen(externals_of(graph)[0], data), modules, float(seconds), source, device)


def _seen(graph: Graph, data: dict[str, Any]) -> Seen:
    count = len(graph.ops)
    forward = data.get("forward")
    if type(forward) is not int or not 0 <= forward <= count:
        raise UsageError(f"damaged document: {count} operations cannot end at {brief(forward)}")
    fields: dict[str, Sequence[Any]] = {key: _rows(data, key, count) for key in _LISTS}
    fields.update((key, _whole(data, key, count)) for key in _NUMBERS)
    saved = _rows(data, "saved", count, optional=True)
    ops = tuple(
        OpLog(
            name=op.name,
            seconds=op.seconds,
            inputs=op.inputs,
            outputs=op.outputs,
            sizes=tuple(graph.values[value].nbytes for value in op.outputs),
            begin=None,
            mark=0,
            saved=saved[index],
            overwrites=op.overwrites,
            kept=not op.replayable,
            **{key: field[index] for key, field in fields.items()},
        )
        for index, op in enumerate(graph.ops)
    )
    pairs = data.get("parameters")
    if not isinstance(pairs, list) or any(
        not isinstance(pair, list) or len(pair) != 2 or not all(map(is_whole, pair))
        for pair in pairs
    ):
        raise UsageError("damaged document: 'parameters' must be a list of pairs of numbers")
    # Negative keys, as the keys of a running step are ids of tensors.
    parameters = {-1 - place: (pair[0], pair[1]) for place, pair in enumerate(pairs)}
    asked = None if data.get("asked") is None else tuple(sorted(_whole(data, "asked", None)))
    carries = frozenset(_whole(data, "carries_grad", None))
    return Seen(ops, carries, parameters, {}, forward, asked)


def retention(graph: Graph, data: dict[str, Any]) -> Retention:
    """The decisions in a plan file, checked against this graph."""
    choices = data.get("retain")
    if not isinstance(choices, list) or len(choices) != len(graph.values):
        raise UsageError(
            f"damaged document: 'retain' must be a list of {len(graph.values)} decisions"
        )
    found = Retention(tuple(NEVER if choice is None else choice for choice in choices))
    for value in graph.must_hold:
        if found.retain[value] >= 0:
            raise UsageError(
                f"damaged document: it drops value {value}, which cannot be recomputed"
            )
    return found


def optional(data: dict[str, Any], key: str, kind: type[T]) -> T | None:
    number = data.get(key)
    if number is None:
        return None
    if type(number) not in (int, kind) or not 0 <= number < _MOST:
        raise UsageError(f"damaged document: {key!r} cannot be {brief(number)}")
    return kind(number)


def status(data: dict[str, Any]) -> str:
    found = data.get("status")
    if found not in ("plain", "fits"):
        raise UsageError(f"damaged document: a plan's status cannot be {brief(found)}")
    return str(found)


def _rows(
    data: dict[str, Any], key: str, count: int, *, optional: bool = False
) -> list[tuple[int, ...] | None]:
    rows = data.get(key)
    if (
        not isinstance(rows, list)
        or len(rows) != count
        or not all(
            (optional and row is None) or (isinstance(row, list) and all(map(is_whole, row)))
            for row in rows
        )
    ):
        raise UsageError(f"damaged document: {key!r} must be {count} lists of whole numbers")
    return [None if row is None else tuple(row) for row in rows]


def _whole(data: dict[str, Any], key: str, count: int | None) -> list[int]:
    numbers = data.get(key)
    if (
        not isinstance(numbers, list)
        or any(not is_whole(number) or number < 0 for number in numbers)
        or (count is not None and len(numbers) != count)
    ):
        wanted = "" if count is None else f"{count} "
        raise UsageError(f"damaged document: {key!r} must be a list of {wanted}whole numbers")
    return numbers
