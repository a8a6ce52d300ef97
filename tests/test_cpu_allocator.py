"""`lowtide.use_cpu_allocator`: what the process takes is what is in use and kept, and no bit, byte
or event that torch reports differs from those with its own allocator."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lowtide
from apart import ran_apart
from cpu_allocator import driver
from lowtide import cpu_allocator
from lowtide.compiled import build
from once import on_one_recorder

PAGE = mmap.PAGESIZE
SMALL = 16 * PAGE  # smaller blocks come from torch's own allocator
HUGE = 2 << 20

pytestmark = [
    on_one_recorder,
    pytest.mark.skipif(
        sys.platform != "linux" or build.possible() is not None, reason="needs Linux and a compiler"
    ),
]


@pytest.fixture
def allocator() -> Iterator[lowtide.CPUAllocator]:
    gc.collect()
    used = lowtide.use_cpu_allocator()
    used.empty_cache()
    used.reset_peak_memory_stats()
    assert used.memory_allocated() == 0, "another test has left a tensor"
    yield used
    used.remove()


def block(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


# ---------------------------------------------------------------------- pages


def gives_huge_pages() -> bool:
    try:
        return cpu_allocator._huge_page() == HUGE
    except lowtide.UnsupportedError:
        return False


def test_free_pages_serve_blocks_of_any_size() -> None:
    pages = driver().Pages(PAGE)
    first, second = pages.take(10 * PAGE), pages.take(6 * PAGE)
    pages.give(first)
    pages.give(second)
    # Together they have the 16 pages of a block that neither would hold: none is new.
    assert pages.take(16 * PAGE) == min(first, second)
    assert pages.figures() == {
        "live": 16 * PAGE, "dirty": 0, "peak": 16 * PAGE, "highest": 16 * PAGE,
        "addresses": 32 << 20, "bound": 16 * PAGE, "whole": False,
    }  # fmt: skip


def test_the_smallest_place_that_holds_a_block_is_taken() -> None:
    pages = driver().Pages(PAGE)
    sizes = [8, 1, 4, 1, 6, 1]
    places = [pages.take(size * PAGE) for size in sizes]
    for index in (0, 2, 4):
        pages.give(places[index])
    assert pages.take(4 * PAGE) == places[2]
    assert pages.take(5 * PAGE) == places[4]


def test_a_block_that_fits_nowhere_extends_what_is_kept() -> None:
    pages = driver().Pages(PAGE)
    pages.reserve(100 * PAGE)
    first, wall = pages.take(8 * PAGE), pages.take(PAGE)
    last = pages.take(4 * PAGE)
    pages.give(first)
    pages.give(last)
    assert wall == first + 8 * PAGE
    # Eight kept pages are too few, and so are four; behind the four there is room.
    assert pages.take(10 * PAGE) == last
    assert pages.figures()["dirty"] == 8 * PAGE


def test_where_no_kept_place_is_large_enough_the_fewest_pages_are_new() -> None:
    pages = driver().Pages(PAGE)
    pages.reserve(100 * PAGE)
    gone, _wall = pages.take(20 * PAGE), pages.take(PAGE)
    some = pages.take(3 * PAGE)
    pages.give(gone)
    pages.fit_to(0)  # 20 pages before the wall are the kernel's
    pages.give(some)
    assert pages.take(10 * PAGE) == some
    # In one place: 10 pages of the kernel's, 3 kept ones, and the kernel's again.
    pages = driver().Pages(PAGE)
    pages.reserve(100 * PAGE)
    gone, some = pages.take(10 * PAGE), pages.take(3 * PAGE)
    pages.give(gone)
    pages.fit_to(0)
    pages.give(some)
    assert pages.take(12 * PAGE) == some
    assert pages.figures()["dirty"] == 0
    # With a block behind the kept ones, the place ends there.
    pages = driver().Pages(PAGE)
    pages.reserve(100 * PAGE)
    gone, some, _wall = (pages.take(size * PAGE) for size in (10, 3, 1))
    pages.give(gone)
    pages.fit_to(0)
    pages.give(some)
    assert pages.take(5 * PAGE) == some - 2 * PAGE
    # Where none is kept, the smallest place that holds the block.
    assert pages.take(8 * PAGE) == gone


def test_what_goes_back_leaves_the_largest_places() -> None:
    pages = driver().Pages(PAGE)
    pages.reserve(100 * PAGE)
    places = [pages.take(size * PAGE) for size in (8, 1, 3, 1, 2, 1)]
    for index in (0, 2, 4):
        pages.give(places[index])
    pages.fit_to(14 * PAGE)  # 3 in use, 13 kept: two too many
    assert pages.take(3 * PAGE) == places[2]
    assert pages.take(8 * PAGE) == places[0]
    pages.give(places[0])
    pages.give(places[2])
    pages.fit_to(10 * PAGE)  # four too many, which one place has
    assert pages.take(3 * PAGE) == places[2]
    assert pages.take(4 * PAGE) == places[0]
    assert pages.figures()["dirty"] == 0


def test_exactly_what_is_too_much_goes_back() -> None:
    pages = driver().Pages(PAGE)
    pages.reserve(10 * PAGE)
    kept, used = pages.take(8 * PAGE), pages.take(PAGE)
    driver().fill(kept, 8 * PAGE, 1)
    driver().fill(used, PAGE, 2)
    pages.give(kept)
    assert pages.resident() == 9 * PAGE
    more = pages.take(9 * PAGE)  # in use: 10, with 8 kept of which some were taken
    driver().fill(more, 9 * PAGE, 3)
    assert pages.figures()["dirty"] == 0
    assert pages.resident() == 10 * PAGE
    assert driver().holds(used, PAGE, 2)
    pages.reserve(0)
    pages.give(more)
    assert pages.resident() == PAGE
    assert pages.take(PAGE)
    assert pages.figures()["highest"] == 10 * PAGE


def test_addresses_are_given_back_with_their_pages() -> None:
    pages = driver().Pages(PAGE)
    gone, kept = pages.take(64 << 20), pages.take(PAGE)
    pages.give(gone)
    assert pages.figures()["addresses"] == 96 << 20
    assert pages.shed()
    # What is beside the block in use goes too if it touches the rest; alone, it is too little.
    assert pages.figures()["addresses"] in (PAGE, 32 << 20)
    assert not pages.shed()
    driver().fill(kept, PAGE, 1)
    assert pages.resident() == PAGE
    assert pages.flaw() is None
    pages.give(kept)
    pages.shed()
    assert pages.figures()["addresses"] == 0


def test_places_that_touch_serve_one_block() -> None:
    pages = driver().Pages(PAGE)
    first, second = pages.take(32 << 20), pages.take(32 << 20)
    if abs(first - second) != 32 << 20:
        pytest.skip("the kernel has put something between them")
    pages.give(first)
    pages.give(second)
    assert pages.take(64 << 20) == min(first, second)
    assert pages.figures()["addresses"] == 64 << 20


sizes = st.one_of(st.integers(1, 40 * PAGE), st.integers(1, 5 << 20))
decisions = st.one_of(
    st.tuples(st.just("take"), sizes),
    st.tuples(st.just("take"), sizes),
    st.tuples(st.just("give"), st.integers(0, 99)),
    st.tuples(st.just("give"), st.integers(0, 99)),
    st.tuples(st.just("reserve"), st.none() | st.integers(0, 8 << 20)),
    st.tuples(st.just("fit_to"), st.integers(0, 4 << 20)),
    st.tuples(st.just("shed"), st.just(0)),
)


@pytest.mark.parametrize("unit", [PAGE, HUGE])
@settings(max_examples=120, deadline=None)
@given(program=st.lists(decisions, max_size=40))
def test_the_kernel_has_what_is_counted(unit: int, program: list[tuple[str, Any]]) -> None:
    if unit == HUGE and not gives_huge_pages():
        pytest.skip("this system gives no huge pages")
    core = driver()
    pages, blocks, counted = core.Pages(unit), [], 0
    for number, (what, value) in enumerate(program):
        if what == "take":
            place, byte = pages.take(value), number % 251
            assert place
            core.fill(place, value, byte)
            # A block counts as whole pages; the last one is here with its first byte.
            blocks.append((place, value, byte))
        elif what == "give" and blocks:
            assert pages.give(blocks.pop(value % len(blocks))[0])
        elif what in ("reserve", "fit_to"):
            getattr(pages, what)(value)
        elif what == "shed":
            pages.shed()
        assert pages.flaw() is None
        figures = pages.figures()
        before, counted = counted, figures["live"] + figures["dirty"]
        if what in ("fit_to", "shed") and unit == PAGE:
            assert counted == max(figures["live"], min(before, value // PAGE * PAGE))
        # Exact where the kernel brings single pages; huge ones it may not have.
        assert pages.resident() == counted if unit == PAGE else pages.resident() <= counted
        assert counted <= figures["bound"] or not figures["whole"]
        if unit == PAGE:
            assert counted <= figures["bound"]
    assert all(core.holds(*each) for each in blocks)
    assert not pages.give(1)


def test_huge_pages_come_and_go_whole() -> None:
    if not gives_huge_pages():
        pytest.skip("this system gives no huge pages")
    core = driver()
    pages = core.Pages(HUGE)
    small, large = pages.take(PAGE), pages.take(2 * HUGE)
    assert small % HUGE == 0
    assert core.Pages(32 << 20).take(PAGE) % (32 << 20) == 0
    # The rest of the first one is kept, and the large block begins in it.
    assert large == small + PAGE
    assert pages.figures()["dirty"] == HUGE - PAGE
    pages.give(large)
    pages.fit_to(0)
    assert pages.figures()["dirty"] == HUGE - PAGE  # the small block's huge page


def test_more_than_there_is() -> None:
    pages = driver().Pages(PAGE)
    assert pages.take(2**62) == 0
    assert pages.take(2**64 - 1) == 0
    assert pages.figures()["live"] == 0


# ---------------------------------------------------------------------- tensors


def test_what_is_counted(allocator: lowtide.CPUAllocator) -> None:
    x = block(SMALL)
    y = block(SMALL + 1)  # a page more
    below = block(SMALL - 1)
    assert allocator.memory_allocated() == 2 * SMALL + PAGE
    assert x.data_ptr() % PAGE == 0
    del y
    assert allocator.memory_allocated() == SMALL
    assert allocator.memory_reserved() == 2 * SMALL + PAGE
    assert allocator.max_memory_allocated() == allocator.max_memory_reserved() == 2 * SMALL + PAGE
    allocator.reset_peak_memory_stats()
    assert allocator.memory_reserved() == allocator.max_memory_reserved() == SMALL
    assert bool(below.all())
    assert repr(allocator) == (
        f"<lowtide.CPUAllocator: active, {SMALL >> 10:.1f} KiB allocated, "
        f"{SMALL >> 10:.1f} KiB reserved>"
    )


def test_what_is_kept_is_bounded(allocator: lowtide.CPUAllocator) -> None:
    block(8 * SMALL)
    assert allocator.memory_reserved() == 8 * SMALL  # the most that was in use
    assert lowtide.use_cpu_allocator(2 * SMALL).memory_reserved() == 2 * SMALL
    block(8 * SMALL)
    assert allocator.memory_reserved() == 2 * SMALL
    lowtide.use_cpu_allocator(0)
    assert allocator.memory_reserved() == 0
    lowtide.use_cpu_allocator("0")  # as a configuration file has it
    block(SMALL)
    assert allocator.memory_reserved() == 0
    lowtide.use_cpu_allocator(f"{16 * SMALL} B")
    block(9 * SMALL)
    block(12 * SMALL)
    assert allocator.memory_reserved() == 12 * SMALL
    allocator.empty_cache()
    assert allocator.memory_reserved() == 0


def test_removed_it_keeps_nothing_and_releases_what_it_has(
    allocator: lowtide.CPUAllocator,
) -> None:
    x = block(SMALL)
    block(SMALL)
    allocator.remove()
    assert not allocator.active
    assert allocator.memory_reserved() == allocator.memory_allocated() == SMALL
    assert block(4 * SMALL).sum() == 4 * SMALL
    assert allocator.memory_allocated() == SMALL
    assert bool((x == 1).all())
    del x
    assert allocator.memory_reserved() == 0
    assert lowtide.use_cpu_allocator().active
    assert allocator.active


def test_removed_it_does_not_grow_a_storage(allocator: lowtide.CPUAllocator) -> None:
    x = block(SMALL)
    allocator.remove()
    x.untyped_storage().resize_(4 * SMALL)
    assert allocator.memory_allocated() == 0
    assert bool((x == 1).all())


def test_free_addresses_do_not_count_against_a_limit_on_them() -> None:
    # 700 MiB fit into 1,600, but not beside addresses of 500 and 600 that are kept.
    program = """
import lowtide, resource, torch
lowtide.use_cpu_allocator()
kept = torch.ones(1 << 20)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1600 << 20),) * 2)
for size in (500, 600, 700, 800, 1000, 1300):
    torch.empty(size << 20, dtype=torch.uint8)
print(int(kept.sum()))
"""
    assert ran_apart(program).stdout.strip() == str(1 << 20)


def test_tensors_are_released_where_the_heap_is_full() -> None:
    program = """
import ctypes, lowtide, resource, sys, torch
lowtide.use_cpu_allocator()
grant = ctypes.CDLL(None).malloc
grant.restype = ctypes.c_void_p
tensors = [torch.empty(70000) for _ in range(2000)]
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken, taken))
for size in (1 << 20, 65536, 4096, 1024, 256, 120, 88, 72, 56, 40, 24):
    while grant(size):
        pass
for index in range(0, 2000, 2):
    tensors[index] = None
sys.stdout.write("released")
"""
    assert ran_apart(program).stdout.strip() == "released"


def test_two_copies_of_lowtide_in_a_process() -> None:
    program = """
import shutil, tempfile
from pathlib import Path
import torch
from lowtide.compiled import build
path = build.cpu_allocator()
with tempfile.TemporaryDirectory() as other:
    shutil.copy(path, other)
    first, second = (
        build.load(each, build.CPU_MODULE) for each in (path, Path(other) / path.name)
    )
for core in (first, second, first, second):
    assert core.install() is None
    torch.ones(10), torch.ones(1 << 20)
first.remove()
second.remove()
torch.ones(10), torch.ones(1 << 20)
print(first.installed(), second.installed(), first.figures()["allocated"])
"""
    assert ran_apart(program).stdout.strip() == "False False 0"


def test_what_no_machine_has_is_refused_as_by_torch(allocator: lowtide.CPUAllocator) -> None:
    absurd = 1 << 46
    allocator.remove()
    try:
        torch.empty(absurd, dtype=torch.uint8)
    except RuntimeError as error:
        own = str(error)
    else:
        pytest.skip("this system grants any size")
    lowtide.use_cpu_allocator()
    with pytest.raises(RuntimeError) as ours:
        torch.empty(absurd, dtype=torch.uint8)
    assert str(ours.value) == own
    assert "can't allocate memory" in own
    assert allocator.memory_allocated() == 0


def test_storages_grow_shrink_and_are_shared(allocator: lowtide.CPUAllocator) -> None:
    x = torch.arange(SMALL)
    x.untyped_storage().resize_(16 * SMALL)
    assert x.tolist() == list(range(SMALL))
    x.untyped_storage().resize_(64)
    assert x[:8].tolist() == list(range(8))
    assert allocator.memory_allocated() == 0  # now a small block
    y = torch.arange(SMALL)
    view = y.numpy()
    del y
    assert view[-1] == SMALL - 1
    del view
    assert allocator.memory_allocated() == 0
    z = torch.arange(SMALL).share_memory_()
    assert torch.equal(pickle.loads(pickle.dumps(z)), z)


def net() -> nn.Sequential:
    def part() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2)
        )

    return nn.Sequential(*(part() for _ in range(3)))


def trained(limit: float | None) -> tuple[list[torch.Tensor], int]:
    """What three steps leave, and the peak of a fourth."""
    torch.manual_seed(0)
    model = net()
    budget = None if limit is None else lowtide.fit(model, limit)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, 48, 48)).square().mean()
        loss.backward()

    for _ in range(3):
        step()
        optimizer.step()
    peak = lowtide.measure(step).peak_bytes
    if budget is not None:
        assert budget.report().highest_peak <= budget.report().limit
    return [*model.state_dict().values(), torch.get_rng_state()], peak


@pytest.mark.parametrize("limit", [None, 0.7])
def test_no_bit_and_no_byte_differs(limit: float | None) -> None:
    expected, peak = trained(limit)
    used = lowtide.use_cpu_allocator()
    try:
        found, again = trained(limit)
        assert used.max_memory_allocated() > peak // 2
    finally:
        used.remove()
    assert again == peak
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def reported() -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        x = block(4 * SMALL)
        y = x + 1
        del x
        block(3)
        y.untyped_storage().resize_(9 * SMALL)
        del y
    events = seen.profiler.kineto_results.experimental_event_tree()
    sizes = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.typed[0].name == "Allocation":
            sizes.append((event.start_time_ns, event.typed[1].alloc_size))
    return [size for _, size in sorted(sizes)]


def test_the_profiler_sees_the_same_events(allocator: lowtide.CPUAllocator) -> None:
    with_ours = reported()
    allocator.remove()
    assert with_ours == reported()
    assert 4 * SMALL in with_ours
    assert -9 * SMALL in with_ours


def test_threads_take_and_release_each_others(allocator: lowtide.CPUAllocator) -> None:
    shared: list[torch.Tensor] = []
    wrong: list[int] = []

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for number in range(300):
            value = seed * 1000 + number
            shared.append(torch.full((chosen.randrange(SMALL // 8, SMALL),), value))
            if len(shared) > 8:
                try:
                    taken = shared.pop(chosen.randrange(4))
                except IndexError:
                    continue
                if not bool((taken == taken[0]).all()):
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    shared.clear()
    assert allocator.memory_allocated() == 0
    assert allocator.max_memory_reserved() <= allocator.max_memory_allocated()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_its_own(allocator: lowtide.CPUAllocator) -> None:
    x = block(4 * SMALL)
    child = os.fork()
    if child == 0:
        x.fill_(7)
        y = block(2 * SMALL)
        fine = int(x[0]) == 7 and int(y[-1]) == 1
        del x
        allocator.empty_cache()
        os._exit(0 if fine and allocator.memory_allocated() == 2 * SMALL else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((x == 1).all())
    assert allocator.memory_allocated() == 4 * SMALL


# ---------------------------------------------------------------------- refusals


TRY = """
import lowtide
try:
    lowtide.use_cpu_allocator()
except lowtide.UnsupportedError as error:
    print(error)
"""


def test_without_a_compiler(tmp_path: Path) -> None:
    nothing = str(tmp_path)
    said = ran_apart(TRY, CXX="", PATH=nothing, LOWTIDE_CACHE=nothing).stdout.strip()
    assert said == (
        "lowtide.use_cpu_allocator cannot be used here: no C++ compiler was found (c++, g++, "
        "clang++ or $CXX). Leave it out: limits hold without it, and the process takes more."
    )


def test_elsewhere_than_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(cpu_allocator, "_loaded", None)
    with pytest.raises(lowtide.UnsupportedError, match="the allocator for the CPU needs Linux"):
        lowtide.use_cpu_allocator()


def test_without_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{HUGE}\n")
    monkeypatch.setattr(cpu_allocator, "_HUGE", tmp_path)
    with pytest.raises(
        lowtide.UnsupportedError, match=r"no huge pages .* \[never\]; size: 2097152"
    ):
        lowtide.use_cpu_allocator(huge_pages=True)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert cpu_allocator._huge_page() == HUGE
    (tmp_path / "hpage_pmd_size").write_text(f"{512 << 20}\n")
    with pytest.raises(lowtide.UnsupportedError, match="size: 536870912"):
        cpu_allocator._huge_page()


def test_pages_of_another_size_are_refused(allocator: lowtide.CPUAllocator) -> None:
    if not gives_huge_pages():
        pytest.skip("this system gives no huge pages")
    x = block(SMALL)
    with pytest.raises(lowtide.UsageError, match=r"pages of 2.0 MiB, .* in pages of 4.0 KiB"):
        lowtide.use_cpu_allocator(huge_pages=True)
    del x
    lowtide.use_cpu_allocator(huge_pages=True)
    block(SMALL)
    lowtide.use_cpu_allocator()
    assert allocator.memory_reserved() == 0


def test_huge_pages_serve_tensors() -> None:
    if not gives_huge_pages():
        pytest.skip("this system gives no huge pages")
    program = """
import lowtide, torch
used = lowtide.use_cpu_allocator(huge_pages=True)
x = torch.ones(3 << 20, dtype=torch.uint8)
print(used.memory_allocated(), used.memory_reserved(), int(x.sum()))
"""
    assert ran_apart(program).stdout.strip() == f"{3 << 20} {4 << 20} {3 << 20}"


@pytest.mark.parametrize("reserve", [0.5, "50%", -1, "some", True, torch.ones(2)])
def test_a_reserve_that_is_no_size(reserve: Any) -> None:
    with pytest.raises(lowtide.UsageError, match=r"^lowtide\.use_cpu_allocator: reserve "):
        lowtide.use_cpu_allocator(reserve)


def test_a_fraction_is_refused_by_name() -> None:
    with pytest.raises(
        lowtide.UsageError,
        match=r"reserve is a size in bytes, or text such as '6 GiB'; got the fraction 0\.5",
    ):
        lowtide.use_cpu_allocator(0.5)  # type: ignore[arg-type]
