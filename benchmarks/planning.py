"""Is what a dry run predicts what happens? Peak and overhead, predicted and measured.

For every network and limit: a plan is made from fake tensors, without running anything, and a new
budget runs it. The peak of its first step, which follows the plan as it was made, is counted
allocation by allocation. Then plain and budgeted steps run in turns, not measured, and the medians
of their CPU seconds give the overhead; by then the budget has planned again from measured times.
Bound and gap are in points of the plain step's time, by the device model.
"""

from __future__ import annotations

import copy
import time

from torch import nn

import lowtide
from models import (
    WORKLOADS,
    Batch,
    Workload,
    arguments,
    interleave,
    measured_peak,
    mebibytes,
    results,
    timed_step,
)

SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--predict", action="store_true", help="only plan, run nothing")
    options = parser.parse_args()
    rounds = 0 if options.predict else 3 if options.quick else 7
    shares = options.shares[::3] if options.quick else options.shares
    with results(options) as rows:
        print(
            "| network | limit | limit, MiB | peak: predicted | measured | off by "
            "| overhead: predicted | at least | gap | measured | seconds to solve |\n"
            + "|---" * 11
            + "|"
        )
        for name in options.models:
            work = WORKLOADS[name]
            model, batch = work.make(), work.batch()
            began = time.perf_counter()
            plain = lowtide.plan(lambda b, w=work, m=model: w.loss(m, b), batch)
            spent = time.perf_counter() - began
            peak = 0 if options.predict else measured_peak(work, copy.deepcopy(model))
            if peak:
                peak = measured_peak(work, copy.deepcopy(model))
            print(
                f"| {name} | plain | | {mebibytes(plain.peak)} | {mebibytes(peak)} "
                f"| {off(plain.peak, peak)} | | | | | {spent:.2f} (dry run, "
                f"{len(plain.operations)} operations) |"
            )
            rows.append({"model": name, "plain": plain.peak, "measured": peak, "dry": spent})
            floor = plain.minimum_peak
            limits = [(f"{s:.0%}", int(s * plain.peak)) for s in shares]
            met = [pair for pair in limits if pair[1] > floor]
            for label, limit in [*met, ("minimum", floor)]:
                row = one_limit(work, model, batch, limit, rounds)
                rows.append({"model": name, "limit": limit, **row})
                print(line(name, label, limit, row), flush=True)


def one_limit(
    work: Workload, model: nn.Module, batch: Batch, limit: int, rounds: int
) -> dict[str, float | int | None]:
    plan = lowtide.plan(lambda b: work.loss(model, b), batch, limit=limit)
    row: dict[str, float | int | None] = {
        "peak": plan.peak,
        "overhead": plan.overhead,
        "bound": plan.lower_bound,
        "gap": plan.gap,
        "solve": plan.solve_seconds,
        "measured_peak": None,
        "measured_overhead": None,
    }
    if rounds:
        net, budget = copy.deepcopy(model), lowtide.budget(plan)
        try:
            row["measured_peak"] = measured_peak(work, net, budget)
            for _ in range(2):  # the budget measures its first steps, which takes time
                timed_step(work, net, batch, budget)()
            spent = interleave(
                {
                    "plain": timed_step(work, net, batch),
                    "budget": timed_step(work, net, batch, budget),
                },
                rounds,
            )
            row["measured_overhead"] = spent["budget"] / spent["plain"] - 1
        except lowtide.BudgetError as error:  # what was measured does not fit after all
            row["refused"] = error.minimum
    return row


def off(predicted: int, measured: int | None) -> str:
    return f"{100 * (predicted / measured - 1):+.2f} %" if measured else "-"


def line(name: str, label: str, limit: int, row: dict) -> str:
    def points(key: str) -> str:
        return "-" if row[key] is None else f"{100 * row[key]:.1f}"

    measured = points("measured_overhead")
    if "refused" in row:
        measured = f"refused: {mebibytes(row['refused'])}"
    cells = [
        name,
        label,
        mebibytes(limit),
        mebibytes(row["peak"]),
        mebibytes(row["measured_peak"]),
        off(row["peak"], row["measured_peak"]),
        points("overhead"),
        points("bound"),
        points("gap"),
        measured,
        f"{row['solve']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
