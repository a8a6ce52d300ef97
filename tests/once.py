"""What runs once: on one of two recorders, or for all processes that run tests.

Tests that start whole programs run on one recorder only: the compiled one, if it can be built.
Programs take seconds to start, and what differs between the recorders is tested without them. The
same holds for tests that record nothing (of the planner, of kernels, of compiled code), for
DTensors, which the Python recorder alone records, for most tests of dry runs, which have a recorder
of their own, and for what is learned from steps and planned for the next ones: a step that is
watched runs the same code on both. With LOWTIDE_FULL=1 in the environment all run on each.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

FULL = os.environ.get("LOWTIDE_FULL") == "1"
# Whether this run is the first of two, so that what it skips runs in the second.
FIRST_OF_TWO = (
    os.environ.get("LOWTIDE_ENGINE") == "python" and shutil.which("c++") is not None and not FULL
)

on_one_recorder = pytest.mark.skipif(FIRST_OF_TWO, reason="runs with the compiled recorder")


def search_less(monkeypatch: pytest.MonkeyPatch, part: int = 20) -> None:
    """Reduce the search for plans, and for what can be proved of them, to one such part of the
    work."""
    search, proof = ("search.WORK", "auto.EXCHANGE_WORK"), ("prove.WORK", "prove.COMPILED_WORK")
    for name in (*search, "polish.WORK", *proof, "relaxed.WORK"):
        module, constant = name.split(".")
        usual = getattr(importlib.import_module(f"lowtide.planner.{module}"), constant)
        monkeypatch.setattr(f"lowtide.planner.{name}", usual // part)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, as JSON has it; only the first of all processes that run tests calls it.
    (Work is stolen test by test, so several have tests of one file.)"""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    made = folder / f"{name}.json"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(json.dumps(make()))
    return json.loads(made.read_text())
