"""What operators on the CPU take for tensors of another type, and kernels of several steps.

Problem: an operator on tensors of two types converts one as a whole before its loop begins, so that
a product with a mask takes four times the mask; no record of the step shows it. Invariant: as
measured, kernel by kernel; nothing here is for other devices, which convert as they read. Imports
torch. Rejected: a share of what an operator makes, as a reduction makes next to nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
_DIVIDING = ("aten::div", "aten::div_")  # whole numbers become fractions
# Sums of truth values and small whole numbers are sums of long ones.
_SUMMING = frozenset(f"aten::{n}" for n in ("sum", "prod", "cumsum", "cumprod", "count_nonzero"))
_LONG = 8  # bytes
_FLOAT = 4
_EXPONENTIAL = 10  # matrices that it keeps for each one that it is given: powers of it, and sums


def converted(name: str, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """Bytes of a call's tensors in the type that it computes in."""
    if name in _ELEMENTWISE:
        return _promoted(name, tensors, args)
    if name in _SUMMING and tensors:
        small = not (tensors[0].is_floating_point() or tensors[0].is_complex())
        return _LONG * tensors[0].numel() if small and tensors[0].dtype != torch.int64 else 0
    if name == "aten::mean" and tensors and tensors[0].dtype in (torch.bfloat16, torch.float16):
        return _FLOAT * tensors[0].numel()
    several = _SEVERAL.get(name)
    return 0 if several is None or not tensors else several(tensors, args)


def _promoted(name: str, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    if name.startswith("aten::where"):
        tensors = tensors[1:]  # the mask is read as it is
    large = [t for t in tensors if t.dim()]
    if not large:
        return 0
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in large))
    fractions = name in _DIVIDING or any(isinstance(a, float) for a in args)
    if fractions and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    taken = [dtype.itemsize * t.numel() for t in large if t.dtype != dtype]
    if taken and name.endswith("_") and large[0].dtype != dtype:  # and what is written to it
        taken.append(taken[0])
    return sum(taken)


def _mean_by_index(tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """Ones to be counted, the counts, and where they are none."""
    if "mean" not in args or len(tensors) < 3:
        return 0
    return _bytes(tensors[2]) + _bytes(tensors[0]) + tensors[0].numel()


def _trilinear(tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """Two products for each index of one dimension: of two tensors, and of that with the third."""
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
    "aten::linalg_matrix_exp": lambda tensors, _: _EXPONENTIAL * _bytes(tensors[0]),
    "aten::kthvalue": lambda tensors, _: _bytes(tensors[0]) + _LONG * tensors[0].numel(),
    "aten::median": lambda tensors, args: 0 if len(args) > 1 else _bytes(tensors[0]),
    "aten::scatter_reduce": _mean_by_index,
    "aten::index_reduce": _mean_by_index,
    "aten::_trilinear": _trilinear,
}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
