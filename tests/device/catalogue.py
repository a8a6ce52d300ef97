"""The catalogue of models on a device: bits of regions and budgets against the plain step.

    python tests/device/catalogue.py --part 0/4 --seconds 300

Problem: the catalogue was written for the CPU, and on a device other kernels run, some of which are
not deterministic. Invariant: a case is compared only if two plain runs of it on the device agree
and, where lowtide's run differs, two more do and torch has not warned that a kernel is not
deterministic; it is listed if it cannot run there at all; what was not reached is counted. Imports
harness, ways, zoo, place. Rejected: pytest, for which no device is lent long enough.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[2] / "src"),
                    str(Path(__file__).resolve().parents[1])]  # fmt: skip

import torch

from device import place
from device.report import say
from harness import Trace, assert_same, run_steps
from ways import budgeted, whole_step_checkpoint, within
from zoo import CASES
from zoo.case import Case

NO_ORDER = "does not have a deterministic implementation"
AGAIN = 2  # further plain runs where a difference was found
Run = Callable[[], Trace]


def verdict(case: Case, device: str) -> tuple[str, str]:
    """What became of a case: "same", "different", "undetermined" or "cannot run"."""
    plain = functools.partial(run_steps, case, device=device)
    inside = functools.partial(run_steps, case, device=device, penalty_inside=True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            expected = plain()
        assert_same(expected, plain())
    except AssertionError as error:
        return "undetermined", str(error)
    except Exception as error:
        return "cannot run", f"{type(error).__name__}: {error}"
    ways: dict[str, tuple[Run, Run]] = {
        "region": (lambda: plain(whole_step_checkpoint), plain),
        "budget, all kept": (lambda: inside(budgeted(1 << 40)), inside),
        "budget, half": (lambda: within(case, budgeted, 0.5, device), inside),
    }
    for way, (run, without) in ways.items():
        try:
            found = run()
            assert_same(expected, found)
        except AssertionError as error:
            warned = [str(w.message) for w in said if NO_ORDER in str(w.message)]
            try:
                for _ in range(AGAIN):
                    assert_same(expected, without())
            except AssertionError:
                return "undetermined", f"after {way}: {error}"
            if warned:
                return "undetermined", f"{way}: {error}; torch warned: {warned[0]}"
            return "different", f"{way}: {error}"
        except Exception as error:
            return "different", f"{way}: {type(error).__name__}: {error}"
    return "same", ""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--part", default="0/1", help="part I of N of the cases, as I/N")
    parser.add_argument("--seconds", type=float, default=600, help="no case is begun after that")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device")
    options = parser.parse_args(given)
    if options.emulated:
        from accelerator import install

        install()
    where = place.find(quick=True, minutes=options.seconds / 60)
    if where is None:
        say("catalogue.py needs an accelerator; this machine has none: nothing was run.")
        return 0
    at, parts = map(int, options.part.split("/"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    names = [name for name, case in CASES.items() if options.only in name and not case.tags]
    for name in names[at::parts]:
        if where.left() <= 0:
            counts["not reached"] += 1
            continue
        began = time.monotonic()
        what, says = verdict(CASES[name], where.kind)
        counts[what] += 1
        say(f"{what:<12} {name} ({time.monotonic() - began:.1f} s) {says[:300]}".rstrip())
    say(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
