"""The largest batch that `lowtide.largest_batch` names, run: whether it fits, and what it costs.

The limit is what the networks' batches of `models.py`, twice as large, take in a plain step. The
sizes are found from fake tensors. Then real steps are run: the plain one at the largest plain size
and one above it, and those of a budget that is given the plan at a size halfway and at the largest.
Peaks are measured allocation by allocation; the time of a sample is the median of steps in turns.
All run on lowtide's allocator: with glibc's, tensors as large as those of large batches come from
fresh pages each time, which makes a sample of theirs slower in plain steps too.
"""

from __future__ import annotations

from functools import partial

import torch

import lowtide
from models import (
    WORKLOADS,
    Batch,
    Workload,
    arguments,
    clear,
    interleave,
    learn,
    markdown,
    mebibytes,
    results,
    timed_step,
    train_step,
)

_TIMES = 2


def batch_of(work: Workload, size: int) -> Batch:
    """So many samples: those of the network's batch, over and over."""
    parts = work.batch()
    return tuple(part[torch.arange(size) % len(part)] for part in parts)


def peak_of(
    work: Workload, size: int, limit: lowtide.Budget | None = None, steps: int = 1
) -> list[int]:
    model, batch, found = work.make(), batch_of(work, size), []
    for _ in range(steps):
        clear(model)
        step = partial(train_step, work, model, batch, limit)
        found.append(lowtide.measure(step, device="cpu").peak_bytes)
    return found


def study(work: Workload, rounds: int) -> dict[str, object]:
    base = len(work.batch()[0])
    (limit,) = peak_of(work, _TIMES * base)
    model = work.make()
    found = lowtide.largest_batch(
        lambda *batch: work.loss(model, batch), partial(batch_of, work), limit
    )
    middle = found.sizes[len(found.sizes) // 2].size
    plans = {
        middle: lowtide.plan(work.loss, model, batch_of(work, middle), limit=limit),
        found.size: found.plan,
    }
    steps = {found.plain_size: timed_step(work, model, batch_of(work, found.plain_size))}
    for size, plan in plans.items():
        steps[size] = timed_step(work, model, batch_of(work, size), lowtide.budget(plan))
        learn(steps[size])
    spent = interleave({str(size): step for size, step in steps.items()}, rounds)
    return {
        "network": work.name,
        "limit": limit,
        "plain_size": found.plain_size,
        "plain_peaks": [peak_of(work, found.plain_size + more)[0] for more in (0, 1)],
        "sizes": list(plans),
        "predicted": [plan.peak for plan in plans.values()],
        "peaks": [peak_of(work, size, lowtide.budget(plan), 3) for size, plan in plans.items()],
        "added": [
            spent[str(size)] / size / (spent[str(found.plain_size)] / found.plain_size) - 1
            for size in plans
        ],
        "predicted_added": [
            found.sizes[0].samples_per_second * plan.step.seconds * (1 + plan.overhead) / size - 1
            for size, plan in plans.items()
        ],
    }


def cells(row: dict) -> list[list[str]]:
    plain = [row["network"], mebibytes(row["limit"]), str(row["plain_size"]), "nothing recomputed"]
    below, above = map(mebibytes, row["plain_peaks"])
    lines = [[*plain, "", f"{below}; {above} with one more", "", ""]]
    for index, size in enumerate(row["sizes"]):
        peaks = " ".join(map(mebibytes, row["peaks"][index]))
        times = (f"{100 * row[name][index]:+.0f} %" for name in ("predicted_added", "added"))
        last = "the largest" if index else "halfway"
        lines.append(["", "", str(size), last, mebibytes(row["predicted"][index]), peaks, *times])
    return lines


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    lowtide.use_cpu_allocator()
    head = (
        *("network", "limit, MiB", "samples", "", "peak, predicted", "measured, steps 1 to 3"),
        *("time of a sample, predicted", "measured"),
    )
    with results(options) as rows:
        print(markdown(head, []), flush=True)
        for name in options.models:
            rows.append(study(WORKLOADS[name], 3 if options.quick else 7))
            for line in cells(rows[-1]):
                print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
