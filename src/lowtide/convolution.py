"""What torch's convolutions on the CPU allocate while they run.

Problem: a convolution takes copies of its tensors in layouts of its own, which are most of many a
step's peak. Invariant: formulas as measured, kernel by kernel, on one and on two threads, over
channels that are and are not multiples of oneDNN's block, both layouts, forward and backward;
`benchmarks/workspace.py` measures them again. Imports torch. Rejected: running each convolution
once to find out, which takes the memory that has to be kept free.
"""

from __future__ import annotations

import torch

_CHANNEL_BLOCK = 16  # oneDNN pads channels to a multiple of this when it reorders a tensor
_SMALL = 20480  # elements in the first four dimensions below which torch does not use oneDNN


def unfolded(source: torch.Tensor, weight: torch.Tensor, device: str | None = None) -> bool:
    """Whether torch unfolds the input itself: small inputs of batch 1 on the CPU."""
    return (
        (device or source.device.type) == "cpu"
        and source.dim() in (4, 5)
        and source.shape[0] == 1
        and min(weight.shape[-2:]) <= 3
        and source.shape[1] * source.shape[2] * source.shape[3] <= _SMALL
    )


def padded(nbytes: int, channels: int) -> int:
    blocks = -(-channels // _CHANNEL_BLOCK)
    return nbytes * blocks * _CHANNEL_BLOCK // max(1, channels)


def convolution_workspace(
    source: torch.Tensor,
    weight: torch.Tensor,
    out: int,
    stride: int,
    transposed: bool,
    back: bool,
    passes: bool,
) -> int:
    """Bytes of a convolution on the CPU besides what it returns.

    Args:
        source: its input, (batch, channels, *space), with or without memory.
        weight: its parameter.
        out: bytes of its forward's result.
        stride: the largest.
        transposed: whether it is a transposed one.
        back: of its backward.
        passes: whether that backward gives a gradient to the input.
    """
    into, parameter = _bytes(source), _bytes(weight)
    kernel = weight[0, 0].numel()
    if (kernel > 1 or source.dim() == 5) and unfolded(source, weight, "cpu"):
        channels = weight.shape[1] if transposed else source.shape[1]
        points = source if transposed else out // (source.element_size() * weight.shape[0])
        count = points[0, 0].numel() if isinstance(points, torch.Tensor) else points
        return channels * kernel * count * source.element_size()
    if kernel == 1 and stride == 1 and _multiplied(source):
        return max(0, into - parameter) if back and source.dim() == 5 else 0
    if transposed:
        return _transposed(source, weight, out, back)
    if _channels_last(source):  # read as it is; parameters are reordered
        groups = source.shape[1] // max(1, weight.shape[1])
        return _reordered(weight, groups, back)
    if back:
        return _backward(source, weight, out, stride, passes)
    blocked_in, blocked_out = padded(into, source.shape[1]), padded(out, weight.shape[0])
    blocked = padded(parameter, weight.shape[0])
    if source.shape[1] >= _CHANNEL_BLOCK:  # narrower inputs are read as they are
        blocked = padded(blocked, source.shape[1]) + blocked_in
    return blocked_out + max(blocked, out) - out


def _reordered(weight: torch.Tensor, groups: int, back: bool) -> int:
    """Copies of a parameter; those of each group on its own are padded to whole blocks."""
    parameter = _bytes(weight)
    out, into = weight.shape[0] // max(1, groups), weight.shape[1]
    blocks = -(-out // _CHANNEL_BLOCK) * -(-into // _CHANNEL_BLOCK)
    block = _CHANNEL_BLOCK**2 * weight[0, 0].numel() * weight.element_size()
    whole = groups * blocks * block
    if groups == 1 or (out == into == 1 and groups % _CHANNEL_BLOCK):
        return (3 if back else 2) * parameter
    if back:
        return whole + 2 * parameter
    return whole if into == 1 < out else 2 * parameter


def _backward(
    source: torch.Tensor, weight: torch.Tensor, out: int, stride: int, passes: bool
) -> int:
    into, parameter = _bytes(source), _bytes(weight)
    blocked_in, blocked_out = padded(into, source.shape[1]), padded(out, weight.shape[0])
    copies = torch.get_num_threads() * (padded(parameter, source.shape[1]) - parameter)
    if source.shape[1] < _CHANNEL_BLOCK // 2:
        return (min(blocked_in, into + out) if passes else 0) + max(blocked_out, copies)
    if source.shape[1] < _CHANNEL_BLOCK:
        return (blocked_in - into if passes else 0) + max(blocked_out, copies)
    if source.dim() == 5 and min(source.shape[2:]) < min(weight.shape[2:]):
        parameter *= 4 * torch.get_num_threads()  # smaller than the kernel: a few copies each
    strided = 2 * into - parameter if stride > 1 else 0
    pointwise = parameter if weight[0, 0].numel() == 1 else 0
    return max(blocked_in + blocked_out + pointwise, parameter, strided)


def _transposed(source: torch.Tensor, weight: torch.Tensor, out: int, back: bool) -> int:
    into, parameter = _bytes(source), _bytes(weight)
    few = weight.shape[1] < _CHANNEL_BLOCK // 2
    if back:
        blocked = padded(into, source.shape[1]) + padded(out, weight.shape[1])
        return max(into if few else blocked, parameter)
    blocked = max(2 * out, (1 + torch.get_num_threads()) * into) if few else 2 * out
    return max(blocked, parameter + into)


def _channels_last(source: torch.Tensor) -> bool:
    return source.stride(1) == 1 and source.stride(-1) == source.shape[1] > 1


def _multiplied(source: torch.Tensor) -> bool:
    """Whether torch runs a convolution of kernel 1 as a product: one thread, small batches."""
    return torch.get_num_threads() == 1 and source.shape[0] < 16


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
