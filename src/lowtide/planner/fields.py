"""Typed access to the fields of a JSON document: a graph, a plan, or a file that contains them.

Problem: a file may be damaged, of another version, or not written by this package at all, and
loading one must never execute anything. Invariant: a field of the wrong type raises a `UsageError`
that shows what was found. Imports: `lowtide.errors`. Rejected: pickle, and a schema library for a
dozen fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from reprlib import repr as brief  # of a value that may be a whole file
from typing import Any, TypeVar

from lowtide.errors import UsageError

T = TypeVar("T")

_MOST = 2**53  # bytes, places and counts are far below; compiled code adds them up in 64 bits


def read_document(text: str, kind: str, version: int) -> dict[str, Any]:
    """Parse a JSON document and check that it is of this kind and version."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a {kind} document: the text is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != kind:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise UsageError(f"not a {kind} document: its format is {brief(found)}")
    if data.get("version") != version:
        raise UsageError(
            f"this {kind} document has version {brief(data.get('version'))}; this release of "
            f"lowtide reads version {version}. Record the step again"
        )
    return data


def rows(data: dict[str, Any], key: str, width: int) -> list[list[Any]]:
    rows = data.get(key)
    if not isinstance(rows, list) or any(
        not isinstance(row, list) or len(row) != width for row in rows
    ):
        raise UsageError(f"damaged document: {key!r} must be a list of rows of {width} fields")
    return rows


def at_places(data: dict[str, Any], key: str, read: Callable[[object], T]) -> dict[int, T]:
    """What stands at some places: rows of a place and what `read` reads."""
    return {whole(place): read(item) for place, item in rows(data, key, 2)}


def is_whole(item: object) -> bool:
    return type(item) is int and -_MOST < item < _MOST


def whole(item: object) -> int:
    if type(item) is not int or not is_whole(item):
        raise UsageError(f"damaged document: {brief(item)} stands where a whole number belongs")
    return item


def number(item: object) -> float:
    if type(item) is not float and not is_whole(item):  # a longer one has no float
        raise UsageError(f"damaged document: {brief(item)} stands where a number belongs")
    return float(item)  # type: ignore[arg-type]


def flag(item: object) -> bool:
    if type(item) is not bool:
        raise UsageError(f"damaged document: {brief(item)} stands where true or false belongs")
    return item


def text(item: object) -> str:
    if type(item) is not str:
        raise UsageError(f"damaged document: {brief(item)} stands where text belongs")
    return item


def ids(item: object) -> tuple[int, ...]:
    if not isinstance(item, list):
        raise UsageError(f"damaged document: {brief(item)} stands where a list of ids belongs")
    return tuple(whole(entry) for entry in item)
