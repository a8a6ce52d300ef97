"""Memory limits as users write them, and bytes as people read them.

Problem: "6 GiB", 6442450944, 0.5 and "50%" all mean a limit. Invariant: in the API a size is an
`int` number of bytes; only this file reads text and writes it; a number means the same as its text,
so that a command line and a configuration file say what Python says. Imports errors and torch.
Rejected: guessing that a small int means GiB.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from lowtide.errors import UsageError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_FORMS = 'bytes (an int), text such as "6 GiB", "800 MB" or "50%", or a float in (0, 1]'
_SHOWN = 100  # characters of a wrong limit, which may be a whole model, a batch or a file
_MOST = 2**63 - 1  # the most that byte counters hold
_STORED = " To follow a stored plan: lowtide.budget(lowtide.load_plan(path))."
_NO_LIMIT = "To limit nothing, leave the limit (or the budget) out."


def parse_limit(limit: object) -> int | float:
    """Read a limit as bytes (`int`) or as a fraction of the plain peak (`float` in (0, 1]).

    Raises:
        UsageError: it is zero, negative, NaN, above 1 as a float, above 2**63 - 1, or unreadable.
    """
    if isinstance(limit, str):
        return _parse_text(limit)
    nbytes = whole_number(limit)
    if nbytes is not None:
        return _in_range(nbytes)
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        kind, shown = type(limit).__name__, _shown(limit)
        got = f"an object of type {kind}" if shown is None else f"{shown} of type {kind}"
        hint = ""
        if callable(getattr(limit, "forward", None)):
            hint = " For a limit on every training forward of a model: lowtide.fit(model, limit)."
        elif isinstance(limit, os.PathLike):
            hint = _STORED
        raise UsageError(f"a limit is {_FORMS}; got {got}.{hint}")
    number: Any = limit  # to a type checker, a Real cannot be compared
    fraction = float(number) if 0 < number <= 1 else 0.0
    if not fraction:
        hint = ""
        if number > 1:
            hint = ' Bytes are a whole number, or a number with a unit: "6 GiB", "800 MB".'
        got = _shown(limit) or "a number too long to show"
        raise UsageError(
            f"a float limit is a fraction of the plain step's peak, in (0, 1]; got {got}.{hint}"
        )
    return fraction


@contextlib.contextmanager
def meant_by_place(caller: str, limit: object, args: tuple[Any, ...]) -> Iterator[None]:
    """Around the call of a step: if no limit was given, but one of the step's arguments may have
    been meant for one, an error of the step tells how it is given."""
    try:
        yield
    except Exception as error:
        if limit is None and any(isinstance(each, float | str) for each in args):
            error.add_note(f"{caller} takes its limit by name: limit=0.5, limit='6 GiB'.")
        raise


def whole_number(value: object) -> int | None:
    """The value of an integer of any library's type; None for anything else, and for a bool."""
    if isinstance(value, bool):
        return None
    if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
        return None  # to torch, the index of one
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # the latter of a tensor without content
        return None


def _in_range(nbytes: int) -> int:
    if nbytes > _MOST:
        raise UsageError(f"a limit is at most 2**63 - 1 bytes; got more. {_NO_LIMIT}")
    if nbytes <= 0:
        got = _shown(nbytes) or "a number too long to show"
        raise UsageError(f"a limit in bytes must be positive; got {got}.")
    return nbytes


def _shown(limit: object) -> str | None:
    """A wrong limit as text; None: it is long. Python writes no number of thousands of digits."""
    try:
        text = repr(limit)
    except ValueError:
        return None
    return text if len(text) <= _SHOWN else None


def _parse_text(text: str) -> int | float:
    if text.rstrip().endswith("%"):
        return _share(text.strip())
    match = _TEXT.fullmatch(text)
    unit = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or unit is None:
        meant = _meant(text)
        raise UsageError(
            f"cannot read the limit {_short(text)}{meant}: write a number and a unit, for instance "
            f'"6 GiB" or "800 MB"; units are {", ".join(u for u in _names())}. A fraction of the '
            'plain step\'s peak is written as "60%" or as a number: 0.6.'
            + (_STORED if os.path.isfile(text) else "")
        )
    if not match[2] and "." in match[1]:
        return parse_limit(float(match[1]))
    size = float(match[1]) * unit
    if size > _MOST:
        raise UsageError(f"a limit is at most 2**63 - 1 bytes; {_short(text)} is more. {_NO_LIMIT}")
    nbytes = int(size) if match[2] else int(match[1])  # the latter to the byte
    if nbytes <= 0:
        raise UsageError(f"a limit must be positive; {_short(text)} is {nbytes} bytes.")
    return nbytes


def _meant(text: str) -> str:
    """A question for a limit in a form that other tools read: "6G", "6,000 MB"."""
    short = re.fullmatch(r"\s*([0-9][0-9,_]*(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*", text, re.I)
    if short is None or len(text) > _SHOWN:
        return ""
    # One comma is that of a fraction, unless three digits follow: "1,5 GB", but "6,000 MB".
    number = re.sub(r"^(0(?=,)|[0-9]+(?=,(?:[0-9]{1,2}|[0-9]{4,})$)),", r"\1.", short[1])
    number, scale = re.sub("[,_]", "", number), short[2].upper()
    if not scale:
        return f' (did you mean "{number}"?)'
    binary, decimal = f"{scale}iB", f"{'k' if scale == 'K' else scale}B"
    units = [binary] if short[3] else [decimal] if short[4] else [binary, decimal]
    meant = " or ".join(f'"{number} {unit}"' for unit in units)
    return f" (did you mean {meant}?)"


def _share(text: str) -> float:
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(
            "a limit in percent is a share of the plain step's peak, above 0% and at most 100%; "
            f"got {_short(text)}."
        )
    return share


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:20]}...{text[-10:]}")


def _names() -> list[str]:
    return ["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]


def format_bytes(nbytes: int | None) -> str:
    """Bytes as text: ``"383.2 MiB"``, ``"5.93 GiB"``; ``"unknown"`` for None."""
    if nbytes is None:
        return "unknown"
    size = float(nbytes)
    for unit, places in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if round(abs(size), places) < 1024:  # else it would be written as 1024.0 of them
            return f"{size:.{places}f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"  # a tenth is more than most predictions err by, from a GiB on


def exact_bytes(nbytes: int) -> str:
    """Bytes to the byte, and as people read them: ``"6442450944 bytes (6.00 GiB)"``."""
    if nbytes < 1024:
        return f"{nbytes} byte{'' if nbytes == 1 else 's'}"
    return f"{nbytes} bytes ({format_bytes(nbytes)})"


def limit_in_words(limit: int | float) -> str:
    """A limit as it was given: bytes, or a fraction of the plain peak."""
    return format_bytes(limit) if isinstance(limit, int) else f"{limit:g} of the plain peak"


def format_limit(limit: int | None, fraction: float | None) -> str:
    """A limit as text, in bytes if these are known, else as the fraction that was asked for."""
    if limit is None and fraction is not None:
        return f"{limit_in_words(fraction)}, which is not known yet"
    return format_bytes(limit)
