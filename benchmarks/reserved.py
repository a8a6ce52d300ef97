"""What CUDA's allocator would reserve for steps with and without a limit.

    PYTHONPATH=src:. python benchmarks/reserved.py

The emulated accelerator of the tests records what each step allocates, in order; simulated
allocators replay it. Sizes are multiplied, as a batch that is as much larger would. For each run:
the bytes allocated, and how many times that is reserved by default, with `expandable_segments`, and
when the process may have no more (`torch.cuda.set_per_process_memory_fraction`), so that the
allocator gives back what is free: the smallest such cap that suffices.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from tests import accelerator

import lowtide
from caching import Caching, Expandable, least, replay
from models import WORKLOADS, Batch, Workload, arguments, mebibytes, results, settle, train_step

Events = list[tuple[int, int]]


def train(
    work: Workload, core: Any, steps: int, batch: Batch, budget: lowtide.Budget | None
) -> Events:
    """The events of a training with momentum, from the model on."""
    gc.collect()
    core.allocations()
    model = work.make().to(accelerator.NAME)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    for _ in range(steps):
        train_step(work, model, on_device(batch), budget)
        optimizer.step()
        optimizer.zero_grad()
        core.settle()
        settle()
    return [tuple(event) for event in core.allocations()]


def on_device(batch: Batch) -> Batch:
    return tuple(part.to(accelerator.NAME) for part in batch)


def plain_peak(work: Workload, core: Any, batch: Batch) -> int:
    model = work.make().to(accelerator.NAME)
    given = on_device(batch)
    train_step(work, model, given)
    model.zero_grad()
    core.settle()
    return lowtide.measure(lambda: train_step(work, model, given)).peak_bytes


def figures(events: Events, times: int) -> dict[str, float]:
    events = [(address, times * nbytes) for address, nbytes in events]
    usual, growing = Caching(), Expandable()
    replay(events, usual)
    replay(events, growing)
    capped = least(events, 2 * usual.most_reserved)
    most = usual.most_allocated
    assert capped.capacity is not None
    return {
        "allocated": most,
        "default": usual.most_reserved / most,
        "expandable": growing.most_reserved / most,
        "capped": capped.capacity / most,
        "given back": capped.retries,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.8, 0.6])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--times", type=int, default=16, help="how often the bytes of each size")
    options = parser.parse_args()
    core = accelerator.install()
    with results(options) as rows:
        print(
            "| network | steps | allocated, MiB | reserved | expandable segments | smallest cap "
            "| gave back, times |\n" + "|---" * 7 + "|"
        )
        for name in options.models:
            work = WORKLOADS[name]
            batch = work.batch()
            peak = plain_peak(work, core, batch)
            for share in (None, *options.shares):
                said = "plain" if share is None else f"{share:.0%}"
                budget = None if share is None else lowtide.budget(int(share * peak))
                try:
                    events = train(work, core, options.steps, batch, budget)
                except lowtide.BudgetError as error:
                    print(f"| {name} | {said} | refused: {mebibytes(error.minimum)} |" + " |" * 4)
                    continue
                found = figures(events, options.times)
                rows.append({"model": name, "share": share, **found})
                ratios = [f"{found[key]:.2f}" for key in ("default", "expandable", "capped")]
                cells = [name, said, mebibytes(int(found["allocated"])), *ratios]
                print("| " + " | ".join(cells) + f" | {found['given back']} |", flush=True)


if __name__ == "__main__":
    main()
