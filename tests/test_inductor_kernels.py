"""What is fused, and in which order kernels run: each after those that it needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.inductor.kernels import Facts, Half


def facts_of(
    reads: list[tuple[int, ...]], fused: list[bool], inlined: list[bool], sizes: list[int]
) -> Facts:
    """Of operations with one result each, numbered after the inputs, all of 8 bytes."""
    inputs, count = 2, len(reads)
    return Facts(
        reads=reads,
        makes=[(inputs + index,) for index in range(count)],
        fused=fused,
        inlined=inlined,
        slow=[False] * count,
        size=sizes,
        nbytes=[8] * (inputs + count),
        taken_in=frozenset(),
    )


@pytest.mark.parametrize("places", [(0, 1, 2, 3, 4, 5), (1, 0, 2, 3, 4, 5), (0, 1, 4, 5, 2, 3)])
def test_two_that_read_products_of_each_other(places: tuple[int, ...]) -> None:
    """`b, a = y.sin(), x.sin(); x2 = x + b @ w; y2 = y + a @ v`: either sum could be in one kernel
    with the sine of what it adds to, but not both."""
    y, x = 0, 1
    steps = {"b": (y,), "a": (x,), "bw": ("b",), "x2": (x, "bw"), "av": ("a",), "y2": (y, "av")}
    names = [list(steps)[place] for place in places]
    number = {name: 2 + place for place, name in enumerate(names)}
    reads = [tuple(number.get(one, one) for one in steps[name]) for name in names]
    fused = [name not in ("bw", "av") for name in names]
    facts = facts_of(reads, fused, [False] * 6, [8] * 6)
    half = Half(facts, list(range(6)), {number["x2"], number["y2"]}, {x, y})
    together = sorted(sorted(names[index] for index in kernel) for kernel in half.kernels)
    assert together in (
        [["a"], ["av"], ["b", "y2"], ["bw"], ["x2"]],
        [["a", "x2"], ["av"], ["b"], ["bw"], ["y2"]],
    )


@st.composite
def halves(draw: st.DrawFn) -> Half:
    count = draw(st.integers(1, 24))
    reads = [
        tuple(draw(st.sets(st.integers(0, 1 + index), min_size=1, max_size=3)))
        for index in range(count)
    ]
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    fused = draw(flags)
    inlined = [a and b for a, b in zip(fused, draw(flags), strict=True)]
    sizes = draw(st.lists(st.sampled_from([8, 16]), min_size=count, max_size=count))
    stays = draw(st.sets(st.integers(0, 1 + count), max_size=3))
    return Half(facts_of(reads, fused, inlined, sizes), list(range(count)), stays, {0, 1})


@given(half=halves())
def test_each_kernel_runs_after_those_that_it_needs(half: Half) -> None:
    done: set[int] = set()
    for kernel in half.kernels:
        made = {half.maker[s] for i in kernel for s in half.reads[i] if s in half.maker}
        assert made <= done.union(kernel)
        done.update(kernel)
    assert done == set(half.reads)
