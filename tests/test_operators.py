"""Rule 1, for every operator and module that torch itself tests.

Problem: the other tests reach the operators that models use; the promise is about all of them.
Invariant: a program in which nothing is recomputed fails, so no sweep passes by keeping everything;
counts are lower bounds, as each release has different operators. The sweeps run in a process of
their own because of what they import, once for both recorders. Rejected: one test per operator, a
thousand of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from once import made_once, on_one_recorder

TESTS = Path(__file__).parent

pytestmark = on_one_recorder  # the sweeps are of both


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = made_once(tmp_path_factory, "sweeps", swept)
    return found


def swept() -> Any:
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, TESTS / "operator_sweep.py"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "at_least"),
    [("float32", 480), ("complex64", 280), ("in place", 100), ("modules", 90)],
)
def test_gradients_have_the_bits_of_the_plain_step(
    sweeps: dict[str, Any], name: str, at_least: int
) -> None:
    found = sweeps[name]
    assert not found["wrong"], "\n".join(found["wrong"])
    assert len(found["same"]) >= at_least, found["left out"]
    assert found["records left"] == 0


def test_the_sweep_sees_what_differs(sweeps: dict[str, Any]) -> None:
    counts, keeps = sweeps["what differs"]["wrong"]
    assert counts.startswith("counts: [0, 1, 2]")
    assert keeps == "keeps: nothing was made again"
