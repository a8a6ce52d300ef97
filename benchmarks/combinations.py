"""Run every test that docs/status.md names, and write what came out as docs/combinations.md.

    PYTHONPATH=src python benchmarks/combinations.py            # all, on both recorders
    PYTHONPATH=src python benchmarks/combinations.py --only Lightning --engines python

docs/status.md is the one list of combinations: a heading names the test files, and each row of its
tables ends with the tests that hold it. A row whose tests do not exist, or fail, fails the run.
Tests whose library is not installed count as skipped, and the table says so. This takes a few
minutes; the results are about bits and errors, not times.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATUS = ROOT / "docs" / "status.md"
RESULTS = ROOT / "docs" / "combinations.md"
LIBRARIES = (
    "torch", "accelerate", "lightning", "monai", "peft", "pytorch-ignite", "transformers",
    "vision-architectures",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One combination: what it is, what status.md says about it, and the tests that hold that."""

    section: str
    what: str
    says: str
    files: tuple[str, ...]
    tests: tuple[str, ...]

    def holds(self, file: str, test: str) -> bool:
        """Whether a test (with its parameters) is one of this row's."""
        return file in self.files and any(re.fullmatch(pattern(name), test) for name in self.tests)


def pattern(name: str) -> str:
    """Matches a test's name as in status.md: `*` is anything; without brackets, any parameters."""
    text = re.escape(name).replace(r"\*", ".*")
    return text if "[" in name else rf"{text}(\[.*\])?"


def rows(text: str) -> Iterator[Row]:
    """The combinations in status.md whose tests pytest can run here."""
    section, files = "", ()
    above: list[str] = []
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:].partition(" (")[0]
            files = tuple(re.findall(r"`(tests/(?:accelerator/)?test_\w+\.py)`", line))
        elif line.startswith("|") and not set(line) <= set("|-: "):
            cells = [cell.strip().replace("\0", "|") for cell in
                     line.replace(r"\|", "\0").strip("|").split("|")]  # fmt: skip
            if cells[-1] == "test":
                above = cells
                continue
            tests = tuple(name for name in re.findall(r"`([^`]+)`", cells[-1])
                          if re.match(r"test_|\[", name))  # fmt: skip
            if not files or not tests:
                continue
            # in `test_x[a-*]`, `[b-*]`, the second refers to the same test
            tests = tuple(name if name.startswith("test_") else tests[0].partition("[")[0] + name
                          for name in tests)  # fmt: skip
            said = [(head, cell) for head, cell in zip(above[1:-1], cells[1:-1], strict=True)
                    if cell]  # fmt: skip
            alone = len(above) == 3
            says = "; ".join(cell if alone else f"{head}: {cell}" for head, cell in said)
            yield Row(section, cells[0], says, files, tests)


def run(files: Iterable[str], engine: str, workers: int) -> dict[tuple[str, str], str]:
    """The outcome of each test in these files: passed, failed or skipped."""
    files = list(files)
    emulated = [file for file in files if file.startswith("tests/accelerator/")]
    others = [file for file in files if file not in emulated]
    found = {} if not others else run_together(others, engine, workers)
    if emulated:  # in processes that have the emulated device
        found |= run_together(emulated, engine, workers, LOWTIDE_EMULATED="1")
    return found


def run_together(
    files: list[str], engine: str, workers: int, **environment: str
) -> dict[tuple[str, str], str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--no-header", "-n", str(workers),
             f"--junitxml={report}", "--dist", "loadfile", *files],
            cwd=ROOT, check=False,
            env={**os.environ, "LOWTIDE_ENGINE": engine, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "passed"
            if kinds & {"failure", "error"}:
                outcome = "failed"
            elif "skipped" in kinds:
                outcome = "skipped"
            file = case.get("classname", "").replace(".", "/") + ".py"
            found[file, case.get("name", "")] = outcome
        return found


def counted(row: Row, found: dict[tuple[str, str], str]) -> Counter[str]:
    return Counter(outcome for (file, test), outcome in found.items() if row.holds(file, test))


def cell(counts: Counter[str]) -> str:
    if not counts:
        return "**no such test**"
    if counts["failed"]:
        return f"**{counts['failed']} of {counts.total()} failed**"
    if not counts["passed"]:
        return "not run here"
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed{skipped}"


def versions() -> str:
    named = []
    for library in LIBRARIES:
        try:
            named.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            named.append(f"{library} not installed")
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, {', '.join(named)}"


def page(listed: list[Row], results: dict[str, dict[tuple[str, str], str]]) -> str:
    lines = [
        "# Every combination tried, with its result",
        "",
        "Written by `python benchmarks/combinations.py`, which runs the tests that",
        "[status.md](status.md) names; what the words mean, and the limits, stand there. The",
        "columns on the right are tests on each recorder; those that start whole programs, or are",
        "about a framework, run on one.",
        "",
        f"{versions()}.",
        "",
    ]
    section = ""
    for row in listed:
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "",
                      f"| combination | says | {' | '.join(results)} |",
                      "|---|---|" + "---|" * len(results)]  # fmt: skip
        cells = [cell(counted(row, found)) for found in results.values()]
        lines.append(f"| {row.what} | {row.says} | {' | '.join(cells)} |".replace("| |", "|  |"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="sections whose heading contains this")
    parser.add_argument("--engines", nargs="+", default=["python", "compiled"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="default: docs/combinations.md, if all are run")
    options = parser.parse_args()
    listed = [row for row in rows(STATUS.read_text()) if options.only in row.section]
    files = sorted({file for row in listed for file in row.files})
    results = {engine: run(files, engine, options.workers) for engine in options.engines}
    text = page(listed, results)
    output = options.output or (None if options.only else RESULTS)
    if output is None:
        print(text)
    else:
        output.write_text(text)
    bad = [row for row in listed for found in results.values()
           if not (counts := counted(row, found)) or counts["failed"]]  # fmt: skip
    for row in bad:
        print(f"does not hold: {row.section}: {row.what} ({', '.join(row.tests)})", file=sys.stderr)
    print(f"{len(listed)} combinations, {len({row.what for row in bad})} that do not hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
