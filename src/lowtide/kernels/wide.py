"""Workspace of oneDNN's convolutions on CPUs with AVX-512, and of those that torch runs itself.

Problem: which kernel runs depends on the channels, the stride, the padding and the threads, and
each copies other tensors into blocks of sixteen channels. Invariant: the kernels for the gradients
of the input and of the parameter run one after the other, so the larger figure counts; results are
not counted. Imports `_compat`, blocks, layouts, half, unfolding and `wide_products`. Rejected: one
flow with AVX2's kernels, see `avx2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lowtide import _compat
from lowtide.kernels.avx2 import geometry
from lowtide.kernels.avx2_kernels import direct_sums
from lowtide.kernels.avx2_scratch import Geometry, threads_that_sum, unfolded_parameter
from lowtide.kernels.blocks import CHANNEL_BLOCK, FLOAT, nbytes, padded
from lowtide.kernels.half import (
    NARROW,
    float16_least,
    half_backward,
    half_by_channel,
    half_channels_last,
    half_forward,
    half_forward_last,
    half_transposed,
)
from lowtide.kernels.layouts import copied, has_last, ordered, runs_last
from lowtide.kernels.unfolding import Convolved, Options, unfolded, unfolded_workspace
from lowtide.kernels.wide_products import of_input, transposed
from lowtide.kernels.wide_sums import partial_gradients, pointwise_gradients

_HALF_BLOCK = 8  # channels, for the gradient of a parameter with fewer input channels than a block
_UNBLOCKED = 4  # fewer channels than this are read as they are
_WIDE = 14  # for wider kernels oneDNN has no kernel that makes the parameter's gradient
_REDUCED = 4  # copies of that gradient per thread in the matrix product that it uses instead
_SUMMED = 8  # copies of that gradient per thread in which a depthwise 3D kernel accumulates
_PARTLY = 128  # channels besides twice its own in a depthwise gradient that threads sum in part
_SHARED = 20  # above so many pointwise parameters, threads may divide images, not channels


def wide_workspace(call: Convolved) -> int:
    """As `convolution_workspace`, with AVX-512, for half-precision types, and where torch runs the
    convolution itself."""
    source, weight, _, options, given, passes, _ = call
    flat = source.dim() < 5
    itself = unfolded(source, weight, "cpu", options)
    taken = _of_torch(call) if itself else _of_half(call, _of_onednn(call))
    last = runs_last(source, weight) and (flat or not (itself or _by_channel(call)))
    taken += copied(source, last) + (0 if given is None else copied(given, last))
    # In torch's own backward in 3D, it is gone when the parameter's gradient, of its size, is made.
    gone = itself and passes and not flat and math.prod(weight.shape[2:]) > 1
    return taken + (0 if gone else ordered(weight, last))


def _of_torch(call: Convolved) -> int:
    """What torch takes that runs the convolution itself."""
    source, weight = call.source, call.weight
    taken = unfolded_workspace(call)
    if runs_last(source, weight) and source.dim() == 4:
        taken += 0 if _pointwise(weight, max(call.options.stride)) else nbytes(weight)
    return taken


def _of_onednn(call: Convolved) -> int:
    """What oneDNN's kernel takes, where all is in the format that it reads."""
    source, weight, out, options, given, passes, _ = call
    if options.transposed:
        return _of_transposed(call)
    back, stride, last = given is not None, max(options.stride), runs_last(source, weight)
    half = source.element_size() == 2
    if _by_channel(call):
        taken = _volume_by_channel(source, weight, out, stride, back, passes)
        return max(taken, _reordered(weight, source.shape[1], back)) if last else taken
    if half and back and options.groups == 1:
        if last:
            return half_channels_last(source, weight, out, stride, passes)
        return half_backward(source, weight, out, stride, passes)
    if half and last and options.groups == 1:
        torchs = 0 if has_last(weight) or _pointwise(weight, 1) else nbytes(weight)
        return torchs + half_forward_last(source, weight, out)
    if last:  # the input is read as it is; parameters are reordered
        taken = _reordered(weight, source.shape[1] // max(1, weight.shape[1]), back)
        if given is not None and passes and _products(source):
            strided = of_input(source, weight, given, options, last)
            taken = max(taken, (strided or 0) - nbytes(source) - nbytes(weight))
        if has_last(weight) and not _pointwise(weight, 1):
            taken = max(0, taken - nbytes(weight))  # else torch brings it into this format first
        return taken
    if given is not None:
        return _backward(source, weight, given, options, passes)
    if half and math.prod(weight.shape[2:]) == 1 and (stride == 1 or source.dim() < 5):
        return half_forward(source, weight, out, stride)
    return _forward(source, weight, out, stride)


def _of_transposed(call: Convolved) -> int:
    """What oneDNN's kernel for a transposed convolution takes."""
    source, weight, out, options, given, _, biased = call
    if given is not None:
        if source.element_size() == 2 and options.groups == 1:
            return half_transposed(source, weight, out)
        return _transposed_backward(source, weight, given, options)
    if _products(source):
        last = runs_last(source, weight)
        strided = transposed(source, weight, out, options, biased, last)
        if strided is not None:
            return strided - out
    return _transposed(source, weight, out, max(options.stride), biased)


def _of_half(call: Convolved, taken: int) -> int:
    """The larger of `taken` and what oneDNN's kernels for half precision take at least."""
    source, weight, out, options, given, _, _ = call
    half, float16 = source.element_size() == 2, source.dtype == torch.float16
    back, grouped = given is not None, options.groups > 1 and not options.transposed
    if half and grouped and (float16 or is_depthwise(source, weight)):
        whole = runs_last(source, weight)
        return max(taken, half_by_channel(source, weight, out, back, whole))
    if float16 and _compat.onednn_multiplies(source.dtype):
        return max(taken, float16_least(source, out, back))
    return taken


def _by_channel(call: Convolved) -> bool:
    """Whether it is a depthwise convolution in 3D."""
    depthwise = is_depthwise(call.source, call.weight)
    return call.source.dim() == 5 and depthwise and not call.options.transposed


def _columns(source: torch.Tensor, weight: torch.Tensor, out: int) -> int:
    """Elements of an unfolded image: kernel volume times channels times points."""
    points = out // (source.element_size() * weight.shape[0] * source.shape[0])
    return source.shape[1] * math.prod(weight.shape[2:]) * points


def _forward(source: torch.Tensor, weight: torch.Tensor, out: int, stride: int) -> int:
    blocked_out = padded(out, weight.shape[0])
    blocked = padded(nbytes(weight), weight.shape[0])
    if source.element_size() == 2 and source.shape[1] % 2:  # channels are stored in pairs
        blocked += blocked // source.shape[1]
    gathers, depthwise = _gathers(source, weight, stride), is_depthwise(source, weight)
    if source.shape[1] >= CHANNEL_BLOCK or gathers or depthwise or _pointwise(weight, stride):
        # narrower inputs are read as they are
        blocked = padded(blocked, source.shape[1]) + padded(nbytes(source), source.shape[1])
    if gathers:
        blocked += _gathered(source, out // max(1, weight.shape[0]))
    return blocked_out + max(blocked, out) - out


def _reordered(weight: torch.Tensor, groups: int, back: bool) -> int:
    """Copies of a parameter; with groups, each group's part is padded to whole blocks."""
    parameter = nbytes(weight)
    out, into = weight.shape[0] // max(1, groups), weight.shape[1]
    blocks = -(-out // CHANNEL_BLOCK) * -(-into // CHANNEL_BLOCK)
    block = CHANNEL_BLOCK**2 * math.prod(weight.shape[2:]) * weight.element_size()
    whole = groups * blocks * block
    narrow = (groups % CHANNEL_BLOCK and not back) or max(weight.shape[2:]) <= NARROW
    if groups == 1 or (out == into == 1 and narrow):
        return (3 if back else 2) * parameter
    if back:
        return whole + 2 * parameter
    return whole if into == 1 < out else 2 * parameter


def _backward(
    source: torch.Tensor,
    weight: torch.Tensor,
    given: torch.Tensor,
    options: Options,
    passes: bool,
) -> int:
    """First the gradient of the input, if it is wanted, then that of the parameter."""
    if options.groups > 1:
        return _grouped_backward(source, weight, given, options, passes)
    into, parameter, stride = nbytes(source), nbytes(weight), max(options.stride)
    second = _summed(source, given, weight, options)
    if not passes:
        return second
    strided = of_input(source, weight, given, options, False) if _products(source) else None
    if strided is not None:
        first = strided
    elif stride == 1:
        first = padded(into, source.shape[1]) + padded(nbytes(given), weight.shape[0])
        first += _blocked(weight, CHANNEL_BLOCK, CHANNEL_BLOCK)
    else:
        first = max(3 * into, into + _spread(weight, given, stride))
    return max(first - into - parameter, second)


def _summed(read: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, options: Options) -> int:
    """Workspace of the gradient of a parameter.

    Args:
        read: what the kernel slides over: the input, or a transposed convolution's gradient.
        given: what has a point for each of its positions: the gradient, or, transposed, the input.
        weight: the parameter: (channels of `given`, channels of `read`, *kernel).
        options: stride, dilation and so on.
    """
    channels, others, stride = read.shape[1], given.shape[1], max(options.stride)
    parameter, volume, single = nbytes(weight), read.dim() == 5, read.element_size() == FLOAT
    source, result = (given, read) if options.transposed else (read, given)
    g = geometry(source, weight, options, result.numel(), CHANNEL_BLOCK)
    gathers, dilated = _gathers(read, weight, stride), max(options.dilation) > 1
    whole = channels >= CHANNEL_BLOCK or gathers or _pointwise(weight, stride)
    halves = not whole and channels >= _UNBLOCKED
    # The kernel for half blocks, which is that of AVX2, supports no dilation, no volumes padded in
    # depth, and no kernel that is larger than what it slides over.
    rows = zip(read.shape[2:-1], weight.shape[2:-1], strict=True)
    larger = any(size < width for size, width in rows)
    lacking = halves and (dilated or larger or (volume and options.padding[0] > 0))
    # Nor has any a kernel for groups whose channels are not whole blocks.
    lacking = lacking or (options.groups > 1 and not g._replace(width=_HALF_BLOCK).whole())
    if lacking or (dilated and volume) or _as_product(read, weight, options):
        columns = nbytes(given) // max(1, others * given.shape[0]) * math.prod(weight.shape[1:])
        if volume:  # one slice at a time
            columns //= max(1, given.shape[2])
        return _unfolded(g, weight, columns)
    if not whole and not halves:
        blocked = _blocked(weight, CHANNEL_BLOCK, 1)
        sums = partial_gradients(g, False) if single else 0
        return max(padded(nbytes(given), others) + blocked + sums - parameter, blocked)
    block = CHANNEL_BLOCK if whole else _HALF_BLOCK
    taken = padded(nbytes(given), others, block) + padded(nbytes(read), channels, block)
    blocked = _blocked(weight, block, block)
    if not single:
        many = torch.get_num_threads() > 1 and taken > _SHARED * parameter
        taken += blocked * 9 // 8 if many and _pointwise(weight, stride) else 0
    elif _pointwise(weight, stride) or gathers:
        taken += pointwise_gradients(g)
    elif whole:
        taken += partial_gradients(g, False)
    else:
        taken += direct_sums(g._replace(width=_HALF_BLOCK))
    if gathers:
        taken += _gathered(read, nbytes(given) // max(1, others))
    return max(taken + blocked - parameter, blocked)


def _unfolded(g: Geometry, weight: torch.Tensor, columns: int) -> int:
    """The gradient of a parameter as a product with unfolded images, of `columns` bytes each."""
    if weight.element_size() == FLOAT:
        return unfolded_parameter(g, False)
    return threads_that_sum(g, False) * (_REDUCED * nbytes(weight) + columns)


def _blocked(weight: torch.Tensor, first: int, second: int) -> int:
    """A copy of a parameter with both of its channel dimensions in blocks."""
    return padded(padded(nbytes(weight), weight.shape[0], first), weight.shape[1], second)


def _gathers(source: torch.Tensor, weight: torch.Tensor, stride: int) -> bool:
    """Whether the points that a strided pointwise kernel reads are gathered first."""
    whole = all(size % stride == 0 for size in source.shape[2:])
    return source.dim() < 5 and math.prod(weight.shape[2:]) == 1 < stride and whole


def _gathered(source: torch.Tensor, points: int) -> int:
    """The points that a strided pointwise kernel reads, of one image per thread.

    `points`: bytes of these points in one channel of all images.
    """
    image = source.shape[1] * points // max(1, source.shape[0])
    return _threads(source) * padded(image, source.shape[1])


def _spread(weight: torch.Tensor, given: torch.Tensor, stride: int) -> int:
    """What a strided kernel needs to make its input's gradient: a copy of the incoming gradient,
    and, on each thread, an image of it with margins as wide as the kernel reaches."""
    image = given.element_size() * given.shape[1]
    for size, width in zip(given.shape[2:], weight.shape[2:], strict=True):
        image *= size + 2 * ((width - 1) // stride)
    return nbytes(given) + _threads(given) * image + padded(nbytes(weight), weight.shape[0])


def _grouped_backward(
    source: torch.Tensor,
    weight: torch.Tensor,
    given: torch.Tensor,
    options: Options,
    passes: bool,
) -> int:
    into, parameter, channels = nbytes(source), nbytes(weight), source.shape[1]
    out, stride = nbytes(given), max(options.stride)
    depthwise = weight.shape[1] == 1 < channels
    g = geometry(source, weight, options, given.numel(), CHANNEL_BLOCK)
    made = parameter + (into if passes else 0)
    blocked_in, blocked_out = padded(into, channels), padded(out, weight.shape[0])
    first = 0
    strided = of_input(source, weight, given, options, False) if _products(source) else None
    if passes and strided is not None:
        first = strided - made
    elif passes and stride > 1 and (not depthwise or source.element_size() == 2):
        first = 3 * into - made
    if _as_product(source, weight, options):
        columns = _columns(source, weight, out)
        if source.dim() == 5:  # one slice at a time
            columns //= given.shape[2]
        columns *= source.element_size()
        return max(first, _unfolded(g, weight, columns))
    copies = torch.get_num_threads() * (padded(parameter, channels) - parameter)
    pointwise = _pointwise(weight, stride)
    few = channels < CHANNEL_BLOCK and not pointwise and not is_depthwise(source, weight)
    if few and channels < _HALF_BLOCK:
        return max(first, (min(blocked_in, into + out) if passes else 0) + max(blocked_out, copies))
    if few:
        return max(first, (blocked_in - into if passes else 0) + max(blocked_out, copies))
    if depthwise and max(weight.shape[2:]) > NARROW:
        copied = max(blocked_out + blocked_in + parameter, blocked_in + into) - made
        partial = (2 * channels + _PARTLY) * math.prod(weight.shape[2:]) * FLOAT
        threads = torch.get_num_threads()
        parts = threads + 1 if source.element_size() == 2 else 2 * threads
        return max(first, copied, parts * partial)
    blocked = blocked_in + blocked_out
    if source.element_size() == FLOAT and not depthwise:
        blocked += pointwise_gradients(g) if pointwise else partial_gradients(g, False)
    elif pointwise and torch.get_num_threads() > 1 and blocked > _SHARED * parameter:
        blocked += parameter * 9 // 8  # partial gradients of the threads
    return max(first, blocked, parameter)


def _products(source: torch.Tensor) -> bool:
    """Whether `wide_products` knows kernels for this dtype on this CPU."""
    return source.dtype == torch.float32 and _compat.onednn_instructions() != "AVX2"


def is_depthwise(source: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether each channel is convolved by itself."""
    return weight.shape[1] == 1 < source.shape[1] == weight.shape[0]


def _volume_by_channel(
    source: torch.Tensor, weight: torch.Tensor, out: int, stride: int, back: bool, passes: bool
) -> int:
    """A depthwise convolution in 3D: tensors are copied, but not padded."""
    into, parameter = nbytes(source), nbytes(weight)
    if not back:
        return into + (out if stride == 1 else padded(parameter, source.shape[1]))
    made = parameter + (into if passes else 0)
    half = source.element_size() == 2
    # No formula was found for the accumulators; this is a little more than was measured.
    points = math.prod(source.shape[2:]) * max(weight.shape[2:]) ** 2
    copies = torch.get_num_threads() * (_SUMMED * parameter + points * 4 // 3)
    first = (3 if half and stride > 1 else 2) * into - made
    return max(first, into + (0 if passes else out), copies)


def _as_product(source: torch.Tensor, weight: torch.Tensor, options: Options) -> bool:
    """Whether oneDNN has no kernel for the parameter's gradient and unfolds the input instead: for
    wide kernels, much padding, and dilated or padded kernels that reach further than the input."""
    sizes, widths, dilated = source.shape[2:], weight.shape[2:], max(options.dilation) > 1
    if max(widths) > _WIDE:
        return True
    dims, along_depth = len(sizes), len(sizes) == 3 and max(widths[1:]) == 1
    if along_depth or is_depthwise(source, weight):
        return False
    if dilated and max(options.stride) > 1:
        return True
    steps, padding = _each(options.dilation, dims), _each(options.padding, dims)
    reach = [(width - 1) * step + 1 for width, step in zip(widths, steps, strict=True)]
    if any(pad >= far for pad, far in zip(padding, reach, strict=True)):
        return True
    if dims == 1:
        return False
    short, much = sizes[-2] < reach[-2], padding[-2] > reach[-2] // 2
    if dims == 3:
        flat = sizes[0] < reach[0] and sizes[0] + padding[0] <= reach[0]
        return flat or (much and (short or padding[0] > 0))
    return (much and (short or dilated)) or (short and steps[-2] > 1 and widths[-2] > 1)


def _each(option: Sequence[int], dims: int) -> Sequence[int]:
    """An option for each dimension; one number is for all."""
    return option if len(option) == dims else [option[0]] * dims


def _pointwise(weight: torch.Tensor, stride: int) -> bool:
    return math.prod(weight.shape[2:]) == stride == 1


def _threads(source: torch.Tensor) -> int:
    """How many threads get an image."""
    return min(torch.get_num_threads(), source.shape[0])


def _transposed(
    source: torch.Tensor, weight: torch.Tensor, out: int, stride: int, biased: bool
) -> int:
    into, parameter = nbytes(source), nbytes(weight)
    if stride == 1:
        blocked = padded(out, weight.shape[1])
        copies = padded(into, source.shape[1]) + padded(parameter, weight.shape[1])
        apart = out if biased and source.element_size() == 2 else 0  # with the bias
        return max(copies + (blocked if biased else 0) + apart, out) + blocked - out
    reached = into // source.shape[0]  # one image, with the margin that the kernel overlaps
    for size, width in zip(source.shape[2:], weight.shape[2:], strict=True):
        reached += reached * max(0, width - stride) // size
    copies = out if weight.shape[1] == 1 else 2 * out  # one channel is the same in either format
    return max(copies, into + parameter + torch.get_num_threads() * reached)


def _transposed_backward(
    source: torch.Tensor, weight: torch.Tensor, given: torch.Tensor, options: Options
) -> int:
    """As `_backward`, for a transposed convolution."""
    made = nbytes(source) + nbytes(weight)
    blocked = padded(nbytes(source), source.shape[1])
    copies = _blocked(weight, CHANNEL_BLOCK, 1)
    if given.shape[1] >= CHANNEL_BLOCK:
        copies += padded(nbytes(given), given.shape[1])
    first = blocked + max(nbytes(source), copies)
    return max(first - made, _summed(given, source, weight, options))
