"""Which kernels oneDNN uses for float32 convolutions on CPUs with AVX2 and no AVX-512.

Problem: what a convolution allocates depends on the kernel that runs it: the layouts of its tensors
and its parameter, and its scratchpad. Invariant: the choice is oneDNN's
(`cpu_convolution_list.cpp` and each kernel's `init_conf`); it was checked against the output of
`ONEDNN_VERBOSE` of version 3.12 for some thousand random convolutions in one to three dimensions.
Where a kernel searches for the best blocks, the largest possible ones are assumed. Imports
`avx2_scratch` and blocks.
Rejected: the formulas for AVX-512 with other constants: it has other kernels, not just wider ones.
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.kernels.avx2_scratch import (
    WIDTH,
    Geometry,
    gathered,
    list_of_products,
    pointwise_sums,
    shared,
    strided_scratch,
    summed,
    unfolded_backward,
    unfolded_forward,
    unfolded_parameter,
)
from lowtide.kernels.blocks import FLOAT, up
from lowtide.kernels.wide_sums import partial_gradients, pointwise_gradients

_REGISTERS = 15
_UNROLLED = 3  # points of a row that a kernel makes at once; its padding may not be larger
UNROLLED_WIDE = 28  # with AVX-512, where strides have to divide them
_UNROLLED_DEPTHWISE = 4
_WIDEST = 14  # the direct kernel makes the gradient of parameters narrower than this only
CHAINED = 128  # scratchpad bytes of a kernel that calls another one
_TOO_MANY_POINTS = 28160  # over the square of the share of a block that is filled
_MADE_AT_ONCE, _UNROLLED_POINTS, _PADDINGS = 28, 370, (7, 9, 10)  # see `_reaches_far`
_GATHERED = 18  # blocks of channels that a pointwise kernel gathers for a gradient


class Kernel(NamedTuple):
    """A kernel: the layouts that it needs, and what it allocates."""

    name: str
    read: str
    """The layout of the larger tensor: "blocked", "plain" (channels first) or "last"."""
    given: str
    """The layout of the tensor with one point for each position of the kernel."""
    parameter: int
    """Bytes of the parameter in the kernel's layout; zero if it is read as it is."""
    scratch: int = 0
    """Bytes of its scratchpad."""


# ---------------------------------------------------------------------------- which kernel


def forward(g: Geometry, last: bool) -> Kernel:
    """The kernel that makes `given` from `read`; `last`: the tensors are channels-last."""
    free = "last" if last else "blocked"
    rows = g.pads_little() and g.padding[2] <= min(_UNROLLED_DEPTHWISE, g.given[2])
    rows = rows and g.depthwise and not g.volume
    if rows and not last:
        return Kernel("depthwise", "blocked", "blocked", _by_channel(g))
    if g.depthwise and max(g.dilation) == 1 and (g.volume or last):
        return Kernel("depthwise products", "last", "last", _by_channel(g))
    if rows:
        return Kernel("depthwise", free, free, _by_channel(g))
    if last and not g.depthwise:
        return Kernel("products", "last", "last", for_products(g, False), list_of_products(g))
    if g.pointwise():
        blocks = g.channels + -g.channels % g.width
        return Kernel("pointwise", free, free, in_blocks(g), gathered(g, blocks))
    flat = g.channels < g.width
    if flat and g.groups > 1:
        fits = (last or g.results % g.width == 0) and g.channels * g.groups < g.width
    else:
        fits = last or g.whole()
    wide = g.kernel[2] > 7 and max(g.padding[1:]) > 0 and max(g.stride[1:]) > 1
    at_once, wide = (_UNROLLED, wide) if g.width == WIDTH else (UNROLLED_WIDE, False)
    wide = wide or (g.width > WIDTH and not last and _reaches_far(g))
    if fits and g.pads_little() and g.padding[2] <= min(at_once, g.given[2]) and not wide:
        parameter = in_blocks(g, flat)
        return Kernel("direct", "plain" if flat and not last else free, free, parameter)
    return unfolding_forward(g, last)


def _reaches_far(g: Geometry) -> bool:
    """Whether AVX-512's direct kernel makes no results of padded rows with such a wide kernel. No
    rule of oneDNN's for this was found: these are the limits that were seen (3.12)."""
    if g.padding[2] == 0 or g.channels < g.width or max(g.dilation) > 1:
        return False
    if g.given[2] < _MADE_AT_ONCE:
        return g.given[2] * g.kernel[2] > _UNROLLED_POINTS
    left, strided = g.given[2] % _MADE_AT_ONCE, g.stride[2] > 1
    short, middle, long = _PADDINGS
    if left < (2 if strided else 6):
        return g.padding[2] >= short
    return g.padding[2] >= (middle if left < 10 and not strided else long)


def backward(g: Geometry, last: bool, transposed: bool) -> Kernel:
    """The kernel that makes `read` from `given`: a gradient, or a `transposed` one's result."""
    free = "last" if last else "blocked"
    if runs_strided(g):
        scratch = strided_scratch(g) + (CHAINED if transposed else 0)
        return Kernel("strided", "last", "last", for_products(g, True), scratch)
    if last and max(g.stride) == 1 and not g.depthwise:
        scratch = list_of_products(g) + CHAINED
        return Kernel("products", "last", "last", for_products(g, True), scratch)
    if g.depthwise and not g.volume and max(g.dilation) == 1 and g.pads_little():
        return Kernel("depthwise", free, free, _by_channel(g))
    if g.pointwise() and not last:
        return Kernel("pointwise", free, free, in_blocks(g), gathered(g, _GATHERED * g.width))
    rows = zip(g.dilation, g.stride, strict=True)
    fits = (last or g.whole()) and all(d == 1 or s == 1 for d, s in rows)
    fits = fits and not (g.channels < g.width and g.kernel[2] > 3 and g.stride[2] > 1)
    fits = fits and g.stride[0] == 1 and g.stride[1] == g.stride[2] and g.pads_little()
    if fits and _row_fits(g):
        return Kernel("direct", free, free, in_blocks(g))
    return unfolding_backward(g, last)


def runs_strided(g: Geometry) -> bool:
    """Whether the strided kernel makes `read`. It refuses kernels of many points with few channels,
    which it would run too slowly. For between half and all of so many it may run or not; it is
    assumed, as it takes more memory than the other."""
    few = g.groups > 1 and g.results <= g.width
    few = few or g.points * g.width**2 > _TOO_MANY_POINTS * min(g.channels, g.width) ** 2
    return max(g.stride) > 1 == max(g.dilation) and not few


def of_parameter(g: Geometry, last: bool, biased: bool) -> Kernel:
    """The kernel that makes the parameter's gradient from `read` and `given`."""
    free = "last" if last else "blocked"
    if _depthwise_parameter(g):
        blocks = up(g.groups, g.width)
        sharing = g.threads if last else min(max(1, g.threads // (blocks // g.width)), g.batch)
        again = (sharing - 1) * blocks * g.points * FLOAT
        return Kernel("depthwise", free, free, _by_channel(g), again)
    numbers = shared(g.threads, g.width, g.groups * -(-g.results // g.width), g.batch, 1 << 21)
    bias = summed(numbers, 1) if biased else 0
    if g.pointwise():
        if g.width == WIDTH:
            scratch = pointwise_sums(g, last) + bias
        else:
            scratch = gathered(g, g.channels) + pointwise_gradients(g)
        return Kernel("pointwise", free, free, in_blocks(g), scratch)
    ends = [max(0, end) for end in g.ends]
    flat = g.channels == 3
    deep = (
        g.padding[0] == ends[0] == 0 or g.width > WIDTH
    )  # AVX2's makes no volumes padded in depth
    fits = deep and max(g.dilation) == 1 and g.kernel[2] < _WIDEST
    rows = zip(g.reach[1:], g.padding[1:], ends[1:], strict=True)
    fits = fits and all(reach > max(pad, end) for reach, pad, end in rows)
    within = g.kernel[0] <= g.read[0] and g.kernel[1] <= g.read[1]
    fits = fits and (within or g.width > WIDTH)
    fits = fits and (g.groups == 1 or (3 not in (g.channels, g.channels * g.groups)))
    fits = fits and (flat or last or g.whole())
    if fits:
        scratch = direct_sums(g) + bias if g.width == WIDTH else partial_gradients(g, last)
        read = "plain" if flat and not last else free
        return Kernel("direct", read, free, in_blocks(g, flat), scratch)
    return unfolding_parameter(g, last)


def direct_sums(g: Geometry) -> int:
    """Bytes of the partial gradients of the threads in the direct kernel."""
    flat = g.channels == 3
    parts = shared(
        g.threads,
        g.points * (3 if flat else g.width) * g.width,
        g.groups * -(-g.results // g.width) * (1 if flat else -(-g.channels // g.width)),
        g.batch * g.given[0],
        1 << 21,
    )
    return summed(parts, 1)


def _depthwise_parameter(g: Geometry) -> bool:
    if not g.depthwise or g.volume or max(g.dilation) > 1:
        return False
    ends = [max(0, end) for end in g.ends]
    for pads in (g.padding, ends):
        if any(pad > k // 2 for pad, k in zip(pads[1:], g.kernel[1:], strict=True)):
            return False
        if pads[1] > 1 and pads[1] % g.stride[1]:
            return False
    rows = g.read[1] >= g.kernel[1] + -g.padding[1] % g.stride[1]
    return rows and g.stride[2] <= g.kernel[2] <= 3


def _row_fits(g: Geometry) -> bool:
    """Whether the registers hold a part of a row long enough to contain the padding at each end."""
    size, stride = g.read[2], g.stride[2]
    over = max(0, (g.reach[2] - 1 - g.padding[2]) // stride)
    most, part = 0, 1
    for blocks in range(1, 5):
        if -(-g.channels // g.width) % blocks:
            continue
        points = stride
        while points * blocks + points // stride <= _REGISTERS and points < size + stride:
            here = min(points, size)
            products = -(-here // stride) * blocks
            more = products > most or (products == most and part < here)
            if more and (over * stride <= here or here == size):
                most, part = products, here
            points += stride
    rest, end = size % part, g.ends[2]
    left = max(0, (g.reach[2] - 1 - end - rest) // stride)
    uneven = size > part and (part % stride > 0 or end + rest < 0)
    return most > 0 and left * stride <= part and not uneven


# ---------------------------------------------------------------------------- the fallback


def unfolding_forward(g: Geometry, last: bool) -> Kernel:
    """In place of `forward`: a product with the unfolded image, for any shape and on any CPU."""
    plain = "last" if last else "plain"
    return Kernel("unfolding", plain, plain, _as_is(g, last), unfolded_forward(g, last))


def unfolding_backward(g: Geometry, last: bool) -> Kernel:
    """In place of `backward`."""
    plain = "last" if last else "plain"
    return Kernel("unfolding", plain, plain, _as_is(g, last), unfolded_backward(g, last))


def unfolding_parameter(g: Geometry, last: bool) -> Kernel:
    """In place of `of_parameter`."""
    plain = "last" if last else "plain"
    return Kernel("unfolding", plain, plain, g.elements * FLOAT, unfolded_parameter(g, last))


# ---------------------------------------------------------------------------- parameters


def in_blocks(g: Geometry, flat: bool = False) -> int:
    channels = g.channels if flat else up(g.channels, g.width)
    return g.groups * channels * up(g.results, g.width) * g.points * FLOAT


def _by_channel(g: Geometry) -> int:
    return up(g.groups, g.width) * g.points * FLOAT


def _as_is(g: Geometry, last: bool) -> int:
    return g.elements * FLOAT if last else 0


def for_products(g: Geometry, back: bool) -> int:
    """Bytes of the parameter for a product, whose results are in blocks of one to four registers of
    channels.

    For more channels than four registers hold, oneDNN searches for the better of blocks of three
    and of four. The larger size is assumed: at most an eighth more than the true one (a fifth, for
    80 channels). A size that is over 30 % more than the channels was never seen."""
    made, of = (g.channels, g.results) if back else (g.results, g.channels)
    fits = up(made, g.width)
    if g.width > WIDTH:  # blocks of three and of four registers are taken only if they do not pad
        fits = up(made, 2 * g.width) if made > g.width else fits
        return g.groups * fits * of * g.points * FLOAT
    if made > 4 * g.width:
        least, most = sorted((up(made, 3 * g.width), up(made, 4 * g.width)))
        fits = most if 10 * most <= 13 * made else least
    return g.groups * fits * of * g.points * FLOAT
