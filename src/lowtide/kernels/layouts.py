"""In which format torch runs a convolution on the CPU, and what it copies into that format first.

Problem: a model may be in one memory format and its input in another, and torch copies whichever
its kernel does not read. Invariant: these copies stay until the end of the call, beside what the
kernel takes. Imports blocks. Rejected: a part of each kernel's formula, as the copies are torch's.
"""

from __future__ import annotations

import math

import torch

from lowtide.kernels.blocks import nbytes


def runs_last(source: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch runs it in channels-last format: the input or the parameter has it, as in a
    model in that format whose input is not. It copies the one that has not, and in one dimension
    every input that is not contiguous."""
    return source.dim() > 3 and (is_last(source) or has_last(weight))


def has_last(weight: torch.Tensor) -> bool:
    """Whether a parameter has channels-last format; a pointwise one with one channel has both."""
    strides = weight.stride(1), weight.stride(-1)
    return weight.dim() > 3 and strides == (1, weight.shape[1]) and math.prod(weight.shape[1:]) > 1


def is_last(source: torch.Tensor) -> bool:
    """Whether an input or a gradient has channels-last format."""
    return source.stride(1) == 1 and source.stride(-1) == source.shape[1] > 1


def copied(tensor: torch.Tensor, last: bool) -> int:
    """The copy of a tensor whose layout the kernel does not read; it stays until the end."""
    as_read = is_last(tensor) if last else tensor.is_contiguous()
    return 0 if as_read or (tensor.is_contiguous() and tensor.shape[1] == 1) else nbytes(tensor)


def ordered(weight: torch.Tensor, last: bool) -> int:
    """The copy of a parameter that is stored in another order, such as that of other frameworks
    (height, width, input, output); what is `last` is copied by the kernels' own formulas."""
    return 0 if last or weight.is_contiguous() else nbytes(weight)
