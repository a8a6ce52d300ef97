"""Points in a terminal: memory to the right, time upwards.

Problem: a curve is seen at once, a table has to be read. Invariant: plain characters of one width;
of points in one place the last one is drawn, and the table beside it has all. Imports limits,
texttable. Rejected: braille dots, which many terminals draw in another width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.limits import format_bytes
from lowtide.texttable import percents_up_to

_WIDTH, _HEIGHT = 60, 14


@dataclass(frozen=True, slots=True)
class Mark:
    """A point: peak in bytes, overhead as a share, and the character that is drawn."""

    peak: int
    overhead: float
    sign: str


def plot(marks: Sequence[Mark], width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """Lines of a plot whose axes both start at zero."""
    most = max((m.peak for m in marks), default=0) or 1
    slowest = max((m.overhead for m in marks), default=0.0) or 0.05
    written = percents_up_to(slowest)
    grid = [[" "] * width for _ in range(height)]
    for mark in marks:
        column = round(mark.peak / most * (width - 1))
        row = round(mark.overhead / slowest * (height - 1))
        grid[height - 1 - row][column] = mark.sign
    lines = []
    for index, cells in enumerate(grid):
        at = slowest * (height - 1 - index) / (height - 1)
        label = f"{written(at):>5}" if index % 3 == 1 or index == height - 1 else " " * 5
        lines.append(f"{label} |{''.join(cells).rstrip()}")
    lines.append(" " * 6 + "+" + "-" * width)
    half, full = format_bytes(most // 2), format_bytes(most)
    middle = width // 2 - len(half) // 2
    axis = " " * 7 + "0" + " " * (middle - 1) + half
    lines.append(axis + " " * max(1, 7 + width - len(axis) - len(full)) + full)
    lines.append(" " * 7 + "peak to the right, added time upwards")
    return lines
