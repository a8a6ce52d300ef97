"""What is in memory at a peak, why a plan keeps what it keeps, and what would lower the peak.

Problem: advice has to be specific to this step. Invariant: every figure was simulated or counted
for it; advice that cannot be followed is not given. Imports study, timeline, planner. Rejected:
rules of thumb.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from lowtide.alike import stems, together
from lowtide.analysis.study import SHARES, Study
from lowtide.analysis.timeline import Item, Timeline
from lowtide.errors import BudgetError
from lowtide.planner import HOLD
from lowtide.plans import Plan
from lowtide.tape.operators import CONSTANTS

_NOTHING = 0.02  # a change that lowers the peak by less than this share is not advised


@dataclass(frozen=True, slots=True)
class Holder:
    """Storages of one origin at the peak: one kind, operator and line, in modules whose names
    differ only in numbers.

    `module` lists these numbers: ``layers.0-11.attention``.
    """

    kind: str
    operator: str
    module: str
    line: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that a plan keeps, and why."""

    nbytes: int
    operator: str
    module: str
    line: str
    shape: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something that would lower the peak: how, to what, at what price.

    `overhead` is a share of the plain step's time; None if the price is not time.
    """

    what: str
    how: str
    peak: int
    overhead: float | None


def holders(line: Timeline) -> tuple[Holder, ...]:
    """What is in memory at a peak, grouped by origin, largest first; adds up to the peak."""
    groups: dict[tuple[str, str, str, str], list[Item]] = {}
    stem = stems({item.site.module for item in line.items})
    for item in line.items:
        key = (item.kind, item.site.operator, stem(item.site.module), item.site.line)
        groups.setdefault(key, []).append(item)
    found = []
    for (kind, operator, _, where), items in groups.items():
        module = together({item.site.module for item in items})
        found.append(
            Holder(kind, operator, module, where, sum(i.nbytes for i in items), len(items))
        )
    found.sort(key=lambda holder: -holder.nbytes)
    assert sum(holder.nbytes for holder in found) == line.peak
    return tuple(found)


def reasons(subject: Study, plan: Plan) -> tuple[Kept, ...]:
    graph, trace = subject.step.graph, plan.simulation.trace
    assert trace is not None
    dropped = [
        (graph.ops[node.producer].seconds, node.nbytes)
        for value, node in enumerate(graph.values)
        if node.producer >= 0 and plan.retention.retain[value] >= 0 and graph.release[value] >= 0
    ]
    freed = sum(nbytes for _, nbytes in dropped)
    price = sum(seconds for seconds, _ in dropped) / freed if freed else None
    found = []
    for saved in subject.ledger.saved:
        if saved.kind == "unseen":
            by = saved.site.operator or "an operation"
            why = (
                f"its producer ({by}) is a kernel that the recorder cannot see or may not run "
                "again: a compiled or custom one, a collective, or a write that the dispatcher was "
                "not told of"
            )
            site = saved.site
            found.append(Kept(saved.nbytes, by, site.module, site.line, saved.shape, why))
        elif saved.kind == "activation" and plan.retention.retain[saved.number] == HOLD:
            site = saved.site
            why = _why_kept(graph, trace.replays, saved.number, price)
            found.append(
                Kept(saved.nbytes, site.operator, site.module, site.line, saved.shape, why)
            )
    return tuple(sorted(found, key=lambda kept: -kept.nbytes))


def _why_kept(graph: Any, replays: list[int], value: int, price: float | None) -> str:
    node = graph.values[value]
    op = graph.ops[node.producer]
    if node.pinned:
        if op.name.rpartition("::")[2] in CONSTANTS:
            return "a constant, into which other code may have written, is not made again"
        return "your program holds it as well, so dropping it would free nothing"
    if value in graph.must_hold:
        return f"{op.name} cannot be run again"
    if price is None:
        return "the limit is kept without recomputing anything"
    starts = sum(1 for reader in graph.consumers[value] if replays[reader])
    if starts:
        reads = "operation that is recomputed reads" if starts == 1 else (
            "operations that are recomputed read"
        )  # fmt: skip
        return f"recomputation starts from it: {starts} {reads} it"
    mine = op.seconds / node.nbytes if node.nbytes else 0.0
    if mine > price:
        return (
            f"running {op.name} again takes {op.seconds * 1e3:.2f} ms, {mine / price:.1f} times as "
            "much per byte as what is recomputed"
        )
    return "the limit is kept with it in memory, so nothing has to be paid for it"


def changes(subject: Study) -> tuple[Change, ...]:
    plain = subject.plain.peak
    if not plain:
        return ()
    half = plain // 2
    found = _by_limits(subject, half)
    if subject.halved is not None:
        h = subject.halved
        found.append(Change("half the batch", f"{h.half} instead of {h.size}", h.peak, None))
    for option in subject.options:
        if option.peak < plain and option.name in ("per block", "per block, products kept"):
            name = "blocks checkpointed by hand"
            if "products" in option.name:
                name += ", with a policy that keeps products"
            found.append(Change(name, option.how, option.peak, option.overhead))

    def order(change: Change) -> tuple[bool, float, int]:
        price = 1.0 if change.overhead is None else change.overhead
        return change.peak > half, price, change.peak

    ordered = sorted((c for c in found if c.peak <= plain * (1 - _NOTHING)), key=order)
    if ordered and ordered[0].peak > half:  # nothing halves the peak: the lowest goes first
        nearest = min(ordered, key=lambda change: change.peak)
        ordered.remove(nearest)
        ordered.insert(0, nearest)
    return tuple(ordered)


def _by_limits(subject: Study, half: int) -> list[Change]:
    """The usual shares of the plain peak, and the smallest limit if none of them halves it."""
    found = []

    def add(limit: float, what: str) -> None:
        with contextlib.suppress(BudgetError):
            plan = subject.plan(limit)
            how = f"with lowtide.budget({limit}): around forward and loss"
            found.append(Change(what, how, plan.peak, plan.overhead))

    for share in SHARES:
        add(share, f"a limit of {share:.0%} of the plain peak")
    none_halves_it = all(change.peak > half for change in found)
    if none_halves_it and subject.plain.minimum_peak < subject.plain.peak:  # this takes a search
        add(subject.smallest, "a limit just above the smallest that can be kept")
    return found
