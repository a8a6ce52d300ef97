"""Charts in a notebook cell: memory over a step, and time against memory.

Problem: a table does not show where a curve bends, nor one number how steep a peak is. Invariant:
SVG without scripts or references, in colours that can be read on light and dark ground; what is
drawn are the figures of the object, and thinning keeps the peak. Imports limits, texttable;
timeline and plans for typing. Rejected: a plotting library, which a notebook may lack, and the
page's charts, which need its script.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from lowtide.limits import format_bytes
from lowtide.texttable import percents_up_to

if TYPE_CHECKING:
    from lowtide.analysis.timeline import Moment, Timeline
    from lowtide.plans import Plan

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 14, 24, 26
_COLUMNS = 320  # moments that are drawn; of neighbours the largest
_COLOURS = {
    "kept": "#4c8fd0",
    "recomputed": "#e39a2d",
    "gradient": "#2c9c7a",
    "temporary": "#a0a5ab",
}
_LIMIT = "#dd4a37"

Scale = Callable[[float], float]


def timeline_chart(
    shown: Timeline, beside: Timeline | None = None, limit: int | None = None
) -> str:
    """Live bytes of a step stacked by kind; the total of another plan's is a dashed line."""
    places = sorted({_place(m) for line in (shown, beside) if line for m in line.moments})
    here = _thinned(shown, places)
    most = 1.06 * max(shown.peak, beside.peak if beside else 0, limit or 0, 1)
    across, up = _across(len(here) or 1), _up(most)
    parts = [_line_across(up, most * k / 4 / 1.06, _size) for k in range(5)]
    ground = [0] * len(here)
    for kind, colour in _COLOURS.items():
        top = [low + getattr(m, kind) for low, m in zip(ground, here, strict=True)]
        shape = [*_stairs(top, across, up), *reversed(_stairs(ground, across, up))]
        parts.append(_path(shape, f'fill="{colour}"'))
        ground = top
    if beside is not None:
        totals = [m.total for m in _thinned(beside, places)]
        style = 'fill="none" stroke="currentColor" stroke-dasharray="4 3"'
        parts.append(_path(_stairs(totals, across, up), style))
    if limit is not None:
        ends = [(_LEFT, up(limit)), (_WIDTH - _RIGHT, up(limit))]
        parts.append(_path(ends, f'stroke="{_LIMIT}" stroke-width="2"'))
        word = f"limit {format_bytes(limit)}"
        parts.append(_text(_LEFT + 4, up(limit) - 5, word, colour=_LIMIT))
    at = 0
    for backward, some in groupby(here, lambda m: m.phase != "forward"):
        count = len(list(some))
        word = "backward" if backward else "forward"
        parts.append(_text(across(at + count / 2), _HEIGHT - 8, word, "middle"))
        at += count
    said = f"Live bytes over the step, at most {format_bytes(shown.peak)}"
    return f"{_svg(parts, said)}{_legend(beside is not None)}"


def curve_chart(plans: Sequence[Plan]) -> str:
    """The added time of plans against their peaks; dashed, the least that could be possible."""
    points = [(plan.peak, plan.overhead) for plan in plans]
    bounds = [(plan.peak, plan.lower_bound) for plan in plans if plan.lower_bound is not None]
    most, slowest = max(peak for peak, _ in points), max(0.05, *(cost for _, cost in points))
    across, up = _across(1.04 * most or 1), _up(1.06 * slowest)
    written = percents_up_to(slowest)
    parts = [_line_across(up, slowest * k / 4, written) for k in range(5)]
    for k in range(5):
        parts.append(_text(across(most * k / 4), _HEIGHT - 8, _size(most * k / 4), "middle"))
    parts.append(_text(_LEFT, 14, "added time, by peak above what was in memory before"))
    placed = [[(across(peak), up(cost)) for peak, cost in line] for line in (bounds, points)]
    parts.append(_path(placed[0], 'fill="none" stroke="currentColor" stroke-dasharray="3 3"'))
    colour = _COLOURS["kept"]
    parts.append(_path(placed[1], f'fill="none" stroke="{colour}" stroke-width="2"'))
    for (peak, cost), (x, y) in zip(points, placed[1], strict=True):
        said = f"{format_bytes(peak)}, {cost:.1%} more time"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{said}</title></circle>"
        )
    return _svg(parts, "Added time against the peak; the table has every point")


# ------------------------------------------------------------------ moments


def _place(moment: Moment) -> tuple[bool, int, bool]:
    """Where a moment stands in a step: plain and planned have the same operations and events, and
    a replay comes before the event that asks for it."""
    forward = moment.phase == "forward"
    return not forward, moment.place, moment.phase == "backward"


def _thinned(line: Timeline, places: Sequence[tuple[bool, int, bool]]) -> list[Moment]:
    """The moment of each place, or the last before it; of neighbours that share a column the
    largest."""
    own = {_place(m): m for m in line.moments}
    every: list[Moment] = []
    for place in places:
        found = own.get(place) or (every[-1] if every else None)
        every.append(found or line.moments[0])
    wide = -(-len(every) // _COLUMNS) or 1
    return [max(every[k : k + wide], key=lambda m: m.total) for k in range(0, len(every), wide)]


# ------------------------------------------------------------------ shapes


def _across(most: float) -> Scale:
    return lambda n: _LEFT + n / most * (_WIDTH - _LEFT - _RIGHT)


def _up(most: float) -> Scale:
    return lambda n: _HEIGHT - _BOTTOM - n / most * (_HEIGHT - _TOP - _BOTTOM)


def _stairs(heights: Sequence[float], across: Scale, up: Scale) -> list[tuple[float, float]]:
    return [(across(k + side), up(n)) for k, n in enumerate(heights) for side in (0, 1)]


def _path(points: Sequence[tuple[float, float]], style: str) -> str:
    return (
        f'<path d="M{"L".join(f"{x:.1f},{y:.1f}" for x, y in points)}" {style}/>' if points else ""
    )


def _line_across(up: Scale, at: float, named: Callable[[float], str]) -> str:
    ends = [(_LEFT, up(at)), (_WIDTH - _RIGHT, up(at))]
    line = _path(ends, 'stroke="currentColor" stroke-opacity=".25"')
    return line + _text(_LEFT - 6, up(at) + 4, named(at), "end")


def _text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = "currentColor"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(words)}</text>"
    )


def _size(nbytes: float) -> str:
    return format_bytes(int(nbytes)) if nbytes else "0"


def _svg(parts: Sequence[str], said: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(said)}" '
        f'style="display:block;width:100%;max-width:{_WIDTH}px" font-size="11" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _legend(beside: bool) -> str:
    kinds = "".join(
        f'<span><span style="background:{colour};display:inline-block;width:.8em;height:.8em;'
        f'margin-right:.4em"></span>{kind}</span>'
        for kind, colour in _COLOURS.items()
    )
    other = "<span>- - without recomputation</span>" if beside else ""
    return f'<div style="display:flex;gap:1.2em;flex-wrap:wrap">{kinds}{other}</div>'
