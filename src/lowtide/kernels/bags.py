"""Workspace of embedding bags on the CPU.

Problem: their backward sorts the indices, and their forward counts in which bag each index is;
where many rows are looked up, both take more than the results. Invariant: as measured, from shapes
and the mode alone. Imports blocks. Rejected: leaving it to the tenth that a first step keeps free,
by more than which a small net of bags was over.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.kernels.blocks import nbytes

_SUM, _MEAN, _MOST = 0, 1, 2
_PLACE = torch.long.itemsize


def bags_workspace(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Of the forward. What is counted for each index is freed at the end, if it is no result, while
    the sizes of the bags, and the places of their greatest, are made after it."""
    weight, indices, offsets = tensors[:3]
    mode = args[4] if len(args) > 4 else _SUM
    last, padding = args[7:9] if len(args) > 8 else (False, -1)
    each = indices.element_size()
    bags = offsets.numel() - bool(last)
    if mode == _SUM and padding < 0:
        return 0
    after = bags * each * (weight.shape[1] if mode == _MOST else 1) + nbytes(offsets)
    counted = (indices.numel() + 1) * each - after
    divided = bags * (2 * each + weight.element_size()) if mode == _MEAN else 0
    empty = bags * each if mode == _MOST else 0
    return int(max(counted, divided, empty, 0))


def bags_backward_workspace(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Of the backward, to a table whose gradient is not sparse: indices, sorted, and where they
    were; a sum in which no row is left out is to find out first in which bag each of them is."""
    gradient, indices, _, _, sizes, greatest = tensors[:6]
    mode, sparse, _, padding = args[8:12] if len(args) > 11 else (*args[8:11], -1)
    if sparse:
        return 0
    if mode == _MOST:  # of the bags that are not empty
        return nbytes(gradient) + nbytes(greatest) + sizes.numel() * _PLACE
    counted = (indices.numel() + 1) * indices.element_size() if mode == _SUM and padding < 0 else 0
    weights = sum(map(nbytes, tensors[6:]))
    return nbytes(indices) + 2 * indices.numel() * _PLACE + counted + weights
