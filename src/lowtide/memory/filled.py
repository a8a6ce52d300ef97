"""What backward formulas do on real tensors that they do not under a mode or without memory.

Problem: the gradient of what a `gather` or an index has read is zeros of its size, filled in. Of
real tensors torch fills them in place; under a mode, and on tensors without memory, it makes a
filled copy beside them. So do the steps of a few other formulas. That of a maximum over everything
makes its result at its end, and on real tensors zeros before it has counted the ties. Invariant:
only a call that reads the zeros made right before it is changed, so nothing else can have them; in
a formula of several steps that is known to write in place, one that begins with what the same node
has made. What is there besides is counted where the formula has the most.
Imports `_compat` and the tape's facts. Rejected: leaving the copy out of the count, as the formula
holds the zeros until it returns.
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
# Nodes whose formula is several steps, and those of them that write in place.
_STEPS = {
    "BinaryCrossEntropyWithLogitsBackward0": {
        f"aten::{name}": getattr(torch.ops.aten, f"{name}_") for name in ("sub", "mul")
    }
}
# Nodes that share a gradient evenly among all that equal the result. How many these are is summed
# while the zeros are there that become the gradient, by a share that is filled in; without memory,
# while two more masks are, as torch cannot look whether the result is a NaN, and one is multiplied.
_SHARING = frozenset(
    f"{name}Backward{overload}"
    for name, overload in (("Max", 1), ("Min", 1), ("Median", 0), ("Nanmedian", 0))
)
_SHARES = frozenset(("aten::eq", "aten::sum", "aten::mul"))


class Filled:
    """Follows the calls of a backward, one after another.

    Attributes:
        beside: how many more bytes the formula has on real tensors while the call runs that
            `as_real` was last asked about.
    """

    _zeros: int | None = None  # the storage of zeros that the last operator made, if it did
    _shared = 0  # bytes of the gradient that is shared evenly, less those of two masks
    beside = 0

    def __init__(self) -> None:
        self._steps: set[int | None] = set()  # storages that a formula of several steps has made
        self._node: int | None = None  # whose formula that is

    def as_real(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operator that runs on real tensors."""
        name = _compat.schema_of(func).name
        self.beside = 0
        if name in _SHARES and _compat.name_of_node_in_backward() in _SHARING:
            if name == "aten::eq":
                self._shared = args[0].nbytes - 2 * args[0].numel()
            elif name == "aten::sum":
                self.beside = self._shared
            else:  # the mask with the share, of which no copy is made
                self.beside = -args[0].numel() * args[1].element_size()
        written = _FILLED.get(name)
        if written and self._zeros is not None and _storage_of(args[0]) == self._zeros:
            return getattr(written, func._overloadname)
        if self._steps and _storage_of(args[0]) in self._steps:
            written = _STEPS.get(_compat.name_of_node_in_backward(), {}).get(name)
            if written and self._node == _compat.node_in_backward():
                return getattr(written, func._overloadname)
        return func

    def as_recorded(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The operator that runs on real tensors, with its arguments, as the compiled recorder sees
        it. As that is not a mode, an index has a kernel of its own there, which need not check the
        indices once more."""
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
        if _compat.name_of_node_in_backward() in _STEPS and not facts_of(func).view:
            if self._node != _compat.node_in_backward():
                self._node, self._steps = _compat.node_in_backward(), set()
            self._steps.add(_storage_of(result))
        elif self._steps:
            self._steps = set()


def _storage_of(tensor: Any) -> int | None:
    """The identity of a tensor's storage."""
    storage = _compat.storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return None if storage is None else _compat.storage_id(storage)
