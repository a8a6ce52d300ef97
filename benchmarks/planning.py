"""What does a limit cost, how near to the best possible is the plan, and are its predictions right?

For every network and limit a plan is made from one dry run, without running anything; bound and gap
are in percent of the plain step's modelled time. With `--measure` a new budget runs the plan: the
peak of its first step, which follows the plan as made, is measured allocation by allocation; then
plain and budgeted steps run in turns without measuring, and the overhead is the median of the
difference in CPU seconds within a turn. By then the budget has planned again from measured times.

With `--large` the same networks get batches as people train with. Activations then outweigh
gradients and what a single operation needs by so much that 30, 20 and 15 % can be reached too.
`--more` plans for the networks of `more_models.py`. `--longer` gives the annealing as many times
the usual work, as the search beside training does for steps that take long. `--instructions` plans
with the workspaces that oneDNN takes on another CPU.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable

import torch
from torch import nn

import lowtide
from lowtide import _compat, engine
from lowtide.plans import Plan, plan_step
from models import (
    WORKLOADS,
    Batch,
    Workload,
    added,
    arguments,
    dice_loss,
    images,
    learn,
    measured_peak,
    mebibytes,
    of_type,
    results,
    timed_step,
    volumes,
)
from more_models import MORE

SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15)


def swin() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels=1, out_channels=3, feature_size=24, spatial_dims=3)


NETWORKS = {
    **WORKLOADS,
    "swinunetr": Workload(
        "swinunetr",
        swin,
        lambda: volumes(64, torch.float32),
        dice_loss,
        of_type("SwinTransformerBlock"),
    ),
}

LARGE: dict[str, Callable[[], Batch]] = {
    "unet3d": lambda: volumes(96, torch.float32, 2),
    "unet3d-res2": lambda: volumes(96, torch.float32, 2),
    "densenet121": lambda: images(32, 224),
    "resnet50": lambda: images(32, 224),
    "gpt2": lambda: many(WORKLOADS["gpt2"].batch()),
    "vit": lambda: many(WORKLOADS["vit"].batch()),
    "swinunetr": lambda: volumes(96, torch.float32, 2),
}


def many(batch: Batch) -> Batch:
    """Sixteen times as many examples."""
    return tuple(part.repeat(16, *(1,) * (part.dim() - 1)) for part in batch)


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--models", nargs="+", choices=[*NETWORKS, *MORE])
    parser.add_argument("--shares", nargs="+", type=float, help="limits, as parts of the peak")
    parser.add_argument("--measure", action="store_true", help="also run each plan")
    parser.add_argument("--large", action="store_true", help="batches as people train with")
    parser.add_argument("--more", action="store_true", help="the networks of more_models.py")
    parser.add_argument("--longer", type=int, default=1, help="times the usual annealing")
    parser.add_argument("--instructions", choices=["AVX512", "AVX2"], help="of the CPU planned for")
    options = parser.parse_args()
    if options.instructions:
        if options.measure:
            parser.error("--measure runs on this CPU: leave --instructions out")
        _compat.onednn_instructions = lambda: options.instructions
    anneal = engine.annealing
    engine.annealing = lambda times=options.longer: anneal(times)
    rounds = 0 if not options.measure else 3 if options.large else 5 if options.quick else 15
    shares = options.shares or (SHARES[::3] if options.quick else SHARES)
    with results(options) as rows:
        print(
            "| network | limit | limit, MiB | peak: predicted | measured | off by "
            "| overhead: predicted | at least | gap | measured | seconds to plan |\n"
            + "|---" * 11
            + "|"
        )
        for name in options.models or (MORE if options.more else NETWORKS):
            work = {**NETWORKS, **MORE}[name]
            if options.large:
                work = dataclasses.replace(work, batch=LARGE[name])
            model, batch = work.make(), work.batch()
            lowtide.plan(lambda b, w=work, m=model: w.loss(m, b), batch)  # imports
            began = time.process_time()
            plain = lowtide.plan(lambda b, w=work, m=model: w.loss(m, b), batch)
            spent = time.process_time() - began
            peak = 0
            for _ in range(2 if rounds else 0):  # the first may allocate workspaces that stay
                peak = measured_peak(work, copy.deepcopy(model))
            print(
                f"| {name} | plain | | {mebibytes(plain.peak)} | {mebibytes(peak or None)} "
                f"| {off(plain.peak, peak)} | | | | | {spent:.2f} (dry run, "
                f"{len(plain.operations)} operations) |"
            )
            rows.append({"model": name, "plain": plain.peak, "measured": peak, "dry": spent})
            floor = plain.minimum_peak
            limits = [(f"{s:.0%}", int(s * plain.peak)) for s in shares]
            met = [pair for pair in limits if pair[1] > floor]
            for label, limit in [*met, (f"minimum, {floor / plain.peak:.0%}", floor)]:
                row = one_limit(work, model, batch, plain, limit, rounds)
                rows.append({"model": name, "limit": limit, **row})
                print(line(name, label, limit, row), flush=True)


def one_limit(
    work: Workload, model: nn.Module, batch: Batch, plain: Plan, limit: int, rounds: int
) -> dict[str, float | int | None]:
    began = time.process_time()
    plan = plan_step(plain.step, limit)
    row: dict[str, float | int | None] = {
        "solve": time.process_time() - began,
        "peak": plan.peak,
        "overhead": plan.overhead,
        "bound": plan.lower_bound,
        "gap": plan.gap,
        "measured_peak": None,
        "measured_overhead": None,
    }
    if rounds:
        net, budget = copy.deepcopy(model), lowtide.budget(plan)
        try:
            row["measured_peak"] = measured_peak(work, net, budget)
            budgeted = timed_step(work, net, batch, budget)
            learn(budgeted)
            plain_step = timed_step(work, net, batch)
            row["measured_overhead"] = added(budgeted, plain_step, rounds)
        except lowtide.BudgetError as error:  # the measured step does not fit after all
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
