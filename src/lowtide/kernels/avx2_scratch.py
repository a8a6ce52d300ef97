"""Scratchpads of oneDNN's float32 convolutions on CPUs with AVX2 and no AVX-512.

Problem: besides copies of its tensors, a kernel allocates parts of images, partial sums per thread
and lists of products. Invariant: bytes as oneDNN (3.12) reserves them, which agree with measured
allocations; where a size depends on a search for the best blocks, the largest possible one. Imports
blocks. Rejected: a share of the tensors, which is many times too large or too small
where images are unfolded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lowtide.kernels.blocks import FLOAT, PAGE, up

WIDTH = 8  # channels in a block
_BATCHED = 40  # bytes for each entry of a batch of small products
_MANY_ROWS, _FEW_POINTS = 512, 256  # with fewer points per image and thread, threads divide a batch
_LARGE_PRODUCT = 64 << 10  # or with fewer multiplications per thread than this
_MANY_POINTS = 64  # a kernel with at least so many points may have its threads divide images
# The most that a kernel takes to unfold images: so many bytes, and so many times its tensors.
_MOST = 1 << 30
_MOST_TIMES = 15


class Geometry(NamedTuple):
    """A convolution in three dimensions; dimensions that it lacks have size 1."""

    batch: int
    groups: int
    channels: int
    """Per group, of what the kernel slides over: the input, or a transposed one's result."""
    results: int
    """Per group, of the other tensor."""
    read: tuple[int, ...]
    """Sizes of what the kernel slides over."""
    given: tuple[int, ...]
    """Sizes of the other tensor, which has one point for each position of the kernel."""
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    volume: bool
    threads: int
    cache: int
    """Bytes of each core's second-level cache."""
    width: int = WIDTH
    """Channels in a block of the kernels that are no plain products with unfolded images."""
    lanes: int = WIDTH
    """Numbers in a vector register."""

    @property
    def reach(self) -> list[int]:
        """The extent of the dilated kernel in each dimension."""
        return [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]

    @property
    def ends(self) -> list[int]:
        """The padding at the end of each dimension; negative if the last points are not read."""
        rows = zip(self.given, self.stride, self.reach, self.read, self.padding, strict=True)
        return [(out - 1) * s + reach - size - pad for out, s, reach, size, pad in rows]

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 == self.channels == self.results

    @property
    def points(self) -> int:
        return math.prod(self.kernel)

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return self.groups * self.channels * self.results * self.points

    def pads_little(self) -> bool:
        """Whether at each position the kernel reads at least one point that is not padding."""
        rows = zip(self.reach, self.padding, self.ends, strict=True)
        return all(reach > max(pad, end) for reach, pad, end in rows)

    def whole(self) -> bool:
        """Whether channels may be in blocks; with several groups they cannot be padded to one."""
        return self.groups == 1 or not (self.channels % self.width or self.results % self.width)

    def pointwise(self) -> bool:
        if self.groups > 1 or self.points > 1 or max(self.padding) > 0:
            return False
        if max(self.stride) == 1:
            return self.read == self.given
        rows = zip(self.given, self.stride, self.read, strict=True)
        return not self.volume and all(out * s == size for out, s, size in rows)

    def even(self) -> bool:
        """Whether the strides divide the sizes of what the kernel slides over."""
        return not any(size % s for size, s in zip(self.read, self.stride, strict=True))

    def gathers(self) -> bool:
        """Whether the points that a pointwise kernel reads are gathered first."""
        return max(self.stride) > 1


# ---------------------------------------------------------------------------- scratchpads


def _paged(g: Geometry, nbytes: int) -> int:
    return g.threads * nbytes + PAGE


def list_of_products(g: Geometry) -> int:
    """The list of products of each thread."""
    listed = up(up(g.points * _BATCHED, PAGE), _BATCHED)
    return _paged(g, listed)


def strided_scratch(g: Geometry) -> int:
    """On each thread: an image of the incoming gradient with margins as wide as the kernel reaches,
    a flag for each of its rows, and a row of the result if the stride does not divide it."""
    image = g.groups * g.results
    edges = zip(g.given, g.reach, g.padding, g.ends, g.stride, strict=True)
    for size, reach, pad, end, stride in edges:
        image *= size + max(0, reach - 1 - pad) // stride + max(0, reach - 1 - end) // stride
    scratch = list_of_products(g) + _paged(g, up(image, PAGE) * FLOAT)
    scratch += _paged(g, up(g.read[0] * g.read[1] * g.groups, PAGE))
    if g.read[2] % g.stride[2]:
        row = up(g.read[2], g.stride[2]) * g.stride[2] * g.channels * g.groups
        scratch += _paged(g, up(row, PAGE) * FLOAT)
    return scratch


def gathered(g: Geometry, channels: int) -> int:
    """The points that a strided pointwise kernel reads, of one image per thread."""
    return g.threads * channels * math.prod(g.given) * FLOAT if g.gathers() else 0


def pointwise_sums(g: Geometry, last: bool) -> int:
    one, other = -(-g.channels // g.width), -(-g.results // g.width)
    small = math.prod(g.read) <= 1024 and g.channels % g.width == 0
    into = _halved(one, 17 if last else 9) if small or not last else one
    out = _halved(other, 32) if not last or g.results % g.width == 0 else other
    job = into * out * g.width * g.width
    jobs = -(-one // into) * -(-other // out)
    points = g.batch * math.prod(g.given)
    parts = shared(g.threads, job, jobs, points, g.threads * job * 8)
    points_read = gathered(g, g.channels if last else into * g.width)
    return points_read + summed(parts, 0)


def _halved(blocks: int, most: int) -> int:
    while blocks > most:
        if blocks % 2 and blocks % 3:
            break
        blocks //= 3 if blocks % 2 else 2
    return blocks


def summed(parts: tuple[int, int, int], own: int) -> int:
    """Bytes of the partial sums that the threads of a group make of the same part of a gradient;
    `own` is 1 if one thread of each group writes to the result instead."""
    groups, threads, size = parts
    return groups * (threads - own) * size * FLOAT + 3 * PAGE if threads > 1 else 0


def shared(threads: int, job: int, jobs: int, sums: int, most: int) -> tuple[int, int, int]:
    """How threads divide a reduction (oneDNN's `reduce_balancer_t`): the number of groups, the
    threads in a group, and the elements of a group's part."""
    least, limit = max(1, jobs // threads), max(1, most // (threads * job))
    groups = min(jobs // least, threads)
    best = (groups, min(threads // groups, sums), -(-jobs // groups))
    cost = jobs * job * sums
    for groups in range(threads, 0, -1):
        fewest = least if groups == threads else max(least, jobs // (groups + 1) + 1)
        if fewest >= jobs or min(jobs // fewest, threads) != groups:
            continue
        together, share = min(threads // groups, sums), -(-jobs // groups)
        if together > 1 and share > limit:
            continue
        work = job * share * (-(-sums // together) + (together > 1))
        if work < cost:
            best, cost = (groups, together, share), work
    groups, together, share = best
    return groups, together, share * job


# ---------------------------------------------------------------------------- unfolded images


def _columns(g: Geometry) -> int:
    """Bytes of an unfolded image, one slice at a time."""
    if g.points == max(g.stride) == 1 and g.read == g.given:
        return 0
    return g.channels * g.points * g.given[1] * g.given[2] * FLOAT


def unfolded_forward(g: Geometry, last: bool) -> int:
    """An upper bound: large images are unfolded in parts that fit a cache, found by a search that
    is not repeated here."""
    image = math.prod(g.read) * g.channels * FLOAT if last else 0
    columns, threads, images = _columns(g), g.threads, g.batch * g.groups
    vectors = images * math.prod(g.given) // g.lanes
    if vectors >= threads and not last and not g.volume:
        part = g.cache * 33 // 32
        if g.lanes > WIDTH and vectors >= 2 * threads and columns <= part:
            threads = min(threads, images)  # none is divided
        columns = min(columns, part)
    return threads * (columns + image)


def unfolded_backward(g: Geometry, last: bool) -> int:
    columns, made = _columns(g), 0
    if last:
        columns *= g.given[0]
        made = math.prod(g.read) * g.channels * FLOAT if g.groups > 1 else 0
    image, work = g.read[1] * g.read[2], g.groups * g.batch
    inner = -(-image // g.lanes) * -(-g.channels // g.lanes)
    spread = _spread(work, g.threads) >= _spread(inner, g.threads)
    if last:
        fits = not g.volume and (g.depthwise or (image // g.threads < 64 and g.batch > 1))
    else:
        rows = g.given[1] * g.given[2] // g.threads < _MANY_ROWS
        fits = (rows or g.points < _MANY_POINTS) and (g.batch > 1 or g.groups > 2)
    small = image * g.channels * g.results // g.threads < _LARGE_PRODUCT
    threads = g.threads if fits and (spread or small) else 1
    return _within(g, threads * made, threads, columns, 10)


def unfolded_parameter(g: Geometry, last: bool) -> int:
    """Copies of the gradient: oneDNN takes its bytes for a number of floats, so four per thread."""
    columns, image = _columns(g), math.prod(g.read) * g.channels * FLOAT if last else 0
    copies = g.elements * FLOAT * FLOAT
    threads = threads_that_sum(g, last)
    if last:  # above the limit, a kernel without any copies runs instead
        taken = threads * (copies + columns + image)
        return taken if taken <= _limit(g) else 0
    return _within(g, threads * copies, threads, columns, 20)


def threads_that_sum(g: Geometry, last: bool) -> int:
    """How many threads unfold images of a batch, each for a gradient of its own."""
    each = g.elements * FLOAT * FLOAT
    if last:
        each += _columns(g) + math.prod(g.read) * g.channels * FLOAT
    else:
        each += g.channels * g.points * g.lanes * FLOAT
    few = g.given[1] * g.given[2] // g.threads < _FEW_POINTS
    fits = few and (g.batch > 1 or g.groups > 2) and each * g.threads < _limit(g)
    return g.threads if fits else 1


def _spread(work: int, threads: int) -> float:
    return work / up(work, threads)


def _limit(g: Geometry) -> int:
    read, given = g.channels * math.prod(g.read), g.results * math.prod(g.given)
    tensors = FLOAT * (g.batch * g.groups * (read + given) + g.elements)
    return min(_MOST, _MOST_TIMES * g.threads * tensors)


def _within(g: Geometry, taken: int, threads: int, columns: int, part: int) -> int:
    """Columns above the limit are made piece by piece, each a `part`-th of the memory left."""
    left = _limit(g) - taken
    if left < threads * columns:
        each = FLOAT * g.channels * g.points
        points = max(g.lanes, left // (each * threads) // part)
        columns = min(columns, points * each)
    return taken + threads * columns
