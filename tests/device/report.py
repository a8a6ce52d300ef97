"""The results: as lines during the run, as JSON, and as a block of markdown for the docs.

Problem: a run on a lent device happens once, and its results must reach the docs unchanged.
Invariant: the block is made from the same values as the JSON, names card, date and versions, and
lists what failed, what was refused and what was skipped before any figures. Imports nothing of
lowtide. Rejected: figures copied by hand.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
Row = dict[str, Any]


@dataclass
class Checked:
    """One check on one recorder; the verdict is "ok", "FAILED" or "skipped"."""

    name: str
    recorder: str
    verdict: str
    says: str
    seconds: float = 0.0


@dataclass
class Report:
    device: str
    date: str
    quick: bool
    versions: dict[str, str]
    checks: list[Checked] = field(default_factory=list)
    benchmarks: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Benchmarks that were not run, and why."""
    seconds: float = 0.0

    def checked(self, one: Checked) -> None:
        self.checks.append(one)
        say(f"{one.verdict:<7} {one.recorder:<8} {one.name:<48} {one.says}")

    def failed(self) -> list[Checked]:
        return [one for one in self.checks if one.verdict == "FAILED"]

    def summary(self) -> str:
        counts = Counter(one.verdict for one in self.checks)
        return (
            f"{counts['ok']} of {len(self.checks)} checks passed, {counts['FAILED']} failed, "
            f"{counts['skipped']} were skipped"
        )

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def write_markdown(self, path: Path) -> None:
        path.write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        quick = (
            " Tiny sizes (`--quick`): the figures say that it runs, no more." if self.quick else ""
        )
        lines = [f"### {self.device}, {self.date}", ""]
        lines += [f"{versions}. {self.summary()}, in {self.seconds:.0f} s.{quick}", ""]
        lines += [
            f"- **Failed**, {one.recorder} recorder: {one.name}: {one.says}"
            for one in self.failed()
        ]
        why: dict[str, list[str]] = {}
        for one in self.checks:
            if one.verdict == "skipped":
                why.setdefault(one.says, []).append(one.name)
        for name, reason in self.skipped.items():
            why.setdefault(reason, []).append(f"benchmark {name}")
        lines += [
            f"- Skipped, as {reason}: {'; '.join(dict.fromkeys(names))}."
            for reason, names in why.items()
        ]
        for bench in self.benchmarks:
            lines += ["", *TABLES[bench["table"]](bench)]
        return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# ------------------------------------------------------------------------------ tables


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"**{title}**", "", *("| " + " | ".join(line) + " |" for line in lines)]


def mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / MIB:.1f}"


def between(row: Row, unit: float) -> str:
    """A median with its quartiles."""
    if "median" not in row:
        return ""
    low, high = row["first quartile"] / unit, row["third quartile"] / unit
    return f"{row['median'] / unit:.1f} ({low:.1f} to {high:.1f})"


def of_steps(bench: Row) -> list[str]:
    head = (
        "a step", "limit, MiB", "peak, MiB", "planned, MiB", "ms, median (quartiles)", "of plain",
        "rounds",
    )  # fmt: skip
    rows = []
    for name, row in bench["rows"].items():
        peak = mebibytes(row["peak"])
        if row["peak"] is not None and row["peak"] > row.get("limit", row["peak"]):
            peak += " **over**"
        if "refused" in row:
            peak = f"refused, at least {mebibytes(row['refused'])}"
        rows.append([
            name, mebibytes(row.get("limit")), peak, mebibytes(row.get("planned")),
            between(row, 1e-3), f"{row['of plain']:.2f}" if "of plain" in row else "",
            str(row.get("rounds", "")),
        ])  # fmt: skip
    return table(bench["of"], head, rows)


def of_allocator(bench: Row) -> list[str]:
    head = (
        "allocator", "steps", "allocated at most, MiB", "reserved at most, MiB",
        "reserved / allocated", "retries", "out of memory",
    )  # fmt: skip
    rows = []
    for name, row in bench["rows"].items():
        if "allocated" not in row:
            reason = row.get("skipped") or row.get("out of memory")
            reason = reason or f"refused, at least {mebibytes(row['refused'])}"
            rows.append([name, reason, "", "", "", "", ""])
            continue
        rows.append([
            name, str(row["steps"]), mebibytes(row["allocated"]), mebibytes(row["reserved"]),
            f"{row['reserved'] / row['allocated']:.2f}", str(row["retries"]), str(row["ooms"]),
        ])  # fmt: skip
    return table(f"{bench['of']}, with SGD", head, rows)


def of_tiny(bench: Row) -> list[str]:
    ways = list(dict.fromkeys(way for row in bench["rows"].values() for way in row))
    rows = [
        [name, *(between(row[way], 1e-6) for way in ways)] for name, row in bench["rows"].items()
    ]
    added = [
        [
            "added to one tanh",
            *(f"{(row[way]['median'] - row['plain']['median']) / 100 * 1e6:.2f}" for way in row),
        ]
        for name, row in bench["rows"].items()
        if name == "100 x tanh"
    ]
    ratios = [
        [
            f"{name}, of torch's",
            *(f"{row[way]['median'] / row['torch']['median']:.2f}" for way in row),
        ]
        for name, row in bench["rows"].items()
    ]
    head = ("microseconds, median (quartiles)", *ways)
    return table(bench["of"], head, [*rows, *added, *ratios])


TABLES = {"steps": of_steps, "allocator": of_allocator, "tiny": of_tiny}
