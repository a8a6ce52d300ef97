"""What sparse gradients of tables hold, on tensors without memory.

Problem: a sparse tensor has no storage that could be counted; on shapes alone, torch makes the
gradient of an `EmbeddingBag` without any rows; and it copies a gradient where a real backward gives
the gradient itself to the table. Invariant: the rows are counted as long as the gradient lives, or
what was made of it. Imports nothing of lowtide. Rejected: adding them to the peak, as a step with
several tables has the rows of all at its end.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

_HELD = "__lowtide_rows__"  # on a sparse tensor: what lives as long as it does
_MEMBERS = ("_sparse_coo_tensor", "sparse_coo_tensor")  # these share memory with what is given
_SUMS = ("add", "sub")
_NUMBER = 8  # bytes of a row's number


class _Level(Protocol):
    level: int


class _Rows:
    """Bytes that are counted until nobody has this any more."""

    def __init__(self, memory: _Level, nbytes: int, lent: int = 0) -> None:
        self.nbytes = nbytes
        self.lent = lent  # bytes of the rows' numbers, if they are in memory that others own
        self._memory = weakref.ref(memory)  # no cycle: the count goes when the step is over
        memory.level += nbytes

    def __del__(self) -> None:
        memory = self._memory()
        if memory is not None:
            memory.level -= self.nbytes


def hold_rows(memory: _Level, func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Count what a call has made, if that is a sparse tensor."""
    if not isinstance(result, torch.Tensor) or result.layout is not torch.sparse_coo:
        return
    name = func.__name__.partition(".")[0]
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    held: Any
    if name == "_embedding_bag_backward":
        grad, looked_up = tensors[:2]
        row = grad.shape[-1] * grad.element_size()
        held = _Rows(memory, looked_up.numel() * row, looked_up.numel() * _NUMBER)
    elif name.startswith(_MEMBERS):
        held = tensors
    else:
        held = [vars(t)[_HELD] for t in tensors if _HELD in vars(t)]
        if name in _SUMS:  # the rows of both, side by side
            held = _Rows(memory, sum(map(_nbytes, held)))
    setattr(result, _HELD, held)


def _nbytes(held: Any) -> int:
    if isinstance(held, _Rows):
        return held.nbytes + held.lent
    if isinstance(held, torch.Tensor):
        return held.nbytes
    return sum(map(_nbytes, held))
