"""Workspace of Fourier transforms on the CPU.

Problem: torch hands a transform to MKL as a batch of signals, and copies the input if its other
dimensions are not one batch in memory: a transform along time of (batch, time, channels) takes its
input twice, which the tape does not show. Invariant: exact for torch's own steps, which follow from
sizes and strides alone. Imports torch. Rejected: always counting a copy, which is too high for most
transforms of images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

Strides = tuple[int, ...]


def fourier_workspace(name: str, tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Bytes that a transform allocates besides its result, of `made` bytes."""
    source, dimensions = tensors[0], [d % tensors[0].dim() for d in args[1]]
    nbytes = source.numel() * source.element_size()
    shape, strides = tuple(source.shape), source.stride()
    if name != "aten::_fft_c2r" or len(dimensions) == 1:
        return 0 if _is_batch(shape, strides, dimensions) else nbytes
    # All dimensions but the last go into a temporary before the result is allocated.
    first, last = dimensions[:-1], dimensions[-1:]
    before = nbytes if _is_batch(shape, strides, first) else 2 * nbytes
    between = _result(shape, strides, first)
    after = nbytes if _is_batch(shape, between, last) else 2 * nbytes
    return max(after, before - made)


def strides_of_result(
    name: str, source: torch.Tensor, args: Any, sizes: Sequence[int]
) -> tuple[int, ...]:
    """The strides of a transform's result of these sizes, in which the batch lies outside of what
    was transformed."""
    shape, strides = tuple(source.shape), source.stride()
    dimensions = [d % source.dim() for d in args[1]]
    first, last = dimensions[:-1], dimensions[-1:]
    if name == "aten::_fft_c2c" or not last:
        return _result(tuple(sizes), strides, dimensions)
    if name == "aten::_fft_c2r":  # the others are transformed before
        strides = _result(shape, strides, first) if first else strides
        return _result(tuple(sizes), strides, last)
    return _result(tuple(sizes), strides, first, last)


def _batch(shape: tuple[int, ...], strides: Strides, dimensions: list[int]) -> list[int]:
    """The dimensions that are not transformed, outermost first. Those with equal strides, as of
    what is expanded, are in the order in which C++ leaves them, which fills the places of those
    that are transformed from the end."""
    others, transformed = list(range(len(shape))), set(dimensions)
    low, high = 0, len(others)
    while low < high:
        if others[low] in transformed:
            high -= 1
            others[low], others[high] = others[high], others[low]
        else:
            low += 1
    return sorted(others[:low], key=lambda d: -strides[d])


def _is_batch(shape: tuple[int, ...], strides: Strides, dimensions: list[int]) -> bool:
    """Whether they are a single dimension in memory."""
    if 0 in shape:
        return True
    others = [d for d in _batch(shape, strides, dimensions) if shape[d] > 1]
    return all(strides[a] == shape[b] * strides[b] for a, b in itertools.pairwise(others))


def _result(
    shape: tuple[int, ...], strides: Strides, dimensions: list[int], last: Sequence[int] = ()
) -> Strides:
    """The strides of a result: the batch first, then what was transformed, outermost first."""
    order = [
        *_batch(shape, strides, [*dimensions, *last]),
        *sorted(dimensions, key=lambda d: -strides[d]),
        *last,
    ]
    found = [0] * len(shape)
    for place, dimension in enumerate(order):
        found[dimension] = math.prod(shape[d] for d in order[place + 1 :])
    return tuple(found)
