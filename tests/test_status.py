"""docs/status.md lists combinations with the tests that hold them: they exist, and their results
are in docs/combinations.md, which `benchmarks/combinations.py` writes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from once import on_one_recorder

ROOT = Path(__file__).resolve().parents[1]

pytestmark = on_one_recorder  # it records nothing


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "combinations", ROOT / "benchmarks" / "combinations.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["combinations"] = module  # needed by its dataclasses
    spec.loader.exec_module(module)
    return module


combinations = script()
LISTED = list(combinations.rows(combinations.STATUS.read_text()))


def test_many_combinations_are_listed() -> None:
    assert len(LISTED) > 80
    assert len({(row.section, row.what) for row in LISTED}) == len(LISTED)


@pytest.mark.parametrize("row", LISTED, ids=lambda row: f"{row.section}: {row.what[:50]}")
def test_what_holds_a_combination_exists(row: object) -> None:
    for name in row.tests:  # type: ignore[attr-defined]
        wanted = combinations.pattern(name.partition("[")[0])
        found = [
            test
            for file in row.files  # type: ignore[attr-defined]
            for test in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
            if re.fullmatch(wanted, test)
        ]
        assert found, name


def test_every_combination_has_its_result() -> None:
    text = combinations.RESULTS.read_text()
    for row in LISTED:
        assert f"| {row.what} | {row.says} |".replace("| |", "|  |") in text, row.what
    assert "failed" not in text
    assert "no such test" not in text


def test_names_and_patterns() -> None:
    row = combinations.Row("", "", "", ("f.py",), ("test_a", "test_b[x-*]", "test_c_*"))
    held = ["test_a", "test_a[1]", "test_b[x-1]", "test_c_d", "test_c_d[2]"]
    assert all(row.holds("f.py", name) for name in held)
    others = ["test_aa", "test_b", "test_b[y-1]", "test_c"]
    assert not any(row.holds("f.py", name) for name in others)
    assert not row.holds("g.py", "test_a")
