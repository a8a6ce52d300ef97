"""`_grouped_mm`, the products of the experts of a mixture, on tensors without memory.

Problem: torch's shape function takes bfloat16 alone, the kernels on the CPU and most GPUs all
floating-point types: no mixture of experts in float32 could be planned on shapes. Invariant: the
shape that torch gives bfloat16, in the dtype that the kernels return. Imports `_compat`. Rejected:
a shape function of our own, or another one registered with torch, which changes it for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat

NAME = "aten::_grouped_mm"
"""Products of groups of rows, of which no shape tells the sizes."""
_OUT_DTYPE = 4  # among the positional arguments


def on_shapes(
    call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What `call(func, args, kwargs)` returns, for any operator and any floating-point type."""
    if _compat.schema_of(func).name != NAME or args[0].dtype == torch.bfloat16:
        return call(func, args, kwargs)
    given = kwargs.get("out_dtype") or (args[_OUT_DTYPE] if len(args) > _OUT_DTYPE else None)
    named = {name: _narrow(a) for name, a in kwargs.items() if name != "out_dtype"}
    result = call(func, tuple(map(_narrow, args[:_OUT_DTYPE])), named)
    return result.to(given or args[0].dtype)


def _narrow(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.is_floating_point():
        return argument.to(torch.bfloat16)
    return argument
