"""Operators on tensors without memory, where torch's own way is too slow or refuses.

Problem: a shape function may be a decomposition that takes a hundred times as long as the others,
or may know some dtypes only. Invariant: results are those of torch's way where that works and
agrees with the kernels. Imports quick and grouped. Rejected: registering other shape functions with
torch, which changes them for all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lowtide import _compat
from lowtide.kernels import grouped, quick


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
