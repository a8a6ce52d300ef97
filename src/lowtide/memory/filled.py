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

_ZEROS = frozenset(("aten::new_zeros", "aten::zeros", "aten::zeros_like"))
_FILLED = {
    f"aten::{name}": getattr(torch.ops.aten, f"{name}_")
    for name in ("scatter", "scatter_add", "index_add", "index_put", "index_fill", "index_copy")
}


class Filled:
    """Follows the calls of a backward, one after another."""

    _zeros: int | None = None  # the storage of zeros that the last operator made, if it did

    def as_real(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operator that runs on real tensors."""
        written = _FILLED.get(_compat.schema_of(func).name)
        if written and self._zeros is not None and _storage_of(args[0]) == self._zeros:
            return getattr(written, func._overloadname)
        return func

    def ran(self, func: Any, result: Any) -> None:
        """The call is over."""
        made = _compat.schema_of(func).name in _ZEROS
        self._zeros = _storage_of(result) if made else None


def _storage_of(tensor: Any) -> int | None:
    """The identity of a tensor's storage."""
    storage = _compat.storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return None if storage is None else _compat.storage_id(storage)
