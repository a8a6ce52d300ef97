"""Which convolutions on the CPU are run by torch itself, not oneDNN, and their workspace.

Problem: torch's own kernels unfold the input into one column for each point of the result, many
times its size, while oneDNN's reorder tensors. Invariant: the choice is torch's (`use_mkldnn` in
its `Convolution.cpp`), by dtype, batch, kernel and groups; the workspace is as measured in one to
three dimensions, dilated, transposed and grouped, forward and backward, on one and two threads.
Imports `_compat` and blocks. Rejected: asking torch, which answers for the device of the tensor,
and a tensor without memory has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide import _compat
from lowtide.kernels.blocks import FLOAT, nbytes

if TYPE_CHECKING:
    from lowtide.backward.operation import Like

_SMALL = 20480  # a single image of at most so many elements, in its first 4 dims, stays with torch
_MANY = 16  # oneDNN runs pointwise kernels only for this many images or more


class Options(NamedTuple):
    """A convolution's parameters other than its tensors."""

    stride: Sequence[int] = (1,)
    dilation: Sequence[int] = (1,)
    transposed: bool = False
    groups: int = 1
    padding: Sequence[int] = (0,)


class Convolved(NamedTuple):
    """One call of a convolution, forward or backward.

    Attributes:
        source: its input, (batch, channels, *space), with or without memory.
        weight: its parameter.
        out: bytes of its forward's result.
        options: stride, dilation and so on.
        given: for its backward: the gradient of that result.
        passes: whether the backward makes a gradient of the input.
        biased: whether the forward adds a bias, or the backward makes its gradient.
    """

    source: torch.Tensor
    weight: torch.Tensor
    out: int
    options: Options
    given: torch.Tensor | None = None
    passes: bool = False
    biased: bool = False


def options_of(args: Sequence[Any], backward: bool) -> Options:
    """The options in the arguments of `convolution` or `convolution_backward`."""
    shift = 1 if backward else 0
    groups = args[8 + shift] if len(args) > 8 + shift else 1
    stride, padding, dilation, transposed = args[3 + shift : 7 + shift]
    return Options(stride, dilation, bool(transposed), groups, padding)


def channels_made(weight: torch.Tensor, options: Options) -> int:
    """The channels of a convolution's result."""
    return weight.shape[1] * options.groups if options.transposed else weight.shape[0]


def unfolded(
    source: torch.Tensor | Like, weight: torch.Tensor | Like, device: str, options: Options
) -> bool:
    """Whether torch runs a convolution itself: on the CPU, for dtypes that oneDNN does not take and
    for small single images."""
    if device != "cpu" or len(source.shape) not in (3, 4, 5):
        return False
    if source.dtype != torch.float32:
        return not _compat.onednn_takes(source.dtype)
    if not _compat.onednn_is_on():
        return True
    kernel = (1, *weight.shape[2:])[-2:]  # 1D is run as 2D, with one row
    plain = max(*options.stride, *options.dilation) == 1
    if plain and max(kernel) == 1 and source.shape[0] < _MANY and torch.get_num_threads() == 1:
        return True
    batch, channels, *space = source.shape
    first = math.prod(space[:2])
    few = batch == 1 and batch * channels * first <= _SMALL
    return few and options.groups == 1 and min(kernel) <= 3


def runs_itself(args: Sequence[Any], device: str) -> bool:
    """Whether torch runs a call of `convolution` with these arguments itself, see `unfolded`."""
    return unfolded(args[0], args[1], device, options_of(args, backward=False))


def unfolded_workspace(call: Convolved) -> int:
    """Bytes of a convolution that torch runs itself, besides its results and copies of its
    tensors."""
    source, weight, out, options, given, passes, biased = call
    back = given is not None
    batch, volume, spatial = source.shape[0], source.dim() == 5, math.prod(weight.shape[2:])
    dilated, groups = max(options.dilation) > 1, options.groups
    parameter, into = nbytes(weight), nbytes(source)
    if options.transposed:
        points = math.prod(source.shape[2:]) * source.element_size()
        images = 1 if volume or back else batch
    else:
        points = out // max(1, weight.shape[0] * batch)
        images = 1 if dilated else batch
    columns = images * weight.shape[1] * spatial * points
    if not options.transposed and not dilated:
        grouped = volume and groups > 1
        if spatial == max(options.stride) == 1 and not any(options.padding) and not grouped:
            # the image is its own columns; only the gradient in 3D is unfolded
            columns = max(0, columns - parameter) if volume and back and passes else 0
        if volume:  # the 3D kernel handles groups itself
            columns, groups = columns * groups, 1
    several = batch > 1 and (options.transposed or not dilated)  # images in one product
    if several and back and biased and source.element_size() < FLOAT:
        # The gradient of a bias is summed in float32, before that of the parameter is there.
        summed = FLOAT * (out // source.element_size()) // groups
        apart = 0 if groups > 1 else parameter
        both = options.transposed and volume
        columns = columns + summed if both else max(columns, summed - apart)
    if groups == 1:
        if options.transposed and volume and not back:
            # The result's memory is at least as large as the input; a bias is multiplied by ones.
            columns += max(0, into - out) + (out // max(1, weight.shape[1]) if biased else 0)
        if back and biased and dilated and batch == 1 and not options.transposed:
            columns += weight.shape[0] * weight.element_size()  # made apart, then copied
        return columns
    # One group after another is copied out of the batch; then the results are concatenated.
    if batch > 1:
        columns += (into + (out if back else 0)) // groups
    made = parameter + (into if passes else 0) if back else out
    return max(columns, made)
