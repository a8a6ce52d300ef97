"""Operators on tensors without memory, where torch's own way is too slow or refuses.

Problem: a shape function may be a decomposition that takes a hundred times as long as the others,
or may know some dtypes only; an operator that has none runs as several others. Invariant: results
are those of torch's way where that works and agrees with the kernels. Imports quick and grouped.
Rejected: registering other shape functions with torch, which changes them for all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lowtide import _compat
from lowtide.kernels import grouped, quick

_aten = torch.ops.aten
# The backward of `mish` is one kernel on every device that has memory. Without memory torch runs
# it as ten operators, above every mode, so the six tensors between them would be taken for its own.
# That of `silu` reads and makes what the kernel does.
_ALIKE = {_aten.mish.default: _aten.silu.default, _aten.mish_.default: _aten.silu_.default}


def with_shapes(func: Any) -> Any:
    """The operator to run without memory to learn what the backward of this one takes."""
    return _ALIKE.get(func, func)


def on_shapes(
    call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What `call(func, args, kwargs)` returns, for any operator and any floating-point type."""
    made = quick.made_by(func, args, kwargs)
    return grouped.on_shapes(call, func, args, kwargs) if made is None else made


class _OnShapes(_compat.Mode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return on_shapes(lambda f, a, k: f(*a, **k), func, args, kwargs or {})


def shaping(func: Any) -> AbstractContextManager[Any]:
    """In which this operator runs under autograd on the meta device."""
    name = _compat.schema_of(func).name
    return _OnShapes() if name == grouped.NAME or name in quick.KNOWN else nullcontext()
