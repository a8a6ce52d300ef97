"""Which kernels oneDNN has for float32 convolutions on CPUs with AVX2 and no AVX-512.

Problem: what a convolution takes depends on the kernel that runs it: the layout of its tensors, of
its parameter, and what it keeps for itself. Invariant: the choice is oneDNN's (of its
`cpu_convolution_list.cpp` and each kernel's `init_conf`), and is the one that `ONEDNN_VERBOSE` of
3.12 prints, for some thousand random convolutions of one to three dimensions; where a kernel
searches for the best blocks, the most that it may choose is taken. Imports `avx2_scratch`.
Rejected: the formulas of AVX-512 with other constants: it has other kernels, not only wider ones.
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.kernels.avx2_scratch import (
    FLOAT,
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
    up,
)

_REGISTERS = 15
_UNROLLED = 3  # points of a row that a kernel makes at once, and that its padding may not exceed
_UNROLLED_DEPTHWISE = 4
_WIDEST = 14  # no kernel of its own for the gradient of a parameter that is as wide
_CHAINED = 128  # bytes that a kernel has which runs another one
_TOO_MANY_POINTS = 440
_GATHERED = 18  # blocks of channels that a pointwise kernel brings together for a gradient


class Kernel(NamedTuple):
    """What one is given and takes."""

    name: str
    read: str
    """The layout of the larger tensor: "blocked", "plain" (channels first) or "last"."""
    given: str
    """The layout of the one with a number for each place that the kernel stops at."""
    parameter: int
    """Bytes of the parameter in its layout; zero where it is read as it is."""
    scratch: int = 0


# ---------------------------------------------------------------------------- which kernel


def forward(g: Geometry, last: bool = False) -> Kernel:
    """The kernel that makes `given` from `read`; `last`: where their channels are last."""
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
        return Kernel("products", "last", "last", _for_products(g, False), list_of_products(g))
    if g.pointwise():
        blocks = g.channels + -g.channels % WIDTH
        return Kernel("pointwise", free, free, _in_blocks(g), gathered(g, blocks))
    flat = g.channels < WIDTH
    if flat and g.groups > 1:
        fits = (last or g.results % WIDTH == 0) and g.channels * g.groups < WIDTH
    else:
        fits = last or g.whole()
    wide = g.kernel[2] > 7 and max(g.padding[1:]) > 0 and max(g.stride[1:]) > 1
    if fits and g.pads_little() and g.padding[2] <= min(_UNROLLED, g.given[2]) and not wide:
        parameter = _in_blocks(g, flat)
        return Kernel("direct", "plain" if flat and not last else free, free, parameter)
    return unfolding_forward(g, last)


def backward(g: Geometry, last: bool = False, transposed: bool = False) -> Kernel:
    """The kernel that makes `read` from `given`, or of a `transposed` one its result."""
    free = "last" if last else "blocked"
    few = g.groups > 1 and g.results <= WIDTH
    # It refuses what it would be too slow for: few channels of many points. Between 225 and 440
    # times their square it may or may not, and takes more than the other.
    few = few or g.points > _TOO_MANY_POINTS * min(g.channels, WIDTH) ** 2
    if max(g.stride) > 1 == max(g.dilation) and not few:
        scratch = strided_scratch(g) + (_CHAINED if transposed else 0)
        return Kernel("strided", "last", "last", _for_products(g, True), scratch)
    if last and max(g.stride) == 1 and not g.depthwise:
        scratch = list_of_products(g) + _CHAINED
        return Kernel("products", "last", "last", _for_products(g, True), scratch)
    if g.depthwise and not g.volume and max(g.dilation) == 1 and g.pads_little():
        return Kernel("depthwise", free, free, _by_channel(g))
    if g.pointwise() and not last:
        return Kernel("pointwise", free, free, _in_blocks(g), gathered(g, _GATHERED * WIDTH))
    rows = zip(g.dilation, g.stride, strict=True)
    fits = (last or g.whole()) and all(d == 1 or s == 1 for d, s in rows)
    fits = fits and not (g.channels < WIDTH and g.kernel[2] > 3 and g.stride[2] > 1)
    fits = fits and g.stride[0] == 1 and g.stride[1] == g.stride[2] and g.pads_little()
    if fits and _row_fits(g):
        return Kernel("direct", free, free, _in_blocks(g))
    return unfolding_backward(g, last)


def of_parameter(g: Geometry, last: bool = False, biased: bool = False) -> Kernel:
    """The kernel that makes the parameter's gradient from `read` and `given`."""
    free = "last" if last else "blocked"
    if _depthwise_parameter(g):
        blocks = up(g.groups, WIDTH)
        sharing = g.threads if last else min(max(1, g.threads // (blocks // WIDTH)), g.batch)
        again = (sharing - 1) * blocks * g.points * FLOAT
        return Kernel("depthwise", free, free, _by_channel(g), again)
    if g.pointwise():
        scratch = pointwise_sums(g, last)
        return Kernel("pointwise", free, free, _in_blocks(g), scratch)
    ends = [max(0, end) for end in g.ends]
    flat = g.channels == 3
    fits = g.padding[0] == ends[0] == 0 and max(g.dilation) == 1 and g.kernel[2] < _WIDEST
    rows = zip(g.reach[1:], g.padding[1:], ends[1:], strict=True)
    fits = fits and all(reach > max(pad, end) for reach, pad, end in rows)
    fits = fits and g.kernel[0] <= g.read[0] and g.kernel[1] <= g.read[1]
    fits = fits and (g.groups == 1 or (3 not in (g.channels, g.channels * g.groups)))
    fits = fits and (flat or last or g.whole())
    if fits:
        parts = shared(
            g.threads,
            g.points * (3 if flat else WIDTH) * WIDTH,
            g.groups * -(-g.results // WIDTH) * (1 if flat else -(-g.channels // WIDTH)),
            g.batch * g.given[0],
            1 << 21,
        )
        numbers = shared(g.threads, WIDTH, g.groups * -(-g.results // WIDTH), g.batch, 1 << 21)
        scratch = summed(parts, 1) + (summed(numbers, 1) if biased else 0)
        read = "plain" if flat and not last else free
        return Kernel("direct", read, free, _in_blocks(g, flat), scratch)
    return unfolding_parameter(g, last)


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
    """Whether registers are enough for a part of a row, and what is left of it has its own."""
    size, stride = g.read[2], g.stride[2]
    over = max(0, (g.reach[2] - 1 - g.padding[2]) // stride)
    most, part = 0, 1
    for blocks in range(1, 5):
        if -(-g.channels // WIDTH) % blocks:
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


# ---------------------------------------------------------------------------- where there is none


def unfolding_forward(g: Geometry, last: bool) -> Kernel:
    """Instead of any `forward`: a product of the image unfolded, of any shape, on any CPU."""
    plain = "last" if last else "plain"
    return Kernel("unfolding", plain, plain, _as_is(g, last), unfolded_forward(g, last))


def unfolding_backward(g: Geometry, last: bool) -> Kernel:
    """Instead of any `backward`."""
    plain = "last" if last else "plain"
    return Kernel("unfolding", plain, plain, _as_is(g, last), unfolded_backward(g, last))


def unfolding_parameter(g: Geometry, last: bool) -> Kernel:
    """Instead of any `of_parameter`."""
    plain = "last" if last else "plain"
    return Kernel("unfolding", plain, plain, g.elements * FLOAT, unfolded_parameter(g, last))


# ---------------------------------------------------------------------------- parameters


def _in_blocks(g: Geometry, flat: bool = False) -> int:
    channels = g.channels if flat else up(g.channels, WIDTH)
    return g.groups * channels * up(g.results, WIDTH) * g.points * FLOAT


def _by_channel(g: Geometry) -> int:
    return up(g.groups, WIDTH) * g.points * FLOAT


def _as_is(g: Geometry, last: bool) -> int:
    return g.elements * FLOAT if last else 0


def _for_products(g: Geometry, back: bool) -> int:
    """What a product makes is in blocks of one to four registers: of more channels than that, of
    three or four, the best of which it looks for. The larger is taken, at most an eighth more than
    what it is, or a fifth of 80 channels; of those that would be a third larger it never was."""
    made, of = (g.channels, g.results) if back else (g.results, g.channels)
    fits = up(made, WIDTH)
    if made > 4 * WIDTH:
        least, most = sorted((up(made, 3 * WIDTH), up(made, 4 * WIDTH)))
        fits = most if 10 * most <= 13 * made else least
    return g.groups * fits * of * g.points * FLOAT
