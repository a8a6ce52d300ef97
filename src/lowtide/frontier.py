"""`lowtide.curve`: the time of a step against its memory, over all limits.

Problem: which limit is worth its price shows when prices are side by side. Invariant: each point is
a plan that can be run; a smaller limit never costs less than a larger one. Imports plans, plantext,
dryrun, planner. Rejected: a plot by a library, which would be a dependency; a notebook draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from lowtide import engine
from lowtide.dryrun.run import Dry, dry_run
from lowtide.memory.margins import limit_for
from lowtide.planner import solve
from lowtide.plans import Plan, from_solution, least_of, plan_step
from lowtide.plantext import POINT, plan_cells
from lowtide.texttable import table

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)


@dataclass(frozen=True)
class Curve(Sequence[Plan]):
    """Plans from the plain step down to the smallest reachable peak. Prints as a table.

    A sequence of its plans.

    Attributes:
        plans: the plans, from the largest limit to the smallest. Each has a `peak`, an `overhead`
            and a `lower_bound`, and can be run with `lowtide.budget`.
    """

    plans: tuple[Plan, ...]

    @property
    def plain_peak(self) -> int:
        """Predicted peak with nothing recomputed, in bytes."""
        return self.plans[0].plain_peak

    @property
    def minimum_peak(self) -> int:
        """The smallest limit of the curve, in bytes; see `Plan.minimum_peak`."""
        return min(plan.limit or plan.peak for plan in self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        return self.plans[index]

    def to_dict(self) -> dict[str, Any]:
        """Return the two peaks, and the limit and costs of each plan under "curve", as JSON types:
        sizes in bytes."""
        names = ("limit", "peak", "overhead", "lower_bound")
        return {
            "plain_peak": self.plain_peak,
            "minimum_peak": self.minimum_peak,
            "curve": [{name: getattr(plan, name) for name in names} for plan in self.plans],
        }

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import curve_html

        return curve_html(self)

    def __str__(self) -> str:
        cells = [plan_cells(plan, self.plain_peak) for plan in self.plans]
        return "\n".join(table(POINT, cells, right=4))


def curve(fn: Callable[..., Any], /, *args: Any, on: str | None = None, **kwargs: Any) -> Curve:
    """Find the cheapest plans for limits from the plain peak down to the smallest that can be kept.

    A dry run, like `lowtide.plan`, but without a margin below the limits for prediction errors.

    Args:
        fn: the step, as for `lowtide.plan`.
        args: its positional arguments.
        on: the device whose times to model, as for `lowtide.plan`.
        kwargs: its keyword arguments.

    Returns:
        The plans, from the plain step down to the smallest limit.

    Raises:
        UsageError: ``fn`` cannot be called; no rates are known of the device that `on` names; or
            called inside a budget or region, or with grad disabled.
    """
    return curve_of(dry_run(fn, args, kwargs, on))


def curve_of(step: Dry) -> Curve:
    """The curve of a step that a dry run saw already."""
    graph = step.graph
    plain = plan_step(step, None)
    least, polish = least_of(step), engine.annealing()
    points = [plain]
    for share in _SHARES:
        limit = int(share * plain.peak)
        if limit <= least.peak:
            break
        solution = solve(graph, limit, polish_with=polish)
        if solution.peak <= limit:
            points.append(from_solution(step, limit, solution))
    if least.peak < plain.peak:
        solution = solve(graph, least.peak, polish_with=polish)
        best = min((solution, least), key=lambda s: (s.peak > least.peak, s.seconds))
        limit = min(limit_for(least.peak), plain.peak)
        points.append(from_solution(step, limit, best))
    # A plan that needs less memory and less time replaces those above it.
    kept: list[Plan] = []
    for point in points:
        while len(kept) > 1 and kept[-1].overhead > point.overhead:
            kept.pop()
        kept.append(point)
    return Curve(tuple(kept))
