"""Does the measured peak stay at or under the limit, from the first step on, and what does it cost?

For every network: the peak of the plain step, then budgets of 80, 60 and 40 % of it in bytes. The
peaks of steps 1 to 4 are measured allocation by allocation; loss, gradients and buffers are
compared bit for bit with those of the plain step on the same data. Then plain and budgeted steps
run in turns without measuring, and the medians of their CPU seconds give the overhead. `--more`
does all but the timing for about two dozen networks that no formula here was fitted to. `--dtype`
runs the networks in half precision, whose kernels take other workspace, or under autocast.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from models import (
    WORKLOADS,
    Batch,
    Workload,
    arguments,
    clear,
    in_autocast,
    interleave,
    learn,
    mebibytes,
    results,
    timed_step,
    train_step,
)
from more_models import MORE

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Steps:
    """Peaks and results of some training steps."""

    peaks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)

    def same(self, other: Steps) -> bool:
        """Equal bits in every step that both ran."""
        count = min(len(self.losses), len(other.losses))
        losses = (list(map(repr, steps.losses[:count])) for steps in (self, other))  # NaN as well
        return next(losses) == next(losses) and all(
            torch.equal(bits(a), bits(b))
            for mine, theirs in zip(self.states[:count], other.states[:count], strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


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


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The same batch with its floating-point tensors in this type."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: cast(part, dtype) for key, part in batch.items()}
    return type(batch)(cast(part, dtype) for part in batch) if isinstance(batch, tuple) else batch


def in_type(work: Workload, name: str) -> Workload:
    """The same network in half precision, or under autocast."""
    if name == "autocast":
        return replace(work, loss=partial(in_autocast, work.loss))
    dtype = HALVES[name]
    return replace(
        work, build=lambda: work.build().to(dtype), batch=lambda: cast(work.batch(), dtype)
    )


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
    parser.add_argument("--dtype", choices=[*HALVES, "autocast"], help="else float32")
    parser.add_argument("--only", nargs="+", help="networks whose names contain one of these")
    options = parser.parse_args()
    rounds = 0 if options.more else 3 if options.quick else 7
    chosen = MORE if options.more else {name: WORKLOADS[name] for name in options.models}
    if options.only:
        chosen = {k: w for k, w in chosen.items() if any(part in k for part in options.only)}
    if options.dtype:
        chosen = {name: in_type(work, options.dtype) for name, work in chosen.items()}
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
