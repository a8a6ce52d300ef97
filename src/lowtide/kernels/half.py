"""What oneDNN's convolutions in half types take on the CPU.

Problem: they are other kernels than those of float32: they add up in float32, and transpose what
they multiply. Invariant: as measured on AVX-512 with bfloat16, in two and three dimensions, a
batch of one and of two, one to sixty-four channels; of the copies that a parameter's gradient takes
no formula was found, and a little more than the most that was seen is taken. Imports torch.
Rejected: the formulas of float32, half or a third of it.
"""

from __future__ import annotations

import math

import torch

_CHANNEL_BLOCK = 16
_SUM = 4  # bytes of what is added up in


def half_forward(source: torch.Tensor, weight: torch.Tensor, out: int, stride: int) -> int:
    """Of a kernel of one point, besides what it returns: sums of each thread's image."""
    blocked = _blocked(_bytes(source), source.shape[1]) + _blocked(out, weight.shape[0])
    more = _gathered(source, weight, out) if stride > 1 else 0
    return max(0, blocked + more + _sums(source, out, weight.shape[0]) + 2 * _bytes(weight) - out)


def half_channels_last(source: torch.Tensor, weight: torch.Tensor, given: int) -> int:
    """A backward whose tensors are read as they are."""
    into = _blocked(_bytes(source), source.shape[1]) if source.shape[1] >= _CHANNEL_BLOCK else 0
    return _transposes(source, weight, into, _blocked(given, weight.shape[0]))


def half_backward(
    source: torch.Tensor, weight: torch.Tensor, given: int, stride: int, passes: bool
) -> int:
    """Besides the gradients that it returns; `given` are the bytes of the one that it is given."""
    into, parameter = _bytes(source), _bytes(weight)
    channels, results = source.shape[1], weight.shape[0]
    made = parameter + (into if passes else 0)
    blocked_in, blocked_out = _blocked(into, channels), _blocked(given, results)
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
        second = blocked_in + blocked_out + more + 2 * _SUM * weight.numel()
    else:
        second = _of_parameter(source, weight, given)
    return max(first - made, second)


def half_transposed(source: torch.Tensor, weight: torch.Tensor, out: int) -> int:
    """The backward of a transposed one, besides the gradients that it returns."""
    into, parameter = _bytes(source), _bytes(weight)
    blocked_in, blocked_out = _blocked(into, source.shape[1]), _blocked(out, weight.shape[1])
    few = weight.shape[1] < _CHANNEL_BLOCK
    scratch = _transposes(source, weight, blocked_in, 0 if few else blocked_out)
    return max(blocked_in + (0 if few else blocked_out) + scratch, parameter)


def _of_parameter(source: torch.Tensor, weight: torch.Tensor, given: int) -> int:
    channels, results = source.shape[1], weight.shape[0]
    blocked_in, blocked_out = _blocked(_bytes(source), channels), _blocked(given, results)
    if channels >= _CHANNEL_BLOCK:
        return blocked_in + blocked_out + _transposes(source, weight, blocked_in, blocked_out)
    if results >= _CHANNEL_BLOCK:  # a narrow input is read as it is
        return blocked_out + _transposes(source, weight, 0, blocked_out)
    points = given // max(1, results * source.shape[0])
    columns = channels * math.prod(weight.shape[2:]) * points
    if source.dim() == 5:  # of one slice at a time
        columns //= max(1, min(source.shape[2], source.shape[2] // 2 + 1))
    return columns + 4 * _SUM * weight.numel() * torch.get_num_threads()


def _transposes(source: torch.Tensor, weight: torch.Tensor, into: int, out: int) -> int:
    """On each thread an image, its rows made longer, and a part of the gradient."""
    threads = torch.get_num_threads()
    rows = (into + out) * 13 // (10 * max(1, source.shape[0]))
    parts = _in_blocks(weight) if into else weight.numel()
    return threads * rows + (threads + 1) * _SUM * 3 // 4 * parts


def _gathered(source: torch.Tensor, weight: torch.Tensor, out: int) -> int:
    """The points that a strided kernel of one point reads, of an image on each thread."""
    points = out // max(1, weight.shape[0] * source.shape[0])
    return torch.get_num_threads() * _blocked(points * source.shape[1], source.shape[1])


def _sums(source: torch.Tensor, nbytes: int, channels: int) -> int:
    wider = _SUM // source.element_size()
    return torch.get_num_threads() * wider * _blocked(nbytes, channels) // max(1, source.shape[0])


def _in_blocks(weight: torch.Tensor) -> int:
    out, into = (-(-n // _CHANNEL_BLOCK) * _CHANNEL_BLOCK for n in weight.shape[:2])
    return out * into * math.prod(weight.shape[2:])


def _bytes_in_blocks(weight: torch.Tensor) -> int:
    return _in_blocks(weight) * weight.element_size()


def _blocked(nbytes: int, channels: int) -> int:
    blocks = -(-channels // _CHANNEL_BLOCK)
    return nbytes * blocks * _CHANNEL_BLOCK // max(1, channels)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
