"""The simulation of CUDA's allocator behind the figures of `benchmarks/reserved.py`: each rule of
`c10/cuda/CUDACachingAllocator.cpp` that it relies on."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

MIB = 1 << 20


def load() -> ModuleType:
    place = Path(__file__).parents[1] / "benchmarks" / "caching.py"
    spec = importlib.util.spec_from_file_location("caching", place)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


caching = load()


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # More than 1 MiB is split off; 1 MiB stays with the block.
        (10 * MIB + 512, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(nbytes: int, block: int, segment: int) -> None:
    allocator = caching.Caching()
    assert allocator.allocate(nbytes).size == block == allocator.allocated
    assert allocator.reserved == segment


def test_the_smallest_free_block_serves_and_its_rest_serves_too() -> None:
    allocator = caching.Caching()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.release(large)
    allocator.release(small)
    first, second = allocator.allocate(24 * MIB), allocator.allocate(8 * MIB)
    assert (first.address, second.address) == (64 * MIB, 88 * MIB)
    assert allocator.reserved == 96 * MIB


def test_what_is_free_in_pieces_serves_once_its_neighbors_are_free() -> None:
    allocator = caching.Caching()
    whole = allocator.allocate(60 * MIB)
    allocator.release(whole)
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    allocator.release(parts[0])
    allocator.release(parts[2])
    allocator.release(allocator.allocate(40 * MIB))
    assert allocator.reserved == 100 * MIB  # 40 MiB were free, but not in one piece
    allocator.release(parts[1])
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 100 * MIB


def test_under_a_cap_whole_free_segments_are_given_back() -> None:
    allocator = caching.Caching(64 * MIB)
    held = allocator.allocate(30 * MIB)
    allocator.release(allocator.allocate(32 * MIB))
    allocator.allocate(34 * MIB)
    assert (allocator.reserved, allocator.retries) == (64 * MIB, 1)
    allocator.release(held)
    allocator.allocate(2 * MIB)  # leaves a part of its segment in use
    with pytest.raises(caching.OutOfMemoryError):
        allocator.allocate(30 * MIB)


def test_an_expandable_segment_grows_where_the_usual_ones_are_too_small() -> None:
    allocator = caching.Expandable()
    allocator.release(allocator.allocate(40 * MIB))
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 60 * MIB
    usual = caching.Caching()
    usual.release(usual.allocate(40 * MIB))
    usual.allocate(60 * MIB)
    assert usual.reserved == 100 * MIB


@given(
    st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans(), st.integers(0, 99)), max_size=60),
    st.sampled_from(["Caching", "Expandable"]),
)
def test_blocks_never_overlap_and_nothing_is_lost(
    steps: list[tuple[int, bool, int]], name: str
) -> None:
    allocator = getattr(caching, name)()
    live: list = []
    for nbytes, free, which in steps:
        if free and live:
            allocator.release(live.pop(which % len(live)))
        else:
            live.append(allocator.allocate(nbytes))
        spans = sorted((b.small, b.address, b.address + b.size) for b in live)
        for one, other in itertools.pairwise(spans):
            assert one[0] != other[0] or one[2] <= other[1]
        free_bytes = sum(size for blocks in allocator._free.values() for size, _, _ in blocks)
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.allocated + free_bytes == allocator.reserved


def test_the_smallest_cap_suffices_and_a_smaller_one_does_not() -> None:
    events = [(1, 30 * MIB), (2, 32 * MIB), (2, -32 * MIB), (3, 34 * MIB), (1, -30 * MIB)]
    found = caching.least(events, 100 * MIB)
    assert 64 * MIB <= found.capacity <= 64.3 * MIB
    assert found.retries == 1
    with pytest.raises(caching.OutOfMemoryError):
        caching.least(events, 63 * MIB)
