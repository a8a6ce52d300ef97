"""What matrix products on the CPU copy and pack.

Problem: a product copies matrices that it cannot read in place, and for half-precision types oneDNN
also packs what it multiplies. Invariant: as measured; for what oneDNN packs with AMX, where no
formula was found, a little more than the largest of eleven measured sizes, on one and two threads.
Imports `_compat`. Rejected: leaving the packed matrices out, which are of the size of a parameter.
"""

from __future__ import annotations

import math

import torch

from lowtide import _compat

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_addmm_activation"})
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
_TINY = 400  # multiplications, in a pair of matrices of a batch that is not copied
_PACKED = 5 / 2  # of the smaller matrix, the most that was packed
_LEAST = 24 << 10  # bytes that are packed on each thread however small the matrices are


def product_workspace(name: str, tensors: list[torch.Tensor]) -> int | None:
    """Bytes that a product allocates besides its result; None if the operator is no product.

    A matrix is copied if neither its rows nor its columns are contiguous, as in the gradient of a
    sum, which is one number expanded. Batches are multiplied, and copied, one pair after another;
    oneDNN takes, and copies, all of them at once.
    """
    if name not in _PRODUCTS and name not in _BATCHED:
        return None
    left, right = tensors[-2:]
    batched = name in _BATCHED
    tiny = batched and math.prod(left.shape[1:]) * right.shape[-1] < _TINY
    here = left.device.type in ("cpu", "meta")
    half = here and left.element_size() == 2 and _compat.onednn_takes(left.dtype)
    pairs = max(1, left.shape[0]) if batched else 1
    whole = half or not batched
    copied = sum(
        _bytes(t) // (1 if whole else pairs)
        for t in (left, right)
        if not _readable(t, 3 if batched else 2)
    )
    packed = 0
    if half and _compat.onednn_tiles(left.dtype):
        packed = int(_PACKED * min(_bytes(left), _bytes(right)) / pairs)
        packed += _LEAST * torch.get_num_threads()
    return 0 if tiny else copied + packed


def _readable(tensor: torch.Tensor, dimensions: int) -> bool:
    """Whether a product reads matrices in place: their rows or columns are contiguous."""
    if tensor.dim() != dimensions or tensor.layout is not torch.strided:
        return True
    (rows, columns), (down, right) = tensor.shape[-2:], tensor.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
