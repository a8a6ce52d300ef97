"""What matrix products on the CPU copy and pack.

Problem: a product copies matrices that it cannot read in place, and for half-precision types oneDNN
also packs what it multiplies, or sums in float32. Invariant: as measured; for what oneDNN packs,
where no formula was found, more than was measured for eleven sizes, on one and two threads.
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
_SUM = 4  # bytes of a float32


def product_workspace(name: str, tensors: list[torch.Tensor], device: str) -> int | None:
    """Bytes that a product on this type of device allocates besides its result.

    None if the operator is no product. A matrix is copied if neither its rows nor its columns are
    contiguous, as in the gradient of a sum, which is one number expanded. Batches are multiplied,
    and copied, one pair after another; oneDNN takes, and copies, all of them at once.
    """
    if name not in _PRODUCTS and name not in _BATCHED:
        return None
    left, right = tensors[-2:]
    batched = name in _BATCHED
    if batched and math.prod(left.shape[1:]) * right.shape[-1] < _TINY:
        return 0
    if device == "cpu" and left.element_size() == 2 and _compat.onednn_takes(left.dtype):
        return _of_halves(left, right)
    pairs, dimensions = (max(1, left.shape[0]), 3) if batched else (1, 2)
    if device == "cuda":  # one kernel multiplies all of them
        pairs = 1
    return sum(_bytes(t) // pairs for t in (left, right) if not _readable(t, dimensions))


def _of_halves(left: torch.Tensor, right: torch.Tensor) -> int:
    """The same for what oneDNN multiplies."""
    pairs = max(1, left.shape[0]) if left.dim() == 3 else 1
    copied = sum(_bytes(t) for t in (left, right) if not _dense(t))
    if not _compat.onednn_multiplies(left.dtype):
        return copied + _SUM * left.shape[-2] * right.shape[-1]
    packed = int(_PACKED * min(_bytes(left), _bytes(right)) / pairs)
    return copied + packed + _LEAST * torch.get_num_threads()


def _dense(tensor: torch.Tensor) -> bool:
    """Whether oneDNN reads it in place: it is contiguous, or its matrices are transposed."""
    if tensor.dim() == 2:
        return _readable(tensor, 2)
    return tensor.is_contiguous() or tensor.mT.is_contiguous()


def _readable(tensor: torch.Tensor, dimensions: int) -> bool:
    """Whether a product reads matrices in place: their rows or columns are contiguous."""
    if tensor.dim() != dimensions or tensor.layout is not torch.strided:
        return True
    (rows, columns), (down, right) = tensor.shape[-2:], tensor.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
