"""Plain-text tables, and the labels of an axis.

Problem: every report is a table, on terminals with and without colours. Invariant: data in, lines
out; nothing here knows what a row means. Imports nothing. Rejected: a dependency for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: int, total: bool = False
) -> list[str]:
    """Lines of a table whose first `right` columns are right-aligned.

    With `total` there is a rule above the last row.
    """
    widths = [
        max(len(title), *(len(row[place]) for row in rows)) if rows else len(title)
        for place, title in enumerate(titles)
    ]

    def line(cells: Sequence[str]) -> str:
        parts = [
            f"{cell:>{width}}" if place < right else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    rule = "  ".join("-" * width for width in widths)
    lines = [line(titles), rule, *map(line, rows)]
    if total and len(rows) > 1:
        lines.insert(-1, rule)
    return lines


def count_of(number: int, what: str) -> str:
    """``"1 row"``, ``"3 rows"``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def percents_up_to(most: float) -> Callable[[float], str]:
    """How the labels of an axis of shares are written, so that a few of them differ."""
    digits = 0 if most >= 0.2 else 1
    return lambda share: f"{share:.{digits}%}"
