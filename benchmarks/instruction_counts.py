"""Instructions of one checkpointed call on tiny tensors: plain, torch's non-reentrant, lowtide.

The calls of `call_overhead.py`, counted by valgrind's callgrind, which has to be installed. Counts
do not depend on what else runs on the machine, and repeat to a per mille; they say nothing of
caches. Each contender runs in a process of its own, about half a minute each.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from call_overhead import cases, contenders
from models import markdown

_CALLS = 10


def counted(case: str, name: str) -> None:
    """In the process under callgrind: warm up, then count this many calls."""
    module, x = cases()[case]
    contenders(module, x, 12)[name]()
    run = contenders(module, x, _CALLS)[name]
    gc.collect()
    gc.disable()
    control = ["callgrind_control", "-i"]
    subprocess.run([*control, "on", str(os.getpid())], check=True, stdout=subprocess.DEVNULL)
    run()
    subprocess.run([*control, "off", str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def instructions(case: str, name: str) -> float:
    """Instructions of one call, forward and backward."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={Path(folder) / 'out'}", sys.executable, __file__]
        command += ["--one", case, name]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread)
    found = re.search(r"refs:\s+([\d,]+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", "")) / _CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--one", nargs=2, metavar=("CASE", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        counted(*options.one)
        return
    table = []
    for case, (module, x) in cases().items():
        found = {name: instructions(case, name) for name in contenders(module, x, 1)}
        cells = [f"{count / 1e6:.2f}" for count in found.values()]
        table.append([case, *cells, f"{found['lowtide'] / found['torch']:.2f}"])
    head = ("millions of instructions", "plain", "forward twice", "torch", "lowtide")
    print(markdown((*head, "lowtide / torch"), table))


if __name__ == "__main__":
    main()
