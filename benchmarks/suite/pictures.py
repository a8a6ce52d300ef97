"""One picture per network: seconds of a step against its peak, for all methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .contest import PLAIN, Row

_MARKS = "osD^vP*X"
_MIB = 2**20


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write an SVG with text as text; the same figures give the same file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lowtide"})
    by_name = {row.method: row for row in rows}
    base = by_name[PLAIN].seconds
    if base is None:
        return
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    plain = by_name[PLAIN]
    ours = [row for row in rows if row.family in ("plain", "lowtide") and row.seconds and row.held]
    ours.sort(key=lambda row: row.peak or 0)
    xs = [(row.peak or 0) / _MIB for row in ours]
    ys = [(row.seconds or 0) / base for row in ours]
    axes.plot(xs, ys, "-o", color="#0b6e99", markersize=4, label="lowtide", zorder=3)
    axes.plot((plain.peak or 0) / _MIB, 1, "o", color="black", label="plain", zorder=4)
    others = [row for row in rows if row.family in ("peer", "compile") and row.seconds]
    for index, row in enumerate(others):
        color = "#888888" if row.family == "compile" else f"C{1 + index % 9}"
        mark = _MARKS[index % len(_MARKS)]
        x, y = (row.peak or 0) / _MIB, (row.seconds or 0) / base
        axes.plot(x, y, mark, color=color, markersize=7, alpha=0.8, label=row.method)
    axes.set_xlim(left=0)
    axes.set_xlabel("peak of a step, MiB")
    axes.set_ylabel("seconds of a step, plain = 1")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
