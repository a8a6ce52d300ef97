"""Fixtures for more than one test file."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from by_hand import counted_replays
from lowtide.learning.beside import Beside, Search
from once import FULL, search_less

# Files of tests that take up to a minute and a half each: most start processes or compile.
LONG = (
    "test_ranks", "test_accelerator", "test_distributed", "test_stages", "test_operators",
    "test_examples", "test_packaging", "test_torchrun", "test_inductor", "test_solve",
    "test_polish", "test_suite",
)  # fmt: skip
FROZEN: dict[str, int] = {}  # how many objects were frozen when garbage was last looked for


def pytest_collection() -> None:
    gc.disable()  # next to nothing of what is imported becomes garbage


def pytest_collection_finish() -> None:
    """Freeze what was imported: else each full collection scans it, for half a second."""
    gc.enable()
    freeze()


def freeze() -> None:
    gc.collect()
    gc.freeze()
    FROZEN["at last"] = gc.get_freeze_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first, so that at the end no process waits for another one's."""
    if not FULL:
        left_out = pytest.mark.skip(reason="takes long: LOWTIDE_FULL=1 runs it")
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(left_out)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Search for plans synchronously, so that which step first follows a plan does not depend on
    how long the search takes. Tests marked `beside` are about the background thread."""
    if request.node.get_closest_marker("beside") is not None:
        return

    def ask(self: Beside, search: Search) -> None:
        found = search()
        if found is not None:
            self._found.append(found)

    monkeypatch.setattr(Beside, "ask", ask)


@pytest.fixture(autouse=True)
def no_wrapper_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget wrapper subclasses: otherwise, after one test with one, the rest of the process would
    use the Python recorder."""
    monkeypatch.setattr("lowtide.engine._choice.wrappers", False)


@pytest.fixture(autouse=True)
def no_mode_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps one flag for the modes of all threads. Two threads that enter and leave some side
    by side, as fake tensors are made, may leave it set for the rest of the process."""
    monkeypatch.setattr("torch.utils._python_dispatch._is_in_torch_dispatch_mode", False)


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Reduce the search for plans: most tests are of bits, limits and records, which hold whatever
    the plan is, and would spend most of their time searching. Tests marked `full_search` are about
    the plans that users get; to those marked `any_plan` not even a good one matters."""
    marked = request.node.get_closest_marker
    if marked("full_search") is None:
        search_less(monkeypatch, 200 if marked("any_plan") is not None and not FULL else 20)


@pytest.fixture(scope="module")
def thawed() -> Iterator[None]:
    """Unfreeze all: for tests of what is found among all objects of the process."""
    gc.unfreeze()
    yield
    freeze()


@pytest.fixture(scope="module")
def thawed_at_times() -> None:
    """Unfreeze objects from the tests of other files, which may be garbage by now, if they are
    many: the collection that follows takes half a second."""
    if gc.get_freeze_count() > FROZEN.get("at last", 0) + 100_000:
        gc.unfreeze()
        freeze()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Begin with nothing compiled, and leave nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_thread(thawed_at_times: None) -> Iterator[None]:
    """Run on one thread: for small nets several are slower, and they allocate memory."""
    gc.collect()  # budgets that other tests abandoned after a forward may still be measuring
    gc.freeze()  # else each collection scans everything that was imported, for half a second
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def replayed() -> Iterator[Callable[[], int]]:
    """A function that returns how many operations were replayed since the test began."""
    with counted_replays() as count:
        yield count
