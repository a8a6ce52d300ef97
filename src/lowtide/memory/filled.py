"""Which backward formulas write into zeros that they have just made.

Problem: the gradient of what a `gather` or an index has read is zeros of its size, filled in. Of
real tensors torch fills them in place; under a mode, and on tensors without memory, it makes a
filled copy beside them. Invariant: only a call that reads the zeros made right before it is
changed, so nothing else can have them. Imports `_compat` and the tape's facts. Rejected: leaving
the copy out of the count, as the formula holds the zeros until it returns.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide import _compat
from lowtide.tape.operators import facts_of

_ZEROS = frozenset(("aten::new_zeros", "aten::zeros", "aten::zeros_like"))
_FILLED = {
    f"aten::{name}": getattr(torch.ops.aten, f"{name}_")
    for name in ("scatter", "scatter_add", "index_add", "index_put", "index_fill", "index_copy")
}
_INDEX_PUT = torch.ops.aten.index_put.default


class Filled:
    """Follows the calls of a backward, one after another."""

    _zeros: int | None = None  # the storage of zeros that the last operator made, if it did

    def as_real(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operator that runs on real tensors."""
        written = _FILLED.get(_compat.schema_of(func).name)
        if written and self._zeros is not None and _storage_of(args[0]) == self._zeros:
            return getattr(written, func._overloadname)
        return func

    def as_recorded(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The same with its arguments, as the compiled recorder sees it, which is not a mode: an
        index has a kernel of its own, which need not check the indices once more."""
        real = self.as_real(func, args)
        if real is not func and func is _INDEX_PUT:
            return _compat.index_put_unchecked, (*args, True)
        return real, args

    def ran(self, func: Any, result: Any) -> None:
        """The call is over."""
        if _compat.schema_of(func).name in _ZEROS:
            self._zeros = _storage_of(result)
        elif not facts_of(func).view or _storage_of(result) == self._zeros:
            self._zeros = None  # views of other tensors may come in between


def _storage_of(tensor: Any) -> int | None:
    """The identity of a tensor's storage."""
    storage = _compat.storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return None if storage is None else _compat.storage_id(storage)
