"""The gradients of tables that are sparse.

Problem: with ``sparse=True``, the gradient of an embedding's table has the rows that were looked
up, and those alone: a millionth of the table, perhaps. torch does not make such a gradient on
shapes alone, so nothing else tells how large it is. Invariant: only numbers are noted. Imports
nothing that runs. Rejected: the gradient as large as the table, which refuses the first step of
every recommender.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SPARSE = {"aten::embedding": 4, "aten::_embedding_bag": 5}  # which argument asks for it
_INDICES = 1
_PLACES = 8  # bytes of a row's number


def sparse_gradient(name: str, args: Sequence[Any]) -> int | None:
    """Bytes of the gradient that an operation gives to the table that it reads; None if it is as
    large as the table."""
    place = _SPARSE.get(name)
    if place is None or len(args) <= place or args[place] is not True:
        return None
    table, looked_up = args[0], args[_INDICES].numel()
    row = table.element_size() * table.shape[-1]
    return int(looked_up * (row + _PLACES))


def sparse_temporaries(name: str, gradient: int) -> int:
    """Bytes that the backward takes, and leaves: the rows of an embedding are the gradient of its
    result, and are counted as that; those of a bag are copied from it."""
    return gradient if name == "aten::_embedding_bag" else 0
