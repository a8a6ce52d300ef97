"""The memory of the process, as Linux counts it, beside the bytes that a limit counts.

    PYTHONPATH=src python benchmarks/resident.py

A limit on the CPU counts what torch allocates. glibc keeps much of what torch frees: at first it
maps each large tensor alone and returns it when it is freed, but every one that is freed raises the
size from which it does so, up to 32 MiB. Tensors below that come from one heap, in whose gaps
others may not fit. Compared are glibc as it is; `MALLOC_MMAP_THRESHOLD_` in the environment, which
fixes that size; and `lowtide.use_cpu_allocator`, with usual and with huge pages.

Which allocator a process has, and what it has come to keep, cannot be undone: each figure is from a
process of its own that trains for some steps, and the rounds run through all of them. Of the steps,
the largest resident size, less what it was before the first one; and the median of their processor
time (the kernel's included, which clears the pages), without those in which lowtide still learns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import lowtide
from models import (
    WORKLOADS,
    arguments,
    markdown,
    measured_peak,
    mebibytes,
    results,
    timed_step,
)

STEPS, LEARNING = 10, 4
WAYS = ("glibc", "setting", "lowtide", "huge pages")


def status(field: str) -> int:
    """Bytes of this process, from /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def train(name: str, limit: int | None, way: str, threads: int) -> tuple[int, float]:
    """The largest resident size of some steps, above that before the first one; and a step's
    processor time."""
    torch.set_num_threads(threads)
    if way in ("lowtide", "huge pages"):
        lowtide.use_cpu_allocator(huge_pages=way == "huge pages")
    work = WORKLOADS[name]
    model, batch = work.make(), work.batch()
    step = timed_step(work, model, batch, None if limit is None else lowtide.budget(limit))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew
    times = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return status("VmHWM") - before, statistics.median(times[LEARNING:])


def in_a_process(name: str, limit: int | None, way: str) -> tuple[int, float]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    if way == "setting":
        env["MALLOC_MMAP_THRESHOLD_"] = str(256 << 10)
    asked = json.dumps([name, limit, way, torch.get_num_threads()])
    told = [sys.executable, __file__, "--train", asked]
    done = subprocess.run(told, env=env, check=True, stdout=subprocess.PIPE, text=True)
    resident, seconds = json.loads(done.stdout.splitlines()[-1])
    return resident, seconds


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--share", type=float, default=0.7, help="the limit / the plain peak (0.7)")
    parser.add_argument("--train", help="for the processes that this one starts")
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(*json.loads(options.train))))
        return
    torch.set_num_threads(options.threads)
    table = []
    with results(options) as rows:
        for name in options.models:
            peak = measured_peak(WORKLOADS[name], WORKLOADS[name].make())
            for kind, limit in (("plain", None), ("lowtide", int(options.share * peak))):
                counted = limit or peak
                rounds = [
                    {way: in_a_process(name, limit, way) for way in WAYS}
                    for _ in range(3 if options.quick else 7)
                ]
                sizes, times = (
                    {way: statistics.median(each[way][part] for each in rounds) for way in WAYS}
                    for part in (0, 1)
                )
                rows.append({
                    "network": name, "run": kind, "counted": counted, "resident": sizes,
                    "seconds": times,
                })  # fmt: skip
                cells = [f"{mebibytes(int(sizes['glibc']))} ({sizes['glibc'] / counted:.2f})"]
                for way in WAYS[1:]:
                    more = times[way] / times["glibc"] - 1
                    share = sizes[way] / counted
                    cells.append(f"{mebibytes(int(sizes[way]))} ({share:.2f}), {more:+.0%}")
                table.append([name, kind, mebibytes(counted), *cells])
        head = ("network", "step", "plain peak or limit, MiB", *WAYS)
        print(markdown(head, table))


if __name__ == "__main__":
    main()
