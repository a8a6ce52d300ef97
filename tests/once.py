"""Tests that start whole programs run on one recorder only: the compiled one, if it can be built.

Programs take seconds to start, and what differs between the recorders is tested without them. The
same holds for tests that record nothing: of the planner, of kernels, of compiled code.
"""

from __future__ import annotations

import os
import shutil

import pytest

# Whether this run is the first of two, so that what it skips runs in the second.
FIRST_OF_TWO = os.environ.get("LOWTIDE_ENGINE") == "python" and shutil.which("c++") is not None

on_one_recorder = pytest.mark.skipif(FIRST_OF_TWO, reason="runs with the compiled recorder")


def search_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the search for plans to a twentieth of the work."""
    monkeypatch.setattr("lowtide.planner.search.WORK", 12_500)
    monkeypatch.setattr("lowtide.planner.auto.EXCHANGE_WORK", 20_000)
    monkeypatch.setattr("lowtide.planner.polish.WORK", 8_000_000)
