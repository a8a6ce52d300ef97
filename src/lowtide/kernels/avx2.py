"""Workspace of oneDNN's float32 convolutions on CPUs with AVX2 and no AVX-512.

Problem: blocks have eight channels there, and many convolutions run in other kernels, especially
for gradients. Invariant: `avx2_kernels` says which kernel runs and in which layouts. This module
adds what torch does around it: it copies tensors of other layouts, and copies the kernel's result
into a tensor with the layout of the input. `width` is eight, or sixteen for kernels that there are
with AVX-512 too, which `wide_products` tells. Imports `avx2_kernels`, blocks, `_compat`.
Rejected: one flow for both instruction sets, whose formulas agree for few kernels.
"""

from __future__ import annotations

import math

import torch

from lowtide import _compat
from lowtide.kernels.avx2_kernels import (
    Kernel,
    backward,
    forward,
    of_parameter,
    unfolding_backward,
    unfolding_forward,
    unfolding_parameter,
)
from lowtide.kernels.avx2_scratch import WIDTH, Geometry
from lowtide.kernels.blocks import CHANNEL_BLOCK, nbytes, padded
from lowtide.kernels.unfolding import Convolved, Options, channels_made


def narrow_workspace(call: Convolved, last: bool, unfolds: bool = False, width: int = WIDTH) -> int:
    """As `convolution.convolution_workspace`, without the copies of tensors whose layout no kernel
    reads.

    Args:
        last: whether the input is channels-last.
        width: channels in a block.
        unfolds: whether to assume that only the unfolding kernel, which takes any shape, exists.
    """
    source, weight, out, options, given, passes, biased = call
    turned = _turned(weight) if last else 0
    if given is None:
        g = geometry(source, weight, options, out // source.element_size(), width)
        kernel = _maker(g, options.transposed, last, unfolds, True)
        read = nbytes(source)
        sides = (kernel.given, kernel.read) if options.transposed else (kernel.read, kernel.given)
        made = channels_made(weight, options)
        if options.transposed and biased and not adds_bias(kernel, g):  # added to a copy
            kernel = kernel._replace(scratch=kernel.scratch + _laid(kernel.read, out, made, width))
        return (
            turned
            + call_bytes(kernel, sides, (read, source.shape[1]), (out, made), last, width)
            - out
        )
    g = geometry(source, weight, options, given.numel(), width)
    into, parameter = nbytes(source), nbytes(weight)
    returned = parameter + (into if passes else 0)
    one, other = (into, source.shape[1]), (nbytes(given), given.shape[1])
    first = 0
    if passes:
        kernel = _maker(g, not options.transposed, last, unfolds)
        sides = (kernel.read, kernel.given) if options.transposed else (kernel.given, kernel.read)
        first = call_bytes(kernel, sides, other, one, last, width)
    biased = biased and not options.transposed  # its bias is summed up outside of the kernel
    kernel = unfolding_parameter(g, last) if unfolds else of_parameter(g, last, biased)
    sides = (kernel.given, kernel.read) if options.transposed else (kernel.read, kernel.given)
    second = kernel.scratch + sum(
        _copy(side, *tensor, last, width) for side, tensor in zip(sides, (one, other), strict=True)
    )
    second = kernel.parameter + max(second, (2 if last else 1) * parameter)
    return turned + max(first, second + (into if passes else 0)) - returned


def _maker(g: Geometry, back: bool, last: bool, unfolds: bool, transposed: bool = False) -> Kernel:
    """The kernel that makes a tensor: the larger one (`read`) if `back`, else the other."""
    if unfolds:
        return unfolding_backward(g, last) if back else unfolding_forward(g, last)
    return backward(g, last, transposed) if back else forward(g, last)


def adds_bias(kernel: Kernel, g: Geometry) -> bool:
    """Whether a kernel itself adds the bias to a transposed convolution's result."""
    return kernel.name == "products" or (kernel.name == "strided" and g.even())


def call_bytes(
    kernel: Kernel,
    sides: tuple[str, str],
    read: tuple[int, int],
    made: tuple[int, int],
    last: bool,
    width: int,
) -> int:
    """Bytes of a call that reads one tensor and makes another, copies included.

    `read` and `made` are (bytes, channels) of the two, `sides` their layouts.
    """
    nbytes, channels = made
    before = kernel.scratch + kernel.parameter + _copy(sides[0], *read, last, width)
    if last and sides[1] == "last":  # made in place
        return nbytes + before
    laid = _laid(sides[1], nbytes, channels, width)
    # torch copies any result; a channels-last one is copied once more to be channels-first.
    copies = nbytes * (2 if sides[1] == "last" and channels > 1 else 1)
    return laid + max(before, copies)


def _copy(layout: str, nbytes: int, channels: int, last: bool, width: int) -> int:
    """The copy of a tensor that does not have the layout that a kernel reads."""
    if layout == ("last" if last else "plain") or (layout == "last" and channels == 1):
        return 0
    return _laid(layout, nbytes, channels, width)


def _laid(layout: str, nbytes: int, channels: int, width: int) -> int:
    return padded(nbytes, channels, width) if layout == "blocked" else nbytes


def _turned(weight: torch.Tensor) -> int:
    """The copy of a parameter in the input's channels-last format, made before anything else."""
    form = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    return 0 if weight.is_contiguous(memory_format=form) else nbytes(weight)


def geometry(
    source: torch.Tensor, weight: torch.Tensor, options: Options, made: int, width: int
) -> Geometry:
    """The geometry of a convolution; `made`: elements of its result."""
    dims = source.dim() - 2
    batch, channels, *space = source.shape
    stride, dilation, padding = (
        tuple(values) * (dims if len(values) == 1 else 1)
        for values in (options.stride, options.dilation, options.padding)
    )
    kernel, groups = tuple(weight.shape[2:]), options.groups
    results = channels_made(weight, options)
    rows = list(zip(space, kernel, stride, dilation, padding, strict=True))
    if options.transposed:
        channels, results = results, channels
        # A transposed convolution's `output_padding` is not among the options.
        read = [(size - 1) * s + d * (k - 1) + 1 - 2 * p for size, k, s, d, p in rows]
        read = _fitted(read, made // max(1, batch * channels), stride)
        given = space
    else:
        read, given = space, [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in rows]
    lacking = (1,) * (3 - dims)
    return Geometry(
        batch,
        groups,
        channels // groups,
        results // groups,
        (*lacking, *read),
        (*lacking, *given),
        (*lacking, *kernel),
        (*lacking, *stride),
        (*lacking, *dilation),
        (*(0,) * len(lacking), *padding),
        dims == 3,
        torch.get_num_threads(),
        _compat.second_cache(),
        width,
        CHANNEL_BLOCK if _compat.onednn_instructions() == "AVX512" else WIDTH,
    )


def _fitted(size: list[int], points: int, stride: tuple[int, ...]) -> list[int]:
    """Sizes, each enlarged by less than its stride until all together have `points` points."""
    for more in range(max(stride)):
        larger = [n + min(more, s - 1) for n, s in zip(size, stride, strict=True)]
        if math.prod(larger) >= points:
            return larger
    return size
