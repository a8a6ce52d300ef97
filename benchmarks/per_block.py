"""The added time of a budget against per-block checkpointing, at the same peak.

Every block is wrapped by hand in `torch.utils.checkpoint` (non-reentrant); the peak of that step is
measured and given to `lowtide.budget` as the limit. After a warm-up, in which the plan is made,
plain, per-block and budgeted steps run in turns in one process; the medians of their CPU seconds
are compared.
"""

from __future__ import annotations

import copy

import torch

import lowtide
from models import (
    WORKLOADS,
    Workload,
    arguments,
    interleave,
    learn,
    markdown,
    measured_peak,
    mebibytes,
    results,
    timed_step,
    wrap_blocks,
)

GOAL = 0.75


def compare(work: Workload, rounds: int) -> dict[str, object]:
    plain = work.make()
    blocks, budgeted = wrap_blocks(work, copy.deepcopy(plain)), copy.deepcopy(plain)
    plain_peak = max(measured_peak(work, plain) for _ in range(2))
    limit = max(measured_peak(work, blocks) for _ in range(2))
    row: dict[str, object] = {
        "model": work.name,
        "plain_peak": plain_peak,
        "limit": limit,
        "blocks": len(work.blocks(plain)),
    }
    budget = lowtide.budget(limit)
    try:
        row["peaks"] = [measured_peak(work, budgeted, budget) for _ in range(3)]
    except lowtide.BudgetError as error:
        return {**row, "minimum": error.minimum, "error": str(error)}
    batch = work.batch()
    runs = {
        "plain": timed_step(work, plain, batch),
        "blocks": timed_step(work, blocks, batch),
        "lowtide": timed_step(work, budgeted, batch, budget),
    }
    learn(runs["lowtide"])
    spent = interleave(runs, rounds)
    row |= spent
    row["planned_peak"] = budget.report().planned_peak
    row["ratio"] = (spent["lowtide"] - spent["plain"]) / (spent["blocks"] - spent["plain"])
    return row


def cells(row: dict) -> list[str]:
    sizes = [row["model"], mebibytes(row["plain_peak"]), mebibytes(row["limit"])]
    if "ratio" not in row:
        return [*sizes, f"refused, at least {mebibytes(row['minimum'])}", "", "", "", "", ""]
    plain = row["plain"]
    added = [
        f"{row[key]:.2f} (+{100 * (row[key] / plain - 1):.0f} %)" for key in ("blocks", "lowtide")
    ]
    met = "yes" if row["ratio"] <= GOAL else "NO"
    limit = row["limit"]
    peaks = " ".join(mebibytes(peak) + ("!" if peak > limit else "") for peak in row["peaks"])
    return [*sizes, peaks, f"{plain:.2f}", *added, f"{row['ratio']:.2f}", met]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rounds = 5 if options.quick else 9
    head = (
        "network",
        "plain peak, MiB",
        "per-block peak = limit",
        "peaks of lowtide, steps 1 to 3 (!: over)",
        "plain, s",
        "per-block, s",
        "lowtide, s",
        "added, lowtide / per-block",
        f"goal <= {GOAL}",
    )
    with results(options) as rows:
        print(markdown(head, []), flush=True)
        for name in options.models:
            rows.append(compare(WORKLOADS[name], rounds))
            print("| " + " | ".join(cells(rows[-1])) + " |", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
