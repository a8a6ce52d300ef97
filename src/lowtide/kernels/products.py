"""What matrix products on the CPU copy and pack.

Problem: a product copies matrices that it cannot read in place, and for half-precision types oneDNN
also packs what it multiplies, or sums in float32. Invariant: as measured; for what oneDNN packs,
where no formula was found, more than was measured for some 300 sizes of either kind (AMX's tiles,
AVX-512's own float16) and 1,800 of AVX-512's bfloat16, on one and two threads. Imports `_compat`,
blocks and grouped. Rejected: leaving the packed matrices out, which are of the size of a parameter.
"""

from __future__ import annotations

import math

import torch

from lowtide import _compat
from lowtide.kernels.blocks import nbytes, up
from lowtide.kernels.grouped import NAME as GROUPED

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_addmm_activation"})
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
_BY_VECTOR = frozenset({"aten::mv", "aten::addmv"})
_KNOWN = _PRODUCTS | _BATCHED | _BY_VECTOR
_TINY = 400  # multiplications, in a pair of matrices of a batch that is not copied
_TINY_MATRIX = 1 << 12  # elements of a matrix that oneDNN does not multiply by a vector
_LEAST = 24 << 10  # bytes that each thread takes however small the matrices are
_SUM, _HALF = 4, 2  # bytes of a float32, and of a half-precision number
_BLOCK = 64  # columns, and steps between rows and columns, are packed by so many
# What each thread packs at most, in rows, columns and steps; of narrow products and of wide ones.
_ROWS, _WIDE_ROWS = 256, 512
_COLUMNS, _FEW_COLUMNS, _WIDE_COLUMNS = 256, 384, 1024
_STEPS, _SUMMED_STEPS = 1536, 1024
_VECTOR_STEPS, _VECTOR_LEAST = 1024, 6 << 10  # of a vector: steps, and bytes besides
_FEW_ROWS = 64
_WHOLE = 1 << 19  # elements of a right matrix that is packed as a whole
# The same for bfloat16 without tiles, of a left matrix whose columns are contiguous.
_TURNED_ROWS, _TURNED_COLUMNS, _TURNED_SUMS = 256, 128, 1024


def product_workspace(name: str, tensors: list[torch.Tensor], device: str) -> int | None:
    """Bytes that a product on this type of device allocates besides its result.

    None if the operator is no product. A matrix is copied if neither its rows nor its columns are
    contiguous, as in the gradient of a sum, which is one number expanded. Batches are multiplied,
    and copied, one pair after another; oneDNN takes, and copies, all of them at once. So is, on the
    CPU, a batch that is lazily conjugated, as those of the gradients of complex numbers are.
    """
    if name == GROUPED:
        return _of_groups(tensors[:2], device)
    if name not in _KNOWN:
        return None
    left, right = tensors[-2:]
    if name in _BY_VECTOR:
        return _of_a_vector(left, right, device)
    batched = name in _BATCHED
    conjugated: list[torch.Tensor] = []
    if device == "cpu" and left.is_complex():
        conjugated = [t for t in (left, right) if _is_conjugated_first(t, batched)]
    copied = sum(map(nbytes, conjugated))
    if batched and math.prod(left.shape[1:]) * right.shape[-1] < _TINY:
        return copied
    if device == "cpu" and left.element_size() == 2 and _compat.onednn_takes(left.dtype):
        return _of_halves(left, right)
    pairs, dimensions = (max(1, left.shape[0]), 3) if batched else (1, 2)
    if device == "cuda":  # one kernel multiplies all of them
        pairs = 1
    for tensor in (left, right):
        again = not any(tensor is one for one in conjugated) or _innermost_first(tensor)
        if again and not _readable(tensor, dimensions):
            copied += nbytes(tensor) // pairs
    return copied


def _innermost_first(tensor: torch.Tensor) -> bool:
    """Whether the pairs of a batch alternate in memory, as they do in a copy of it too."""
    return tensor.dim() == 3 and 0 < tensor.stride(0) < min(tensor.stride()[1:])


def _is_conjugated_first(tensor: torch.Tensor, batched: bool) -> bool:
    """Whether a kernel on the CPU makes a conjugated copy: of a single matrix, it reads columns as
    the conjugate of a transposed one."""
    return tensor.is_conj() and (batched or tensor.stride(0) != 1)


def _of_a_vector(matrix: torch.Tensor, vector: torch.Tensor, device: str) -> int:
    """Bytes that the product of a matrix and a vector allocates besides its result. oneDNN reads
    neither with gaps, and packs the vector like a block of columns, and some rows of a matrix that
    is stored by columns, unless it is tiny."""
    half = device == "cpu" and matrix.element_size() == 2 and _compat.onednn_takes(matrix.dtype)
    if not half or matrix.numel() <= _TINY_MATRIX:
        return 0 if _readable(matrix, 2) else nbytes(matrix)
    turned = not matrix.is_contiguous() and matrix.mT.is_contiguous()
    read = [vector] if turned else [matrix, vector]
    copied = sum(nbytes(t) for t in read if not t.is_contiguous())
    rows, steps = up(matrix.shape[0], _BLOCK), min(up(matrix.shape[1], _BLOCK), _VECTOR_STEPS)
    rows = min(rows, _ROWS) if turned and rows > _BLOCK else 0
    packed = _HALF * steps * (_BLOCK + rows)
    return copied + torch.get_num_threads() * (packed + _VECTOR_LEAST)


def _of_halves(left: torch.Tensor, right: torch.Tensor) -> int:
    """Bytes that a product which oneDNN takes allocates besides its result."""
    copied = sum(nbytes(t) for t in (left, right) if not _dense(t))
    if not _compat.onednn_multiplies(left.dtype):
        return copied + _SUM * left.shape[-2] * right.shape[-1]
    rows, columns, steps = left.shape[-2], up(right.shape[-1], _BLOCK), up(left.shape[-1], _BLOCK)
    tiles = _compat.onednn_tiles(left.dtype)
    if left.dtype == torch.float16 and not tiles:
        packed = _in_float32(rows, columns, steps)
    elif tiles:
        packed = _in_halves(rows, columns, steps)
    else:
        as_read = left.stride(-1) == 1 or not _dense(left)  # of a copy the rows are contiguous
        packed = _in_vectors(up(rows, _BLOCK), columns, steps, as_read)
    return copied + torch.get_num_threads() * (packed + _LEAST)


def _in_float32(rows: int, columns: int, steps: int) -> int:
    """Bytes of the blocks of one thread where AVX-512 multiplies and sums in float32."""
    rows, columns, steps = min(rows, _ROWS), min(columns, _COLUMNS), min(steps, _STEPS)
    return _SUM * (rows * steps + steps * columns + rows * columns)


def _in_halves(rows: int, columns: int, steps: int) -> int:
    """Bytes of the blocks of one thread where AMX multiplies in tiles: they are in half precision,
    and only long sums are not kept in the tiles."""
    most = _FEW_COLUMNS if rows <= _FEW_ROWS else _WIDE_COLUMNS
    right = min(columns * steps, max(most * steps, _WHOLE))
    rows = min(up(rows, _BLOCK) + _BLOCK, _WIDE_ROWS)
    sums = rows * min(columns, _WIDE_COLUMNS) if steps > _SUMMED_STEPS else 0
    return _HALF * (rows * steps + right) + _SUM * sums


def _in_vectors(rows: int, columns: int, steps: int, as_read: bool) -> int:
    """Bytes of the blocks of one thread where AVX-512 multiplies bfloat16, however many steps there
    are. A left matrix whose rows are contiguous is read in place; another one, such as a gradient
    that makes that of a parameter, is packed, and kept for all columns of the sums. Short sums are
    in memory, too."""
    steps, right = min(steps, _SUMMED_STEPS + _BLOCK), min(columns, _TURNED_COLUMNS)
    sums = min(rows, _ROWS) * min(columns, _BLOCK if as_read else _TURNED_SUMS)
    return _HALF * steps * (right if as_read else min(rows, _TURNED_ROWS) + right) + _SUM * sums


def _of_groups(tensors: list[torch.Tensor], device: str) -> int:
    """At most the same for products of groups, which are multiplied one after another: one of them
    may have all rows."""
    left, right = tensors
    if device != "cpu" or left.element_size() != 2 or not _compat.onednn_takes(left.dtype):
        return 0
    return _of_halves(*(t if t.dim() == 2 else t[0] for t in (left, right)))


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
