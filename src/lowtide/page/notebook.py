"""How results look in a notebook: small pieces of HTML without scripts.

Problem: a notebook displays results by their own HTML. Invariant: the same figures as the text, in
a table that takes the notebook's colours. Imports limits. Rejected: the whole page in a cell.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.limits import format_bytes

if TYPE_CHECKING:
    from lowtide.explain import Explanation
    from lowtide.saved import SavedTensors

_ROWS = 24
_EMPTY = ("", "", "")
_ROW = "display:flex;gap:.6em;align-items:center"
_BAR = "background:currentColor;opacity:.45;height:.7em"


def saved_html(saved: SavedTensors) -> str:
    """A table of what autograd holds, by module, operator and line."""
    groups = saved.by("kind", "module", "operator", "line")
    shown = groups[:_ROWS]
    rows = [[f"{g.nbytes:,}", format_bytes(g.nbytes), str(g.count), *g.keys] for g in shown]
    rest = groups[len(shown) :]
    if rest:
        more = sum(g.nbytes for g in rest)
        count = str(sum(g.count for g in rest))
        rows.append(
            [f"{more:,}", format_bytes(more), count, f"({len(rest)} more rows)", "", "", ""]
        )
    rows.append(
        [f"{saved.total:,}", format_bytes(saved.total), str(len(saved.rows)), "total", "", "", ""]
    )
    titles = ("bytes", "size", "storages", "kind", "module", "operator", "line")
    return _table(titles, rows)


def text_html(text: str) -> str:
    """Text with its own layout."""
    return f"<pre>{html.escape(text)}</pre>"


def explanation_html(told: Explanation) -> str:
    """The sentences, and a bar for each kind of bytes at the peak."""
    line = told.planned or told.plain
    bars = "".join(
        f'<div style="{_ROW}"><span style="min-width:9em">{html.escape(kind)}</span>'
        f'<span style="{_BAR};width:{20 * nbytes / max(1, line.peak):.2f}em"></span>'
        f"<span>{format_bytes(nbytes)}</span></div>"
        for kind, nbytes in line.by_kind().items()
    )
    said = "".join(f"<p style='margin:.3em 0'>{html.escape(text)}</p>" for text in told.sentences)
    return f"<div>{bars}{said}</div>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
