"""Programs that tests run in an interpreter of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def ran_apart(
    program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a program has written, which could import what can be imported here."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done
