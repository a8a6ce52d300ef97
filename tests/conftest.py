"""What more than one file of tests needs around its tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from by_hand import counted_replays
from lowtide.learning.beside import Beside, Search
from once import FIRST_OF_TWO, search_less


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Plans are there as soon as they are looked for: which step is the first to follow one does
    not depend on how long that takes. Tests marked `beside` are about the thread."""
    if request.node.get_closest_marker("beside") is not None:
        return

    def ask(self: Beside, search: Search) -> None:
        found = search()
        if found is not None:
            self._found.append(found)

    monkeypatch.setattr(Beside, "ask", ask)


@pytest.fixture(autouse=True)
def no_wrapper_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test with a tensor subclass would leave the rest of its process to Python's recorder."""
    monkeypatch.setattr("lowtide.engine._choice.wrappers", False)


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one of the two recorders, plans are searched for with less work.

    For tests of what holds whichever plan is followed, bits and limits, most of whose time would go
    into the search. It is the same search on both recorders; the other one follows the plans that
    users get.
    """
    if FIRST_OF_TWO:
        search_less(monkeypatch)


@pytest.fixture(scope="module")
def thawed() -> None:
    """What there was in tests of another file may be garbage by now."""
    gc.unfreeze()


@pytest.fixture
def one_thread(thawed: None) -> Iterator[None]:
    """Small nets: threads that wait for each other take longer than one, and allocate as well."""
    gc.collect()  # budgets of other tests that were left after a forward may still be measuring
    gc.freeze()  # else each test looks through what was imported, for half a second
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def replayed() -> Iterator[Callable[[], int]]:
    """How many operations were replayed since the test began."""
    with counted_replays() as count:
        yield count
