"""Training on batches of ever new sizes: a budget against per-block checkpointing and plain steps.

Each batch is cut to a random size, like texts that are not padded to one length, or crops of
images. The limit is the peak of per-block checkpointing (`torch.utils.checkpoint`, non-reentrant)
on the largest size. All three train on every batch in turn, in one process; sums of CPU seconds,
including everything that a budget learns and plans, are compared over the first half of the steps
and over the second. Losses are compared bit for bit; every tenth step is run again and measured.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import lowtide
from models import (
    WORKLOADS,
    Batch,
    Workload,
    arguments,
    clear,
    markdown,
    mebibytes,
    results,
    wrap_blocks,
)

GRAINS = {"gpt2": 1, "unet3d": 4}
"""Networks, and the number that their sizes are multiples of."""
_MEASURED = 10  # every such step is measured


def batches(work: Workload, count: int) -> list[Batch]:
    """One batch, its last dimension cut to sizes from an eighth up to all of it."""
    choose, whole, grain = random.Random(0), work.batch(), GRAINS[work.name]
    most = whole[0].shape[-1] // grain
    sizes = [grain * choose.randint(-(-most // 8), most) for _ in range(count)]
    return [
        tuple([part[..., :size].contiguous() if part.dim() > 1 else part for part in whole])
        for size in sizes
    ]


def run(
    work: Workload, model: nn.Module, batch: Batch, limit: lowtide.Budget | None = None
) -> Tensor:
    clear(model)
    torch.manual_seed(0)
    if limit is None:
        loss = work.loss(model, batch)
    else:
        with limit:
            loss = work.loss(model, batch)
    loss.backward()
    return loss.detach()


def compare(work: Workload, steps: int) -> dict[str, object]:
    plain = work.make()
    blocks, budgeted = wrap_blocks(work, copy.deepcopy(plain)), copy.deepcopy(plain)
    every = batches(work, steps)
    largest = max(every, key=lambda batch: batch[0].shape[-1])
    peak = [
        lowtide.measure(partial(run, work, model, largest), device="cpu").peak_bytes
        for model in (plain, blocks)
    ]
    limit = lowtide.budget(peak[1])
    spent: dict[str, list[float]] = {"plain": [], "blocks": [], "lowtide": []}
    worst, planned = 0, 0
    for number, batch in enumerate(every):
        contenders: dict[str, Callable[[], Tensor]] = {
            "plain": partial(run, work, plain, batch),
            "blocks": partial(run, work, blocks, batch),
            "lowtide": partial(run, work, budgeted, batch, limit),
        }
        losses = {}
        for name, step in contenders.items():
            begin = time.process_time()
            losses[name] = step()
            spent[name].append(time.process_time() - begin)
        assert torch.equal(losses["plain"], losses["lowtide"])
        planned += limit.report().planned
        if number % _MEASURED == _MEASURED - 1:
            worst = max(worst, lowtide.measure(contenders["lowtide"], device="cpu").peak_bytes)
    half = steps // 2
    return {
        "model": work.name,
        "sizes": f"{min(b[0].shape[-1] for b in every)} to {largest[0].shape[-1]}",
        "distinct": len({b[0].shape[-1] for b in every}),
        "steps": steps,
        "plain_peak": peak[0],
        "limit": peak[1],
        "largest_peak": worst,
        "planned": planned,
        "first": {name: sum(times[:half]) for name, times in spent.items()},
        "last": {name: sum(times[half:]) for name, times in spent.items()},
    }


def cells(row: dict) -> list[str]:
    def added(part: dict[str, float]) -> list[str]:
        return [
            f"{100 * (part[name] / part['plain'] - 1):+.0f} %" for name in ("blocks", "lowtide")
        ]

    return [
        row["model"],
        f"{row['distinct']}, {row['sizes']}",
        mebibytes(row["plain_peak"]),
        mebibytes(row["limit"]),
        mebibytes(row["largest_peak"]),
        f"{row['planned']} of {row['steps']}",
        *added(row["first"]),
        *added(row["last"]),
    ]


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--models", nargs="+", choices=GRAINS, default=list(GRAINS))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    steps = 40 if options.quick else options.steps
    head = (
        "network",
        "sizes",
        "plain peak of the largest, MiB",
        "per-block peak = limit",
        "largest peak of lowtide",
        "steps planned",
        "first half: per-block",
        "lowtide",
        "second half: per-block",
        "lowtide",
    )
    with results(options) as rows:
        print(markdown(head, []), flush=True)
        for name in options.models:
            rows.append(compare(WORKLOADS[name], steps))
            print("| " + " | ".join(cells(rows[-1])) + " |", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
