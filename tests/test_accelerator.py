"""What is different on a GPU, without one: tests on an emulated accelerator (`tests/accelerator`).

They run in a process of their own, as registering such a device with torch is permanent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.compiled import build
from once import on_one_recorder

HERE = Path(__file__).parent
# Runs on both recorders by itself; is about what a step decides, whoever records.
ONCE = ("test_device_script.py", "test_limits.py", "test_shortage.py")
FILES = [
    pytest.param(path.name, marks=on_one_recorder if path.name in ONCE else ())
    for path in sorted((HERE / "accelerator").glob("test_*.py"))
]

pytestmark = pytest.mark.skipif(
    build.possible() is not None, reason="the device is written in C++, and there is no compiler"
)


@pytest.mark.parametrize("name", FILES)
def test_on_an_emulated_accelerator(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         HERE / "accelerator" / name],
        capture_output=True, text=True, timeout=570, cwd=HERE.parent,
        env={**os.environ, "LOWTIDE_EMULATED": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
