"""Compare many random programs, in a run of its own.

    python -m tests.fuzz.run --examples 10000 --seed 1 --method checkpoint

Programs are drawn by hypothesis in batches. Each failure is shrunk, and printed as Python code to
be pasted, with the verdict on it; the run goes on until --max-failures. The exit status is 1 if
there was a failure. Imports the rest of this package.

Rejected: raising at the first failure, as the tests do. A long run should return all it found.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .driver import BUDGETED, FRACTIONS, METHODS, compare
from .programs import load, programs
from .source import Program, paste
from .verdict import FAILURES, KINDS, Verdict

BATCH = 250


class Different(AssertionError):
    """One class for each kind of failure, so that shrinking does not slip from one to another."""


class Refused(AssertionError):
    """Plain runs, lowtide raises."""


class Accepted(AssertionError):
    """Plain raises, lowtide does not."""


class Leaked(AssertionError):
    """Something outlives the step."""


class Exceeded(AssertionError):
    """The budget was not kept."""


ERRORS: dict[str, type[AssertionError]] = {
    "different": Different,
    "refused": Refused,
    "accepted": Accepted,
    "leaked": Leaked,
    "exceeded": Exceeded,
}


def check(program: Program, method: str, fraction: float, *, peaks: bool = False) -> Verdict:
    """Compare one program; raise, with its reproduction as the text, if the verdict is bad."""
    verdict = compare(load(program), method, fraction=fraction, peaks=peaks)
    if verdict.bad:
        text = f"{verdict.kind} ({KINDS[verdict.kind]})\n{verdict.detail}\n\n"
        raise ERRORS[verdict.kind](text + paste(program, method, fraction))
    return verdict


@dataclass
class Tally:
    """Counts of one run."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    traits: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    watched: int = 0
    freed: list[int] = field(default_factory=lambda: [0, 0])
    failures: list[str] = field(default_factory=list)
    causes: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.perf_counter)

    @property
    def total(self) -> int:
        return self.kinds.total()

    def add(self, program: Program, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        self.traits.update(program.traits)
        self.lines += program.size
        self.watched += verdict.watched
        self.freed = [a + b for a, b in zip(self.freed, verdict.freed, strict=True)]
        if verdict.kind in ("raised", "lenient", "stale", "unseen", "unstable"):
            self.reasons[f"{verdict.kind}: {verdict.detail[:90]}"] += 1

    def line(self, wanted: int) -> str:
        rate = self.total / (time.perf_counter() - self.started)
        kinds = ", ".join(f"{kind} {self.kinds[kind]}" for kind in KINDS if self.kinds[kind])
        return f"{self.total}/{wanted} programs, {rate:.0f} a second: {kinds}"

    def summary(self, wanted: int) -> str:
        n = max(self.total, 1)
        invalid = self.kinds["raised"] + self.kinds["lenient"] + self.kinds["accepted"]
        lines = [self.line(wanted), f"  {self.lines / n:.1f} lines a program on average"]
        lines.append(f"  {100 * invalid / n:.1f} % raise in plain PyTorch")
        lines.append(
            f"  {self.watched} tensors watched inside regions; freed when forward ends: "
            f"plain {self.freed[0]}, compared {self.freed[1]}"
        )
        lines += [f"  {count:6} with {trait}" for trait, count in self.traits.most_common()]
        lines += [f"  {count:6} {reason}" for reason, count in self.reasons.most_common(8)]
        return "\n".join(lines)


def cause(error: AssertionError) -> str | None:
    """What tells two refusals apart; other failures are told apart by looking at them."""
    if not isinstance(error, Refused | Accepted):
        return None
    detail = str(error).split("\n")[1]
    return type(error).__name__ + re.sub(r"[\d.]+", "", detail)[:60]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def batch(
    number: int, size: int, tally: Tally, methods: list[str], options: argparse.Namespace
) -> None:
    """Draw `size` programs; what fails is shrunk and added to the tally's failures."""
    failed = False

    @seed(number)
    @settings(
        max_examples=size,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if not options.no_shrink else [Phase.generate],
        report_multiple_bugs=True,
        print_blob=False,
    )
    @given(programs(), st.sampled_from(methods), st.sampled_from(FRACTIONS))
    def draw(program: Program, method: str, fraction: float) -> None:
        nonlocal failed
        if program.traits & set(options.without):
            return
        if options.trail is not None:
            options.trail.write_text(paste(program, method, fraction))
        try:
            verdict = check(program, method, fraction, peaks=options.peaks)
        except AssertionError as error:
            if not failed:
                tally.kinds[next(k for k, e in ERRORS.items() if type(error) is e)] += 1
            if cause(error) in tally.causes:
                return
            failed = True  # from here on hypothesis repeats and shrinks
            raise
        if not failed:
            tally.add(program, verdict)

    try:
        draw()
    except BaseExceptionGroup as group:
        found = [error for error in group.exceptions if isinstance(error, AssertionError)]
    except AssertionError as error:
        found = [error]
    else:
        found = []
    tally.failures += [str(error) for error in found]
    tally.causes |= {name for error in found if (name := cause(error)) is not None}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", choices=[*METHODS[1:], "all"], default="all")
    parser.add_argument("--max-failures", type=int, default=5)
    parser.add_argument("--no-shrink", action="store_true", help="print failures as drawn")
    parser.add_argument("--without", action="append", default=[], metavar="TRAIT")
    parser.add_argument("--peaks", action="store_true", help="also hold budgets to their limit")
    parser.add_argument("--trail", type=Path, help="write each program here before it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    all_methods = ["checkpoint", "policy", *BUDGETED]
    methods = all_methods if options.method == "all" else [options.method]
    tally, number, drawn = Tally(), 0, 0
    while tally.total < options.examples and drawn < 3 * options.examples:
        size = min(BATCH, options.examples - tally.total)
        drawn += size
        known = len(tally.failures)
        start = options.seed * 1_000_003 + number
        batch(start, size, tally, methods, options)
        number += 1
        for failure in tally.failures[known:]:
            say(f"\n---- failure {len(tally.failures)} ----\n{failure}")
        say(tally.line(options.examples))
        if len(tally.failures) >= options.max_failures:
            say(f"stopped after {len(tally.failures)} failures")
            break
    say(tally.summary(options.examples))
    return 1 if any(tally.kinds[kind] for kind in FAILURES) else 0


if __name__ == "__main__":
    raise SystemExit(main())
