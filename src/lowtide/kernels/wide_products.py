"""Float32 convolutions with AVX-512 whose kernels, or those of their scratchpads, AVX2 has too.

Problem: however small its tensors are, a batched product takes lists of products and an image with
margins, by the page: 36 KiB for a strided gradient of 1 KiB. Groups whose channels fill no block,
and images in channels-last format, run in kernels that no formula for AVX-512 was fitted to.
Invariant: which kernel runs is oneDNN's choice (`cpu_convolution_list.cpp`, version 3.12), checked
against some thousand measured random convolutions; the kernels are those known from AVX2, with
blocks of sixteen channels, or of eight where oneDNN falls back to AVX2's own. Imports avx2,
`avx2_kernels`, `avx2_scratch` and blocks. Rejected: counting `scratchpad.LARGEST` alone: a first
step drops values for it, but no limit is refused for it, and so one that is too low was named.
"""

from __future__ import annotations

import math

import torch

from lowtide.kernels.avx2 import adds_bias, call_bytes, geometry, narrow_workspace
from lowtide.kernels.avx2_kernels import (
    CHAINED,
    UNROLLED_WIDE,
    Kernel,
    backward,
    for_products,
    in_blocks,
    runs_strided,
)
from lowtide.kernels.avx2_scratch import WIDTH, Geometry, strided_scratch
from lowtide.kernels.blocks import CHANNEL_BLOCK, nbytes
from lowtide.kernels.unfolding import Convolved, Options, channels_made

_WIDE = ("strided", "direct")
_WIDEST = 14  # the direct kernel handles no wider ones than this
_LEAST = 4  # channels in the smallest block of a direct kernel for groups


def shared_width(
    source: torch.Tensor, weight: torch.Tensor, options: Options, back: bool, last: bool
) -> tuple[int, bool]:
    """Channels in a block of the kernels that AVX2 has too, and whether it is certain that these
    run a convolution, not those that only AVX-512 has; no channels if these do not."""
    into, made = weight.shape[1], weight.shape[0] // max(1, options.groups)
    by_channel = options.groups > 1 and into == 1 and weight.shape[0] == source.shape[1]
    if options.groups > 1 and not by_channel and not options.transposed:
        if last:
            return (0, False) if back else (CHANNEL_BLOCK, True)
        if not into % CHANNEL_BLOCK and not made % CHANNEL_BLOCK:
            return (0, False) if back else (CHANNEL_BLOCK, True)
        return _LEAST if _in_fours(weight, options) and not back else WIDTH, True
    if last or not back or by_channel:
        return CHANNEL_BLOCK, True
    odd = max(options.stride) > 1 or math.prod(weight.shape[2:]) == 1
    return CHANNEL_BLOCK if odd and max(options.dilation) > 1 else 0, False


def shared_workspace(call: Convolved, last: bool, width: int) -> int:
    """As `narrow_workspace`, for kernels with blocks of `width` channels."""
    source, weight, out, options, given, passes, _ = call
    taken = narrow_workspace(call, last, width=width)
    if given is None or not passes or width > WIDTH:
        return taken
    into, parameter = nbytes(source), nbytes(weight)
    strided = of_input(source, weight, given, options, last)  # runs before AVX2's kernels are tried
    if strided is not None:
        return max(taken, strided - into - parameter)
    direct = max(options.stride) == 1 and _in_fours(weight, options)
    return max(taken, out + into) if direct else taken


def _in_fours(weight: torch.Tensor, options: Options) -> bool:
    """Whether a group's channels are whole blocks of the smallest kind, for which there are direct
    kernels that make results and gradients of inputs, but none for those of parameters."""
    made = weight.shape[0] // options.groups
    return weight.shape[1] % _LEAST == made % _LEAST == 0


def of_input(
    source: torch.Tensor, weight: torch.Tensor, given: torch.Tensor, options: Options, last: bool
) -> int | None:
    """Bytes taken while a strided convolution's gradient of its input is made, with that gradient;
    None if it is not known which kernel makes it."""
    g = geometry(source, weight, options, given.numel(), CHANNEL_BLOCK)
    read, made = (nbytes(given), given.shape[1]), (nbytes(source), source.shape[1])
    return _called(_strided(g, last), g, read, made, last)


def transposed(
    source: torch.Tensor, weight: torch.Tensor, out: int, options: Options, biased: bool, last: bool
) -> int | None:
    """Bytes taken while the result of a transposed convolution is made, its `out` bytes included;
    None if it is not known which kernel makes it."""
    g = geometry(source, weight, options, out // source.element_size(), CHANNEL_BLOCK)
    kernel = _strided(g, last, CHAINED)
    if kernel is not None and biased and not adds_bias(kernel, g):  # added to a copy
        kernel = kernel._replace(scratch=kernel.scratch + out)
    read, made = (nbytes(source), source.shape[1]), (out, channels_made(weight, options))
    return _called(kernel, g, read, made, last)


def _called(
    kernel: Kernel | None, g: Geometry, read: tuple[int, int], made: tuple[int, int], last: bool
) -> int | None:
    if kernel is None:
        return None
    width = WIDTH if kernel.name not in _WIDE else g.width
    return call_bytes(kernel, (kernel.given, kernel.read), read, made, last, width)


def _strided(g: Geometry, last: bool, more: int = 0) -> Kernel | None:
    if runs_strided(g):
        return Kernel("strided", "last", "last", for_products(g, True), strided_scratch(g) + more)
    if max(g.stride) == 1 or max(g.dilation) > 1 or g.groups > 1:
        return None
    if last or g.kernel[2] > _WIDEST or (g.read[2] > UNROLLED_WIDE and UNROLLED_WIDE % g.stride[2]):
        narrow = backward(g._replace(width=WIDTH), last, more > 0)
        return narrow._replace(name=f"narrow {narrow.name}")
    return Kernel("direct", "blocked", "blocked", in_blocks(g))
