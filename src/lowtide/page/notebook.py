"""How results look in a notebook: small pieces of HTML without scripts.

Problem: a notebook displays results by their own HTML. Invariant: the same figures as the text, in
tables and charts that take the notebook's colours. Imports charts, limits. Rejected: the whole page
in a cell.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.limits import format_bytes
from lowtide.page.charts import curve_chart, timeline_chart

if TYPE_CHECKING:
    from lowtide.analysis.timeline import Timeline
    from lowtide.explain import Explanation
    from lowtide.frontier import Curve

_CELL = '<td style="white-space:nowrap">'
_ROW = "display:flex;gap:.6em;align-items:center"
_BAR = "background:currentColor;opacity:.45;height:.7em"


def table_html(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], sentences: Sequence[str]
) -> str:
    """A table with a line above it and sentences below."""
    return f"<div>{_said([title])}{_table(titles, rows)}{_said(sentences)}</div>"


def text_html(text: str) -> str:
    """Text with its own layout."""
    return f"<pre>{html.escape(text)}</pre>"


def curve_html(curve: Curve) -> str:
    """A chart of the curve above its table."""
    return f"<div>{curve_chart(curve.plans)}{text_html(str(curve))}</div>"


def timeline_html(line: Timeline) -> str:
    """Live bytes over the step, by kind."""
    return f"<div>{timeline_chart(line)}</div>" if line.moments else f"<div>{line!r}</div>"


def explanation_html(told: Explanation) -> str:
    """The step over time, a bar for each kind of bytes at the peak, and the sentences."""
    line = told.planned or told.plain
    which = "peak" if told.planned is None else "planned peak"
    bars = "".join(
        f'<div style="{_ROW}"><span style="min-width:9em">{html.escape(kind)}</span>'
        f'<span style="{_BAR};width:{20 * nbytes / max(1, line.peak):.2f}em"></span>'
        f"<span>{format_bytes(nbytes)}</span></div>"
        for kind, nbytes in line.by_kind().items()
    )
    head = f"<div>In memory at the {which}, {format_bytes(line.peak)}:</div>"
    return f"<div>{_chart(told)}{head}{bars}{_said(told.sentences)}</div>"


def _chart(told: Explanation) -> str:
    if told.planned is None or told.plan is None:
        return timeline_html(told.plain)
    return timeline_chart(told.planned, told.plain, told.plan.limit)


def _said(sentences: Sequence[str]) -> str:
    return "".join(f"<p style='margin:.3em 0'>{html.escape(text)}</p>" for text in sentences)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"{_CELL}{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
