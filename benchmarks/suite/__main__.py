"""Run the suite: `python -m benchmarks.suite --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lowtide import engine

from . import __doc__ as about
from .cases import CASES, SIZES, Case, case_of, missing
from .contest import Contest
from .largest import Fit, Search
from .pictures import draw
from .summary import Duel, as_data, duel_table, duels, fit_table, row_table

FRONTIER = (0.9, 0.75, 0.6, 0.45, 0.3)
SLOW = ("swin_unetr",)
BUDGETS = (1.0, 0.5, 0.2)
LARGEST = ("gpt2", "unet3d")


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description=(about or "").partition("\n")[0]
    )
    parser.add_argument("--size", choices=SIZES, help="default: cpu; tiny with --quick")
    parser.add_argument("--quick", action="store_true", help="tiny networks, rough figures")
    parser.add_argument(
        "--models", nargs="+", choices=CASES, help=f"default: all; with --quick not {SLOW[0]}"
    )
    parser.add_argument(
        "--compile",
        nargs="*",
        choices=CASES,
        help="where torch.compile's budgets run too: a minute a budget. Default: gpt2; none "
        "with --quick",
    )
    parser.add_argument(
        "--largest", nargs="*", choices=CASES, help="where the largest batch is looked for"
    )
    parser.add_argument("--rounds", type=int, help="timed steps of each method")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("output/suite"))
    found = parser.parse_args(given)
    found.size = found.size or ("tiny" if found.quick else "cpu")
    found.rounds = found.rounds or (3 if found.quick else 5)
    found.models = found.models or [n for n in CASES if not (found.quick and n in SLOW)]
    found.shares = FRONTIER[::2] if found.quick else FRONTIER
    if found.compile is None:
        found.compile = [] if found.quick else ["gpt2"]
    if found.largest is None:
        found.largest = [] if found.quick else LARGEST
    found.largest = [name for name in found.largest if name in found.models]
    return found


def device_of(size: str) -> torch.device:
    if size != "gpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--size gpu needs a CUDA device, and there is none here.")
    # Bits can be compared only if the device itself is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # it has no deterministic backward
    return torch.device("cuda", torch.cuda.current_device())


def smaller(case: Case) -> str:
    """The size to use where several batches are tried."""
    return "tiny" if case.name == "unet3d" else "cpu"


class Report:
    """The results file, rewritten after each network, so an interrupted run leaves its rows."""

    def __init__(self, chosen: argparse.Namespace, device: torch.device) -> None:
        self.out: Path = chosen.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.duels: list[tuple[str, Duel]] = []
        self.fits: list[tuple[str, Fit]] = []
        self.failed: list[str] = []
        self.data: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "engine": engine.name(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "size": chosen.size,
            "threads": chosen.threads,
            "rounds": chosen.rounds,
            "models": {},
            "largest": {},
        }

    def save(self) -> None:
        (self.out / "suite.json").write_text(json.dumps(self.data, indent=1) + "\n")


def run(chosen: argparse.Namespace) -> Report:
    torch.set_num_threads(chosen.threads)
    device = device_of(chosen.size)
    report = Report(chosen, device)
    print(f"torch {torch.__version__}, {chosen.threads} threads, load {os.getloadavg()[0]:.1f}")
    for name in chosen.models:
        why = missing(name)
        if why is not None:
            report.data["models"][name] = {"missing": why}
            print(f"\n## {name}\n\nleft out: {why}", flush=True)
            continue
        case, began = case_of(name, chosen.size), time.perf_counter()
        budgets = BUDGETS if name in chosen.compile else ()
        try:
            rows = Contest(case, device).run(chosen.shares, budgets, chosen.rounds)
        except Exception as error:  # the other networks still run
            traceback.print_exc()
            report.data["models"][name] = {"failed": f"{type(error).__name__}: {error}"}
            report.failed.append(name)
            continue
        print(f"\n## {case.title}\n\n{row_table(rows)}", flush=True)
        print(f"\n{time.perf_counter() - began:.0f} s", flush=True)
        report.data["models"][name] = as_data(case.title, rows)
        report.duels += [(name, duel) for duel in duels(rows)]
        draw(case.title, rows, chosen.out / f"{name}.svg")
        report.save()
    for name in chosen.largest:
        size = chosen.size if chosen.size == "gpu" else smaller(case_of(name, chosen.size))
        case = case_of(name, size)
        fits = Search(case, device).run(max(3, chosen.rounds // 2))
        report.fits += [(case.title, fit) for fit in fits]
        report.data["largest"][name] = {"title": case.title, "fits": [asdict(f) for f in fits]}
        report.save()
    return report


def main(given: Sequence[str] | None = None) -> None:
    began = time.perf_counter()
    report = run(options(given))
    report.save()
    print(f"\n## lowtide at each peer's peak\n\n{duel_table(report.duels)}")
    if report.fits:
        print(f"\n## Largest batch in a given memory\n\n{fit_table(report.fits)}")
    spent = time.perf_counter() - began
    print(f"\n{spent:.0f} s, load at the end {os.getloadavg()[0]:.1f}; {report.out}/suite.json")
    if report.failed:
        sys.exit(f"failed: {', '.join(report.failed)}")


if __name__ == "__main__":
    main()
