"""Fixtures for the planner's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lowtide import engine
from lowtide.compiled import build


@pytest.fixture(autouse=True)
def short_search() -> None:
    """Search in full: these tests are about the plans that users get."""


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    """The compiled core, in use while the tests of a file run."""
    if not build.target().exists() and build.possible() is not None:
        pytest.skip("no compiled core here")
    with engine.use("compiled"):
        yield engine.core()
