"""Memory that operators on the CPU use to convert dtypes, and that kernels of several steps use.

Problem: an operator on tensors of two dtypes converts one of them as a whole before its loop, so a
product with a boolean mask allocates four times the mask, and a mask with a number added eight
times; the tape does not show this. Invariant: as measured, kernel by kernel; only for the CPU,
since other devices convert while reading. Imports `_compat` and blocks. Rejected: a share of the
operator's result, as that of a reduction is tiny.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide import _compat
from lowtide.kernels.blocks import FLOAT, nbytes

_ELEMENTWISE = frozenset(
    f"aten::{name}{end}"
    for name in (
        "add", "sub", "rsub", "mul", "div", "pow", "atan2", "hypot", "fmod", "remainder",
        "maximum", "minimum", "fmax", "fmin", "copysign", "floor_divide", "addcmul", "addcdiv",
        "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor",
        "bitwise_and", "bitwise_or", "bitwise_xor", "where",
    )
    for end in ("", "_")
)  # fmt: skip
# Integers are divided, and the like, as floating-point numbers.
_DIVIDING = frozenset(f"aten::{n}{end}" for n in ("div", "atan2", "copysign") for end in ("", "_"))
# Sums of booleans and small integers are computed in int64.
_SUMMING = frozenset(f"aten::{n}" for n in ("sum", "prod", "cumsum", "cumprod", "count_nonzero"))
_LONG = 8  # bytes
# Python's numbers, by type.
_NUMBERS: dict[type, Callable[[], torch.dtype]] = {
    int: lambda: torch.int64,
    float: torch.get_default_dtype,
    complex: lambda: promoted(torch.get_default_dtype(), torch.complex32),
}
_EXPONENTIAL = 10  # matrices that `linalg_matrix_exp` allocates for each input: powers and sums


def out_of_place(name: str) -> str:
    """The operator that an in-place one is the in-place form of. Elementwise operators stay: in
    place they convert their result back."""
    return name[:-1] if name.endswith("_") and name not in _ELEMENTWISE else name


def converted(name: str, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """Bytes of the copies that a call makes in the dtype it computes in, or of its temporaries."""
    if name in _ELEMENTWISE:
        return _promoted(name, tensors, args)
    if name in _SUMMING and tensors:
        small = not (tensors[0].is_floating_point() or tensors[0].is_complex())
        return _LONG * tensors[0].numel() if small and tensors[0].dtype != torch.int64 else 0
    if name == "aten::mean" and tensors and tensors[0].dtype in (torch.bfloat16, torch.float16):
        return FLOAT * tensors[0].numel()
    several = _SEVERAL.get(name)
    return 0 if several is None or not tensors else several(tensors, args)


def promoted(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """`torch.promote_types`, which is an operator: no dry run is to see a call that the program
    does not make."""
    with _compat.disable_dispatch():
        return torch.promote_types(one, other)


def _promoted(name: str, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    if name.startswith("aten::where"):
        tensors = tensors[1:]  # the condition is not converted
    large = [t for t in tensors if t.dim()]
    if not large:
        return 0
    dtype = functools.reduce(promoted, (t.dtype for t in large))
    numbers = [kind() for a in args if (kind := _NUMBERS.get(type(a))) is not None]
    for others in ([t.dtype for t in tensors if not t.dim()], numbers):
        for other in others:
            dtype = _raised(dtype, other)
    if name in _DIVIDING and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    taken = [dtype.itemsize * t.numel() for t in large if t.dtype != dtype]
    if taken and name.endswith("_") and large[0].dtype != dtype:  # the result is converted back
        taken.append(taken[0])
    return sum(taken)


def _raised(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype of a tensor with what has no dimensions, which counts only if it is of a higher
    kind: booleans, integers, floating-point and complex numbers."""
    if dtype.is_complex or (dtype.is_floating_point and not other.is_complex):
        return dtype
    if dtype.is_floating_point:
        return promoted(dtype, torch.complex32)
    if dtype == torch.bool or other.is_floating_point or other.is_complex:
        return promoted(dtype, other)
    return dtype


def _mean_by_index(tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """The ones that are summed to counts, the counts, and the mask of where they are zero."""
    if "mean" not in args or len(tensors) < 3:
        return 0
    return nbytes(tensors[2]) + nbytes(tensors[0]) + tensors[0].numel()


def _trilinear(tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """For each index of one dimension two products: of two tensors, and of the result with the
    third."""
    if len(args) < 7 or len(tensors) < 3:
        return 0
    expanded, summed = args[3:6], set(args[6])
    unrolled = args[7] if len(args) > 7 else 1
    dims = range(tensors[0].dim() + len(expanded[0]))
    sizes: dict[int, int] = {}
    for tensor, missing in zip(tensors, expanded, strict=False):
        has = [d for d in dims if d not in missing]
        sizes.update(zip(has, tensor.shape, strict=False))
    both = set(expanded[0]) & set(expanded[1])
    first = [d for d in dims if d not in both and not (d in summed and d in expanded[2])]
    second = [d for d in dims if d not in summed]
    elements = sum(
        math.prod(sizes[d] for d in each if d != unrolled and d in sizes)
        for each in (first, second)
    )
    return elements * tensors[0].element_size()


_SEVERAL: dict[str, Callable[[Sequence[torch.Tensor], Sequence[Any]], int]] = {
    "aten::linalg_matrix_exp": lambda tensors, _: _EXPONENTIAL * nbytes(tensors[0]),
    "aten::kthvalue": lambda tensors, _: nbytes(tensors[0]) + _LONG * tensors[0].numel(),
    "aten::median": lambda tensors, args: 0 if len(args) > 1 else nbytes(tensors[0]),
    "aten::scatter_reduce": _mean_by_index,
    "aten::index_reduce": _mean_by_index,
    "aten::_trilinear": _trilinear,
}
