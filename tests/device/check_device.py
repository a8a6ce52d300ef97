"""Every check and benchmark that needs a device, in one call within ten minutes:

    python tests/device/check_device.py --output results.json --markdown results.md

It uses the current device of `torch.accelerator` (CUDA, ROCm, XPU, ...), prints a line for each
check and a table for each benchmark, and exits with 1 if a check fails or a limit is exceeded;
without a device it says so and exits with 0. `--markdown` writes the section for docs/results.md.
With `--emulated --quick` it runs on the tests' emulated device, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic
if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[2] / "src"),
                    str(Path(__file__).resolve().parents[1])]  # fmt: skip

import torch

from device import benchmarks, checks, libraries, longer, place, report
from device.place import Place, Skipped
from device.report import Checked, Report, say
from lowtide import engine


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, so that bits can be compared; not for benchmarks, as it is slow."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def outcome(run: Callable[[], str]) -> tuple[str, str]:
    """The verdict and a text; any error is a failure, and its traceback is printed."""
    try:
        return "ok", run()
    except Skipped as reason:
        return "skipped", str(reason)
    except AssertionError as error:
        return "FAILED", str(error)
    except Exception as error:
        traceback.print_exc()
        return "FAILED", f"{type(error).__name__}: {error}"


def every_check() -> dict[str, checks.Check]:
    """All checks by name, in the order in which they run."""
    return {**checks.all_checks(), **libraries.all_checks(), **longer.all_checks()}


def run_checks(where: Place, found: Report, recorders: Sequence[str], only: Sequence[str]) -> None:
    """Run the checks on each recorder."""
    for recorder in recorders:
        for name, check in every_check().items():
            if not any(part in name for part in only):
                continue
            began = time.monotonic()
            exact = checks.needs_determinism(name)
            with engine.use(recorder), deterministic() if exact else contextlib.nullcontext():
                verdict, says = outcome(lambda check=check: check(where))
            found.checked(Checked(name, recorder, verdict, says, time.monotonic() - began))
            if verdict == "FAILED":
                place.fresh(where)  # free what a traceback held, so that no later check sees that


def run_benchmarks(
    where: Place, found: Report, only: Sequence[str], save: Callable[[], None]
) -> None:
    """Run the benchmarks; the time that is left is divided among those that are left."""
    left = {
        name: run
        for name, run in benchmarks.all_benchmarks().items()
        if any(part in name for part in only)
    }
    for number, (name, run) in enumerate(left.items()):
        seconds = where.left() / (len(left) - number)
        if seconds <= 0:
            found.skipped[name] = "no time was left"
            say(f"skipped benchmark {name}: no time was left")
            continue
        try:
            began = time.monotonic()
            row = run(where, seconds)
            row["seconds"] = time.monotonic() - began
        except Skipped as reason:
            found.skipped[name] = str(reason)
            say(f"skipped benchmark {name}: {reason}")
            continue
        except Exception as error:
            traceback.print_exc()
            says = f"{type(error).__name__}: {error}"
            found.checked(Checked(f"benchmark {name}", engine.name(), "FAILED", says))
            continue
        finally:
            place.fresh(where)
            save()
        found.benchmarks.append(row)
        if row["table"] == "steps":
            wrong = benchmarks.over(row)
            says = "; ".join(wrong) or "no step is above its limit"
            verdict = "FAILED" if wrong else "ok"
            found.checked(Checked(f"limits: {row['of']}", engine.name(), verdict, says))
        say("\n".join(["", *report.TABLES[row["table"]](row), ""]))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that it runs")
    parser.add_argument("--minutes", type=float, default=9, help="no benchmark is begun after that")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="checks and benchmarks whose names contain one of these",
    )
    parser.add_argument("--recorders", nargs="+", help="of the checks; default: all there are")
    parser.add_argument("--output", type=Path, help="write everything to this file, as JSON")
    parser.add_argument("--markdown", type=Path, help="write a block for the docs to this file")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device")
    options = parser.parse_args(given)
    if options.emulated:
        from accelerator import install

        install()
    where = place.find(options.quick, options.minutes)
    if where is None:
        say("check_device.py needs an accelerator; this machine has none: nothing was checked.")
        return 0
    began = time.monotonic()
    torch.backends.cudnn.benchmark = False
    found = Report(
        device=place.name(where),
        date=datetime.date.today().isoformat(),
        quick=options.quick,
        versions=place.versions(where),
    )
    say(f"{found.device}, {', '.join(f'{k} {v}' for k, v in found.versions.items())}")
    recorders = benchmarks.recorders()

    def save() -> None:  # after each benchmark, in case a time limit ends the process
        found.seconds = time.monotonic() - began
        if options.output is not None:
            found.write_json(options.output)
        if options.markdown is not None:
            found.write_markdown(options.markdown)

    run_checks(where, found, options.recorders or recorders, options.only)
    save()
    with engine.use(recorders[-1]):
        run_benchmarks(where, found, options.only, save)
    save()
    for one in found.failed():
        say(f"failed: {one.recorder} recorder, {one.name}: {one.says}")
    say(f"{found.summary()}; {found.seconds:.0f} s")
    return 1 if found.failed() else 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not `sys.exit`: if autograd's device thread still frees something while the interpreter shuts
    # down, the process aborts, and its exit code would not be that of the checks.
    os._exit(code)
