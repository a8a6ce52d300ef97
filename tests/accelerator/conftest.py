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
    """The device's module; a test fails if it leaves races that it has not read."""
    assert CORE is not None
    CORE.settle()  # wait for what the last test left running
    CORE.races()
    yield CORE
    assert sorted(set(CORE.races())) == []
