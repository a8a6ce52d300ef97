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
PARTS = {
    "script": ["test_device_script.py"],  # runs on both recorders by itself
    "decisions": ["test_limits.py", "test_shortage.py"],  # of a step, whoever records it
}
PARTS["replays"] = [
    path.name
    for path in sorted((HERE / "accelerator").glob("test_*.py"))
    if not any(path.name in names for names in PARTS.values())
]

pytestmark = pytest.mark.skipif(
    build.possible() is not None, reason="the device is written in C++, and there is no compiler"
)


# A process costs seconds to start: files share one.
@pytest.mark.parametrize(
    "part",
    [pytest.param(name, marks=() if name == "replays" else on_one_recorder) for name in PARTS],
)
def test_on_an_emulated_accelerator(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         *(HERE / "accelerator" / name for name in PARTS[part])],
        capture_output=True, text=True, timeout=570, cwd=HERE.parent,
        env={**os.environ, "LOWTIDE_EMULATED": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
