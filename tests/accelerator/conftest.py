"""The tests here are run by `tests/test_accelerator.py`, in a process that has the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest

if "LOWTIDE_EMULATED" in os.environ:
    from accelerator import install

    CORE: ModuleType | None = install()
else:
    CORE = None
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def core() -> Iterator[ModuleType]:
    """The device; no test may leave a race behind that it has not asked for."""
    assert CORE is not None
    CORE.settle()  # what the test before has left running
    CORE.races()
    yield CORE
    assert sorted(set(CORE.races())) == []
