"""Workspace of oneDNN's half-precision convolutions on the CPU.

Problem: these are other kernels than those for float32: they accumulate in float32, and transpose
what they multiply. Invariant: as measured on AVX-512 with bfloat16, in two and three dimensions,
with a batch of one and of two, and one to sixty-four channels. For the copies that a parameter's
gradient takes no formula was found, so a little more than the largest measured value is used;
depthwise convolutions take no more than is said here in some 80, on a CPU with AMX.
Imports `_compat`, blocks. Rejected: the formulas for float32, which give a half or a third of it.
"""

from __future__ import annotations

import math

import torch

from lowtide import _compat
from lowtide.kernels.blocks import CHANNEL_BLOCK, FLOAT, PAGE, nbytes, padded, up

NARROW = 3
"""The widest kernel that has a depthwise form for tensors with their channels last."""
_SCRATCH = 9 << 10  # bytes of each thread, and the least for a parameter's gradient
_PARTIAL = 32  # bytes for each element of a depthwise parameter in float16
_PAIR = 2  # what is summed over is stored in pairs
_FEW_RESULTS, _MANY_RESULTS = 32, 64  # above the former, channels may be in blocks of the latter
_STRIDED = 4  # kernels, each with a scratchpad, of a strided gradient of the input
_MARGINS = 13 << 10  # bytes besides, and a padded image of what it reads


def half_forward(source: torch.Tensor, weight: torch.Tensor, out: int, stride: int) -> int:
    """A pointwise kernel, besides its result: copies, and each thread's sums over an image. The
    result is made of one of these copies."""
    made = padded(out, weight.shape[0])
    blocked = padded(nbytes(source), source.shape[1]) + made
    more = _gathered(source, weight, out) if stride > 1 else 0
    sums = _sums(source, out, weight.shape[0])
    return max(made, blocked + more + sums + 2 * nbytes(weight) - out)


def half_forward_last(source: torch.Tensor, weight: torch.Tensor, out: int) -> int:
    """A forward whose tensors have their channels last and are read as they are, but for the
    parameter. Without instructions for bfloat16, a pointwise kernel sums an image in float32."""
    results, read = weight.shape[:2]
    taken = _scratchpads() + _reordered(weight, results, read)
    if _compat.onednn_multiplies(source.dtype):
        return taken
    if math.prod(weight.shape[2:]) == 1:
        taken += _sums(source, out, results)
        taken += FLOAT // source.element_size() * _gathered(source, weight, out)
    return max(taken, _bytes_in_blocks(weight))


def half_channels_last(
    source: torch.Tensor, weight: torch.Tensor, given: int, stride: int, passes: bool
) -> int:
    """A backward whose tensors have their channels last and are read as they are."""
    results, read = weight.shape[:2]
    first = 0
    if passes:
        first = _scratchpads() + _reordered(weight, read, results)
        if stride > 1:
            image = 13 * given // (10 * max(1, source.shape[0]))
            first += (_STRIDED - 1) * _scratchpads() + torch.get_num_threads() * image + _MARGINS
    whole = read >= CHANNEL_BLOCK or math.prod(weight.shape[2:]) == 1
    into = padded(nbytes(source), read, CHANNEL_BLOCK if whole else _PAIR)
    rows = _rows(source, into + padded(given, results))
    parts = _in_blocks(weight) if whole else weight.numel() // results * up(results, CHANNEL_BLOCK)
    return max(first, rows + _partial(parts) + _scratchpads())


def _scratchpads() -> int:
    """Of each thread, and of what they have in common."""
    return PAGE + torch.get_num_threads() * (PAGE + 24)


def _reordered(weight: torch.Tensor, made: int, read: int) -> int:
    """A copy of a parameter with the channels that are made in blocks, as oneDNN chooses them; at
    most so many."""
    block = CHANNEL_BLOCK if made <= _FEW_RESULTS else _MANY_RESULTS
    return up(made, block) * up(read, _PAIR) * math.prod(weight.shape[2:]) * weight.element_size()


def half_by_channel(
    source: torch.Tensor, weight: torch.Tensor, out: int, back: bool, last: bool
) -> int:
    """The least for a depthwise convolution, in float16 for any with groups.

    float16 is copied and summed as if it were two tensors of its size. With bfloat16, where tensors
    have their channels last and kernels are wide, each channel becomes a whole block of them.
    """
    copies, scratch = 0 if last else nbytes(source) + out, torch.get_num_threads() * _SCRATCH
    if source.dtype == torch.float16:
        if back:
            return copies + _PARTIAL * weight.numel() + scratch
        return copies + (4 * scratch if weight.shape[1] > 1 else 0)
    if not last:
        return 0
    if not back:  # without instructions for bfloat16, volumes take the kernel that others take
        others = weight.dim() == 5 and not _compat.onednn_multiplies(source.dtype)
        return CHANNEL_BLOCK**2 * nbytes(weight) if others else 0
    if max(weight.shape[2:]) <= NARROW and weight.dim() < 5:
        return 2 * nbytes(weight) + scratch
    wide, points = source.shape[-1], math.prod(source.shape[2:-1])
    transposed = source.shape[1] * CHANNEL_BLOCK * points * (2 * (wide + wide % 2) + 4)
    blocks = weight.numel() * CHANNEL_BLOCK**2
    return (FLOAT + source.element_size()) * blocks + source.element_size() * transposed + scratch


def float16_least(source: torch.Tensor, out: int, back: bool) -> int:
    """The least for a convolution in float16 on a CPU that multiplies it by AVX-512: what it makes
    is there twice more, once in the order of the kernel and once in that of the result."""
    return 2 * (nbytes(source) if back else out) + 4 * torch.get_num_threads() * _SCRATCH


def half_backward(
    source: torch.Tensor, weight: torch.Tensor, given: int, stride: int, passes: bool
) -> int:
    """A backward, besides the gradients that it returns; `given`: bytes of the incoming one."""
    into, parameter = nbytes(source), nbytes(weight)
    channels, results = source.shape[1], weight.shape[0]
    made = parameter + (into if passes else 0)
    blocked_in, blocked_out = padded(into, channels), padded(given, results)
    pointwise = math.prod(weight.shape[2:]) == 1
    first = 0
    if passes:  # the gradient of the input, in whole blocks of channels
        first = blocked_in + blocked_out + _bytes_in_blocks(weight)
        if stride > 1:
            first = max(first, 3 * into)
        elif pointwise:
            first += _sums(source, into, channels)
    if pointwise and (stride == 1 or source.dim() < 5):
        more = _gathered(source, weight, given) if stride > 1 else 0
        second = blocked_in + blocked_out + more + 2 * FLOAT * weight.numel()
    else:
        second = _of_parameter(source, weight, given)
    return max(first - made, second)


def half_transposed(source: torch.Tensor, weight: torch.Tensor, out: int) -> int:
    """The backward of a transposed convolution, besides the gradients that it returns."""
    into, parameter = nbytes(source), nbytes(weight)
    blocked_in, blocked_out = padded(into, source.shape[1]), padded(out, weight.shape[1])
    few = weight.shape[1] < CHANNEL_BLOCK
    scratch = _transposes(source, weight, blocked_in, 0 if few else blocked_out)
    return max(blocked_in + (0 if few else blocked_out) + scratch, parameter)


def _of_parameter(source: torch.Tensor, weight: torch.Tensor, given: int) -> int:
    channels, results = source.shape[1], weight.shape[0]
    blocked_in, blocked_out = padded(nbytes(source), channels), padded(given, results)
    if channels >= CHANNEL_BLOCK:
        return blocked_in + blocked_out + _transposes(source, weight, blocked_in, blocked_out)
    if results >= CHANNEL_BLOCK:  # a narrow input is read as it is
        return blocked_out + _transposes(source, weight, 0, blocked_out)
    points = given // max(1, results * source.shape[0])
    columns = channels * math.prod(weight.shape[2:]) * points
    if source.dim() == 5:  # of one slice at a time
        columns //= max(1, min(source.shape[2], source.shape[2] // 2 + 1))
    return columns + 4 * FLOAT * weight.numel() * torch.get_num_threads()


def _transposes(source: torch.Tensor, weight: torch.Tensor, into: int, out: int) -> int:
    """On each thread a transposed image with padded rows, and a partial gradient."""
    return _rows(source, into + out) + _partial(_in_blocks(weight) if into else weight.numel())


def _rows(source: torch.Tensor, nbytes: int) -> int:
    return torch.get_num_threads() * (nbytes * 13 // (10 * max(1, source.shape[0])))


def _partial(elements: int) -> int:
    return (torch.get_num_threads() + 1) * FLOAT * 3 // 4 * elements


def _gathered(source: torch.Tensor, weight: torch.Tensor, out: int) -> int:
    """The points that a strided pointwise kernel reads, of one image per thread."""
    points = out // max(1, weight.shape[0] * source.shape[0])
    return torch.get_num_threads() * padded(points * source.shape[1], source.shape[1])


def _sums(source: torch.Tensor, nbytes: int, channels: int) -> int:
    wider = FLOAT // source.element_size()
    return torch.get_num_threads() * wider * padded(nbytes, channels) // max(1, source.shape[0])


def _in_blocks(weight: torch.Tensor) -> int:
    out, into = (up(n, CHANNEL_BLOCK) for n in weight.shape[:2])
    return out * into * math.prod(weight.shape[2:])


def _bytes_in_blocks(weight: torch.Tensor) -> int:
    return _in_blocks(weight) * weight.element_size()
