"""The memory of the process, as Linux counts it, beside the bytes that a limit counts.

    PYTHONPATH=src python benchmarks/resident.py

A limit on the CPU counts what torch allocates. glibc keeps much of what torch frees: at first it
maps each large tensor alone and returns it when it is freed, but every one that is freed raises the
size from which it does so, up to 32 MiB. Tensors below that come from one heap, in whose gaps
others may not fit. `MALLOC_MMAP_THRESHOLD_` in the environment fixes that size.

Each figure is from a process of its own, that trains for some steps: the largest resident size,
less what it was before the first one. What the setting costs in time is measured in one process,
which switches between it and the state that glibc comes to by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
)

STEPS = 8
FIXED = 256 << 10
# Numbers of glibc's <malloc.h>; the values that its own adjustment ends with, and ours.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
SETTINGS = {
    "by itself": {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20},
    "fixed": {MMAP_THRESHOLD: FIXED, TRIM_THRESHOLD: 128 << 10},
}


def status(field: str) -> int:
    """Bytes of this process, from /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def train(name: str, limit: int | None, threads: int) -> int:
    """The largest resident size of some steps, above that before the first one."""
    torch.set_num_threads(threads)
    work = WORKLOADS[name]
    model, batch = work.make(), work.batch()
    step = timed_step(work, model, batch, None if limit is None else lowtide.budget(limit))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew
    for _ in range(STEPS):
        step()
    return status("VmHWM") - before


def in_a_process(name: str, limit: int | None, *, fixed: bool) -> int:
    env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    if fixed:
        env["MALLOC_MMAP_THRESHOLD_"] = str(FIXED)
    told = [sys.executable, __file__, "--train", json.dumps([name, limit, torch.get_num_threads()])]
    done = subprocess.run(told, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.splitlines()[-1])


def seconds(work: Workload, limit: int, rounds: int) -> dict[str, float]:
    """Of a step under the limit, and of a plain one, with each setting."""
    mallopt = ctypes.CDLL(None).mallopt
    model, batch = work.make(), work.batch()
    steps = {
        "plain": timed_step(work, model, batch),
        "lowtide": timed_step(work, model, batch, lowtide.budget(limit)),
    }
    learn(steps["lowtide"])

    def under(setting: str, step: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for number, value in SETTINGS[setting].items():
                assert mallopt(number, value) == 1
            step()

        return run

    contenders = {f"{n} {s}": under(s, step) for s in SETTINGS for n, step in steps.items()}
    return interleave(contenders, rounds)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--share", type=float, default=0.7, help="the limit / the plain peak (0.7)")
    parser.add_argument("--train", help="for the processes that this one starts")
    options = parser.parse_args()
    if options.train:
        print(train(*json.loads(options.train)))
        return
    table = []
    with results(options) as rows:
        for name in options.models:
            work = WORKLOADS[name]
            peak = measured_peak(work, work.make())
            limit = int(options.share * peak)
            spent = seconds(work, limit, 3 if options.quick else 9)
            for kind, most in (("plain", None), ("lowtide", limit)):
                resident = [in_a_process(name, most, fixed=fixed) for fixed in (False, True)]
                added = spent[f"{kind} fixed"] / spent[f"{kind} by itself"] - 1
                counted = peak if most is None else most
                rows.append({
                    "network": name, "run": kind, "counted": counted, "resident": resident,
                    "added": added,
                })  # fmt: skip
                shares = [f"{mebibytes(size)} ({size / counted:.2f})" for size in resident]
                table.append([name, kind, mebibytes(counted), *shares, f"{added:+.1%}"])
        head = (
            "network", "step", "plain peak or limit, MiB", "resident", "with the setting",
            "time it adds",
        )  # fmt: skip
        print(markdown(head, table))


if __name__ == "__main__":
    main()
