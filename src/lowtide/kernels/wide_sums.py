"""How AVX-512's float32 kernels divide the gradient of a convolution's parameter among threads.

Problem: threads that go through different images, or rows, each sum a gradient of their own, and on
eight threads these take several times what a step on one shows. Invariant: oneDNN's choice (the
`balance` of each kernel, version 3.12), which weighs what a thread reads against what it writes,
repeated step by step. Imports avx2_scratch and blocks. Rejected: as many partial gradients as
threads, which for large parameters, whose channels threads divide instead, is all of them too many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from lowtide.kernels.avx2_scratch import Geometry
from lowtide.kernels.blocks import CHANNEL_BLOCK, FLOAT, up

_UNBLOCKED = 4  # fewer channels than this are no block
_ROWS = 9  # for each so many rows of an image, another thread may have a part of it
_SUMS, _PRODUCTS = 8, 12  # what writing a number costs, in numbers read
_MOST_POINTS = 256  # of a block that a pointwise kernel sums over


class _Work(NamedTuple):
    """What threads divide."""

    parts: int
    """Images, or parts of them, that are summed over."""
    most: int
    """Threads that may have parts of their own."""
    made: int
    """Blocks of channels of the gradient that is given."""
    read: int
    """Blocks of channels of the input."""


def partial_gradients(g: Geometry, last: bool) -> int:
    """Bytes of the gradients that threads sum besides the parameter's own, with the bias's, in the
    kernel for any convolution. `last`: its tensors are channels-last."""
    width = g.channels if g.channels < _UNBLOCKED and g.groups == 1 else CHANNEL_BLOCK
    by_row = not (g.volume or last) and g.dilation[1] == 1 and g.given[1] > _ROWS
    rows = g.given[1] if by_row else 1
    work = _Work(
        g.batch * rows,
        g.batch * g.given[0] * max(1, rows // _ROWS),
        -(-g.results // CHANNEL_BLOCK),
        -(-g.channels // width),
    )
    images = g.batch * (g.read[1] if by_row else 1)
    slides = width * math.prod(g.read) // (g.read[1] if by_row else 1)
    points = CHANNEL_BLOCK * math.prod(g.given) // rows

    def memory(sharing: int, made: int, read: int) -> int:
        reading = -(-images // sharing) * -(-work.read // read) * slides
        for stride in g.stride:
            reading //= stride
        reading += -(-work.parts // sharing) * -(-work.made // made) * points
        block = width * CHANNEL_BLOCK * g.points
        return reading + _SUMS * -(-work.made // made) * -(-work.read // read) * block

    sharing = _sharing(g, work, memory, compute=True)
    if g.threads // 2 < sharing < g.threads:
        sharing = min(work.most, g.threads)
    bias = g.groups * up(g.results, CHANNEL_BLOCK)
    return (sharing - 1) * FLOAT * (bias + bias * up(g.channels, width) * g.points)


def pointwise_gradients(g: Geometry) -> int:
    """The same for the kernel of pointwise convolutions."""
    points = math.prod(g.given)  # those that are read are gathered first
    block = _divider(points, 7, 16, largest=True)
    if points % block:
        block = _divider(g.given[2], 4, g.given[2], largest=False)
    if block > _MOST_POINTS:
        block = 1
    parts = g.batch * -(-points // block)
    made, read = (-(-channels // CHANNEL_BLOCK) for channels in (g.results, g.channels))
    work = _Work(parts, parts, made, read)

    def memory(sharing: int, made: int, read: int) -> int:
        summed = -(-parts // sharing) * CHANNEL_BLOCK * block
        blocks = -(-work.made // made), -(-work.read // read)
        return summed * sum(blocks) + _PRODUCTS * math.prod(blocks) * CHANNEL_BLOCK**2

    sharing = _sharing(g, work, memory, compute=False)
    if g.threads // 2 < sharing < g.threads:
        sharing = min(g.batch, g.threads)
    return (sharing - 1) * FLOAT * math.prod((made, read)) * CHANNEL_BLOCK**2


def _sharing(
    g: Geometry, work: _Work, memory: Callable[[int, int, int], int], *, compute: bool
) -> int:
    """How many threads make the same part of the gradient: those of the way that moves the least
    memory, or, with `compute`, of one that computes less and moves not much more, or far less."""
    if g.threads < g.groups:
        return 1
    free = g.threads // g.groups
    ways = [
        (sharing, made, min(free // sharing // made, work.read))
        for sharing in range(1, min(free, work.most) + 1)
        for made in range(1, min(free // sharing, work.made) + 1)
    ]
    best, moved = (1, 1, 1), memory(1, 1, 1)
    for way in ways:
        cost = memory(*way)
        if cost <= moved:
            best, moved = way, cost
    if not compute:
        return best[0]

    def computed(sharing: int, made: int, read: int) -> int:
        return -(-work.parts // sharing) * -(-work.made // made) * -(-work.read // read)

    least = computed(*best)
    for way in ways:
        cost = computed(*way)
        if (cost <= least and memory(*way) < 1.1 * moved) or 4 * cost <= 3 * least:
            best, least = way, cost
    return best[0]


def _divider(value: int, least: int, most: int, *, largest: bool) -> int:
    """The number between two bounds whose multiple exceeds a value by the smallest share of it; of
    several, the largest or the smallest."""
    most = max(1, min(most, value))
    least = max(1, min(least, most))
    loss = {each: (up(value, each) - value) / up(value, each) for each in range(least, most + 1)}
    smallest = min(loss.values())
    fitting = [each for each, share in loss.items() if share == smallest]
    return max(fitting) if largest else min(fitting)
