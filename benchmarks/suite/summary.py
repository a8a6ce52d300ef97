"""Summaries of the rows: lowtide against each peer at that peer's peak, and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.models import markdown, mebibytes

from .contest import PLAIN, Row
from .largest import Fit

_NOISE = 0.02  # of a step's time: smaller differences mean nothing
_NOTHING = 0.01  # of the plain peak: saving less than this counts as no saving


@dataclass(frozen=True)
class Duel:
    """A peer, and lowtide given its peak as the limit.

    Attributes:
        theirs, ours: added time over the step without recomputation, as a share of it; for a
            compiled peer, that step is compiled too.
        verdict: "ahead", "even", "behind", or why they cannot be compared.
    """

    peer: str
    peak: int | None
    theirs: float | None
    ours: float | None
    verdict: str


def added(row: Row, rows: dict[str, Row]) -> float | None:
    """The time added to that of the method's base, as a share of it."""
    base = rows.get(row.base)
    if row.seconds is None or base is None or base.seconds is None:
        return None
    return row.seconds / base.seconds - 1


def duels(rows: Sequence[Row]) -> list[Duel]:
    """One for each peer; if they cannot be compared, the verdict is the reason."""
    by_name = {row.method: row for row in rows}
    ours = [row for row in rows if row.family == "lowtide"]
    plain = by_name[PLAIN].peak
    return [
        _duel(row, by_name, ours, plain)
        for row in rows
        if row.family in ("peer", "compile") and row.method != row.base
    ]


def _duel(row: Row, rows: dict[str, Row], all_ours: list[Row], plain: Any) -> Duel:
    theirs = added(row, rows)
    if theirs is None:
        return Duel(row.method, row.peak, None, None, row.error or "not timed")
    if row.peak is None or row.peak > (1 - _NOTHING) * plain:
        return Duel(row.method, row.peak, theirs, None, "it saves no memory here")
    fitting = [us for us in all_ours if us.limit is not None and us.limit <= row.peak]
    us = max(fitting, key=lambda us: us.limit or 0, default=None)
    ours = None if us is None else added(us, rows)
    if us is None or ours is None or not us.held:
        why = "limit exceeded" if us and not us.held else us.error if us else "not run"
        return Duel(row.method, row.peak, theirs, None, why)
    verdict = "ahead" if ours < theirs - _NOISE else "behind" if ours > theirs + _NOISE else "even"
    return Duel(row.method, row.peak, theirs, ours, verdict)


# ---------------------------------------------------------------------------- text


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.0f} %"


def row_table(rows: Sequence[Row]) -> str:
    by_name = {row.method: row for row in rows}
    plain = by_name[PLAIN].peak
    table = []
    for row in rows:
        seconds = ""
        if row.seconds is not None and row.spread is not None:
            low, high = row.spread
            seconds = f"{row.seconds:.3f} ({low:.3f} to {high:.3f})"
        share = f"{row.peak / plain:.0%}" if row.peak and plain else ""
        peak = mebibytes(row.peak) + ("" if row.held else f" over {mebibytes(row.limit)}")
        said = "; ".join(filter(None, (row.note, row.error)))
        cells = (row.method, peak, share, seconds, percent(added(row, by_name)), row.bits, said)
        table.append(cells)
    head = ("method", "peak, MiB", "of plain", "seconds (quartiles)", "added", "bits", "")
    return markdown(head, table)


def duel_table(found: Sequence[tuple[str, Duel]]) -> str:
    """`found`: name of the network and duel."""
    table = [
        (name, duel.peer, mebibytes(duel.peak), percent(duel.theirs), percent(duel.ours),
         duel.verdict)
        for name, duel in found
    ]  # fmt: skip
    head = ("network", "peer", "its peak, MiB", "it adds", "lowtide adds", "lowtide is")
    return markdown(head, table)


def fit_table(found: Sequence[tuple[str, Fit]]) -> str:
    """`found`: name of the network and fit."""
    table = [
        (name, fit.method, fit.batch, mebibytes(fit.peak), f"{fit.rate:.2f}" if fit.rate else "")
        for name, fit in found
    ]
    return markdown(("network", "method", "largest batch", "peak, MiB", "samples a second"), table)


def as_data(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    """For the results file."""
    by_name = {row.method: row for row in rows}
    data = [
        asdict(row) | {"peak": row.peak, "held": row.held, "added": added(row, by_name)}
        for row in rows
    ]
    return {"title": title, "rows": data, "duels": [asdict(duel) for duel in duels(rows)]}
