"""Does the measured peak stay at or under the limit, from the first step on, and what does it cost?

For every network: the peak of the plain step, then budgets of 80, 60 and 40 % of it in bytes. The
peaks of steps 1 to 4 are measured allocation by allocation; loss, gradients and buffers are
compared bit for bit with those of the plain step on the same data. Then plain and budgeted steps
run in turns without measuring, and the medians of their CPU seconds give the overhead. `--more`
does all but the timing for about two dozen networks that no formula here was fitted to.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import lowtide
from models import (
    WORKLOADS,
    Batch,
    Workload,
    arguments,
    clear,
    interleave,
    learn,
    mebibytes,
    results,
    timed_step,
    train_step,
)
from more_models import MORE


@dataclass
class Steps:
    """Peaks and results of some training steps."""

    peaks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)

    def same(self, other: Steps) -> bool:
        """Equal bits in every step that both ran."""
        count = min(len(self.losses), len(other.losses))
        return self.losses[:count] == other.losses[:count] and all(
            torch.equal(a, b)
            for mine, theirs in zip(self.states[:count], other.states[:count], strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )


def state_of(model: nn.Module) -> list[Tensor]:
    """Gradients, buffers and the generator's state, as bits."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    bits = [t.detach().clone() for t in (*gradients, *model.buffers())]
    return [*bits, torch.get_rng_state()]


def run(
    work: Workload, model: nn.Module, data: list[Batch], budget: lowtide.Budget | None, out: Steps
) -> None:
    torch.manual_seed(1)
    for batch in data:
        clear(model)
        step = lowtide.measure(
            lambda batch=batch: out.losses.append(train_step(work, model, batch, budget)),
            device="cpu",
        )
        out.peaks.append(step.peak_bytes)
        out.states.append(state_of(model))


def overhead(
    work: Workload, model: nn.Module, batch: Batch, budget: lowtide.Budget, rounds: int
) -> tuple[float, float]:
    """Seconds of a plain step and of one under the budget."""
    budgeted = timed_step(work, model, batch, budget)
    learn(budgeted)
    plain = timed_step(work, model, batch)
    spent = interleave({"plain": plain, "budget": budgeted}, rounds)
    return spent["plain"], spent["budget"]


def verdict(peaks: list[int], limit: int) -> str:
    over = [
        f"step {i} over by {100 * (peak / limit - 1):.1f} %"
        for i, peak in enumerate(peaks, 1)
        if peak > limit
    ]
    return "; ".join(over) or "held"


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.8, 0.6, 0.4])
    parser.add_argument("--more", action="store_true", help="other networks, without times")
    options = parser.parse_args()
    rounds = 0 if options.more else 3 if options.quick else 7
    chosen = MORE if options.more else {name: WORKLOADS[name] for name in options.models}
    with results(options) as rows:
        print(
            "| network | limit | limit, MiB | peak of steps 1 to 4, MiB | planned | limit "
            "| CPU seconds, plain and budget | added | bits |\n" + "|---" * 9 + "|"
        )
        for name, work in chosen.items():
            model = work.make()
            data = [work.batch() for _ in range(4)]
            plain = Steps()
            run(work, copy.deepcopy(model), data, None, plain)
            # Later steps only: the first one may allocate workspaces that stay.
            peak = min(plain.peaks[1:])
            print(f"| {name} | plain | | {' '.join(map(mebibytes, plain.peaks))} |" + " |" * 5)
            for share in options.shares:
                row = one_limit(work, model, data, plain, int(share * peak), rounds)
                rows.append({"model": name, "share": share, "plain": plain.peaks, **row})
                print(markdown_row(name, share, row), flush=True)


def one_limit(
    work: Workload, model: nn.Module, data: list[Batch], plain: Steps, limit: int, rounds: int
) -> dict[str, object]:
    budget, steps, net = lowtide.budget(limit), Steps(), copy.deepcopy(model)
    row: dict[str, object] = {"limit": limit, "peaks": steps.peaks, "minimum": None}
    try:
        run(work, net, data, budget, steps)
        row["planned"] = budget.report().planned_peak
        if rounds:
            row["seconds"] = overhead(work, net, data[0], budget, rounds)
    except lowtide.BudgetError as error:
        row["minimum"], row["refused_at"] = error.minimum, len(steps.peaks) + 1
        row["error"] = str(error)
    row["verdict"] = verdict(steps.peaks, limit)
    row["same"] = steps.same(plain) if steps.losses else None
    return row


def markdown_row(name: str, share: float, row: dict) -> str:
    said = row["verdict"] if row["peaks"] else ""
    seconds, added = "", ""
    if row["minimum"] is not None:
        least = f"refused at step {row['refused_at']}: at least {mebibytes(row['minimum'])}"
        said = f"{said}; {least}" if said else least
    if "seconds" in row:
        before, after = row["seconds"]
        seconds, added = f"{before:.2f} {after:.2f}", f"{100 * (after / before - 1):.0f} %"
    bits = {True: "same", False: "DIFFER", None: ""}[row["same"]]
    cells = [
        name,
        f"{share:.0%}",
        mebibytes(row["limit"]),
        " ".join(map(mebibytes, row["peaks"])),
        mebibytes(row.get("planned")),
        said,
        seconds,
        added,
        bits,
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
