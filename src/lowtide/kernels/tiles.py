"""Workspace of half-precision convolutions on CPUs with AMX.

Problem: with AMX, oneDNN runs one family of kernels for nearly all of them: tensors are copied with
their channels last, each thread unrolls an image, and a parameter's gradient is a product of two
transposed copies, summed in float32.
Invariant: the gradient of a parameter is within 2 % and 32 KiB of what was measured for 447 of 532
convolutions in one to three dimensions on one thread (oneDNN 3.12), and too low for 2. How much of
an image is unrolled is decided by searches that are not repeated here; all of it is assumed, so
that the rest errs to the high side. Depthwise convolutions have kernels of AVX-512, see `half`.
Imports unfolding and blocks.
Rejected: the formulas for AVX-512 (`half`), which give a half or a third of it.
"""

from __future__ import annotations

import math

import torch

from lowtide.kernels.blocks import FLOAT, PAGE, nbytes, up
from lowtide.kernels.unfolding import Convolved, Options

_BLOCK = 16  # channels in a block
_TILE = 32  # points in a tile, and channels in a parameter's block
_BATCH = 32  # bytes for each pair of matrices that a call multiplies
_FIXED = 72 << 10  # bytes on each thread, whatever the size
_EACH = 1536  # and for each input channel
_POINTWISE = 24 << 10  # bytes on each thread for pointwise kernels, which unroll nothing
_WIDE = 7  # images with few channels are unrolled along rows for kernels as wide as this
_UNROLLED = 7 / 5  # how much larger they may get
_STRIDED = 3  # how much larger a strided kernel makes an image of whole blocks
_SHORT = 28  # rows of at most so many points are joined for a pointwise kernel


def tiles_workspace(call: Convolved, last: bool) -> int:
    """Bytes besides the results.

    `last`: whether tensors have their channels last, and are read as they are.
    """
    source, weight, out, options, given, passes, _ = call
    if given is None:
        return _slid(source, out, weight, options, not options.transposed, last)
    read, points = (given, source) if options.transposed else (source, given)
    second = _of_parameter(read, points, weight, options, last)
    if not passes:
        return second
    first = _slid(given, nbytes(source), weight, options, options.transposed, last)
    return max(first - nbytes(weight), second)


def _slid(
    read: torch.Tensor,
    made: int,
    weight: torch.Tensor,
    options: Options,
    along: bool,
    last: bool,
) -> int:
    """A kernel that slides over `read`, and makes so many bytes: then they get their own layout.

    `along`: in the direction of a convolution's forward, with its stride and padding.
    """
    copies = 0 if last else _copy(read) + made
    image = _image(read, weight, options, along) * torch.get_num_threads()
    return max(copies + _in_blocks(weight, options.groups) + image, 0 if last else 2 * made)


def _image(read: torch.Tensor, weight: torch.Tensor, options: Options, along: bool) -> int:
    """An image with its margins, on one thread."""
    kernel, channels = weight.shape[2:], read.shape[1] // options.groups
    stride = max(options.stride) if along else 1
    if max(kernel) == stride == 1:
        return _POINTWISE
    reach = [dilation * (n - 1) for n, dilation in zip(kernel, options.dilation, strict=True)]
    margins = options.padding if along else reach
    rows = [size + 2 * margin for size, margin in zip(read.shape[2:], margins, strict=True)]
    if len(rows) > 1:
        rows[-2] += kernel[-2]
    factor, each = 1.0, up(channels, _BLOCK if channels >= _BLOCK else 2)
    if channels < _BLOCK and max(kernel) >= _WIDE:
        factor, each = _UNROLLED, up(channels * kernel[-1], _TILE)
    elif channels >= _BLOCK and stride > 1 and max(kernel) > 1:
        factor = _STRIDED
    unrolled = factor * math.prod(rows) * each * options.groups * read.element_size()
    return _FIXED + _EACH * channels + int(unrolled)


def _of_parameter(
    read: torch.Tensor, points: torch.Tensor, weight: torch.Tensor, options: Options, last: bool
) -> int:
    """The gradient of a parameter: of `read`, what its kernel slides over, and of `points`."""
    groups, threads, half = options.groups, torch.get_num_threads(), read.element_size()
    *deep, wide = read.shape[2:] if read.dim() > 3 else (1, *read.shape[2:])
    *high, row = points.shape[2:] if points.dim() > 3 else (1, *points.shape[2:])
    kernel, padding, stride = weight.shape[2:], options.padding[-1], options.stride[-1]
    plain = max(*kernel, *options.stride) == 1 and max(options.padding) == 0
    if plain and wide <= _SHORT:
        wide, row = wide * deep.pop(), row * high.pop()
    length = up(-(-(wide + 2 * padding) // stride), _TILE) * stride
    short = up(row, _TILE) if row > _TILE else up(row, 2)
    blocks = (-(-tensor.shape[1] // (groups * _BLOCK)) for tensor in (read, points))
    of_read, of_points = (count * groups * _BLOCK for count in blocks)
    transposed = threads * (of_read * length * math.prod(deep)) + up(padding + 1, _TILE)
    transposed += threads * (of_points * short * math.prod(high)) + length * _BLOCK
    volume = math.prod(kernel)
    sums = threads * FLOAT * of_read * (of_points // groups) * volume
    fixed = threads * (up(math.prod(high) * _BATCH, PAGE) + 2 * PAGE)
    padded = last and len(kernel) > 2 and max(options.dilation) > 1 and max(options.padding) > 0
    copies = 0 if last and not padded else _copy(read) + _copy(points)
    return copies + _in_blocks(weight, groups) + half * transposed + sums + fixed


def _in_blocks(weight: torch.Tensor, groups: int) -> int:
    """A copy of a parameter in whole blocks of channels."""
    first, second = weight.shape[0] // groups, weight.shape[1]
    channels = up(first, _BLOCK) * up(second, _TILE)
    return groups * channels * math.prod(weight.shape[2:]) * weight.element_size()


def _copy(tensor: torch.Tensor) -> int:
    """A copy with channels last, which one channel is in any case."""
    return 0 if tensor.shape[1] == 1 else nbytes(tensor)
