"""What pointwise operators on the CPU allocate besides their results, and what of it stays.

Problem: a few pointwise kernels copy what they read, or leave a scalar result in the memory of what
it was reduced from; tensors without memory do neither. Invariant: as measured. Imports `_compat`,
blocks and promotion. Rejected: treating them as the others, which take nothing but their result.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from lowtide import _compat
from lowtide.kernels.blocks import nbytes
from lowtide.kernels.promotion import promoted

# Losses whose kernels write all elements into their result and then reduce it to one, which keeps
# the storage: the position of the argument `reduction`.
_REDUCED_IN_PLACE = {
    "aten::binary_cross_entropy": 3,
    "aten::mse_loss": 2,
    "aten::smooth_l1_loss": 2,
    "aten::soft_margin_loss": 2,
}

_LAST_OFFSET = 7  # the position of `include_last_offset`


def kept_storage(name: str, args: Any) -> int | None:
    """Bytes of the storage of a result that is as large as what it was reduced from; None if the
    storage is as large as the result."""
    if name == "aten::col2im" and args[0].device.type == "cpu":
        return int(args[0].numel() * args[0].element_size())
    if not reduced_in_place(name, args):
        return None
    one, other = args[:2]
    shape = torch.broadcast_shapes(one.shape, other.shape)
    return int(math.prod(shape) * promoted(one.dtype, other.dtype).itemsize)


def kept_of_bags(args: Any, results: tuple[Any, ...]) -> dict[int, int]:
    """Bytes of the storages of an embedding bag's results, by position, that are larger than they:
    the bag of each index is counted in one element more, and the size of each bag is the offsets,
    of which the last may be no bag's."""
    found = {}
    bags, offsets = results[1], args[2]
    if bags.numel():  # else the kernel needs none
        found[1] = (bags.numel() + 1) * bags.element_size()
    if len(args) > _LAST_OFFSET and args[_LAST_OFFSET]:
        found[2] = offsets.numel() * offsets.element_size()
    return found


def reduced_in_place(name: str, args: Any) -> bool:
    """Whether the result is a loss: one number, in a storage as large as what it was made from."""
    place = _REDUCED_IN_PLACE.get(name)
    return place is not None and (len(args) <= place or args[place] != 0)


def pointwise_workspace(name: str, tensors: list[torch.Tensor]) -> int:
    """Bytes that a pointwise kernel on the CPU allocates besides its result."""
    if name == "aten::gelu_backward" and len(tensors) > 1:
        return _gelu_backward(*tensors[:2])
    if name == "aten::abs" and tensors and tensors[0].is_complex():
        return nbytes(tensors[0])  # the result as complex numbers
    return 0


def _gelu_backward(given: torch.Tensor, source: torch.Tensor) -> int:
    """oneDNN copies a gradient that is not contiguous, and the result if that takes its strides.

    The approximation by `tanh` has another kernel, without copies, but is not among the positional
    arguments: too much is assumed for it.
    """
    if given.is_contiguous() or not source.is_contiguous():
        return 0
    if not _compat.onednn_takes(given.dtype):
        return 0
    strides = [s for n, s in zip(given.shape, given.stride(), strict=True) if n > 1 and s]
    turned = any(one < other for one, other in itertools.pairwise(strides))
    return nbytes(given) * (2 if turned else 1)
