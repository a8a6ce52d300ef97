"""Modules that repeat, in one row: ``layers.0-11.attention``.

Problem: a model has the same layer dozens of times, and a table with a row for each shows only the
largest kind of them. Invariant: names are joined only if they differ in nothing but numbers, and
the joined name lists these; a number that is part of a leaf's own name (``conv1``) is no number of
a repetition. Imports nothing. Rejected: grouping by type, which joins an encoder's layers with the
decoder's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_MANY = 4  # up to this many numbers or ranges are all listed


def stems(names: Iterable[str]) -> Callable[[str], str]:
    """What the names of repeated modules have in common; `names` are all that there are, which
    tells the leaves."""
    around: set[str] = set()
    for name in names:
        parts = name.split(".")
        around.update(".".join(parts[:end]) for end in range(1, len(parts)))

    def stem(name: str) -> str:
        parent, dot, last = name.rpartition(".")
        if name not in around and not last.isdigit():
            return _sharp(parent) + dot + last
        return _sharp(name)

    return stem


def _sharp(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def together(names: Iterable[str]) -> str:
    """Names that differ only in numbers, as one. Each place lists the numbers that occur there; of
    ``blocks.0-3.layers.0-5`` not every block need have all of these layers."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(
        _numbers(set(column)) if place % 2 else column[0] for place, column in enumerate(columns)
    )


def _numbers(texts: set[str]) -> str:
    if len(texts) == 1:
        return next(iter(texts))
    numbers = sorted(map(int, texts))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [
        text
        for run in runs
        for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    return ",".join(shown if len(shown) <= _MANY else [*shown[:2], "..", str(numbers[-1])])
