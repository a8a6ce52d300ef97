"""What leaves are like now: whether they are there, require grad, have a gradient.

Problem: whether the plan of a step fits the next one depends on that of every leaf it reads, and a
model has thousands of them. Invariant: one look at each, one byte for it; whoever asks keeps what
was made of the bytes. Imports torch. Rejected: asking tensor by tensor where it matters, which took
a step of small kernels a third of what all of lowtide costs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

LeafRefs = Sequence["weakref.ref[torch.Tensor]"]

GONE = 0
HERE, REQUIRES, HAS_GRADIENT = 1, 2, 4
"""Of what is not gone, the sum of what is true of it."""


def _one_by_one(leaves: LeafRefs) -> bytes:
    return bytes(
        GONE
        if (leaf := weak()) is None
        else HERE
        + REQUIRES * leaf.requires_grad
        + HAS_GRADIENT * (leaf.is_leaf and leaf.grad is not None)
        for weak in leaves
    )


_look: list[Callable[[LeafRefs], bytes]] = [_one_by_one]


def use(look: Callable[[LeafRefs], bytes]) -> None:
    """Have the compiled core look in place of Python."""
    _look[0] = look


def states(leaves: LeafRefs) -> bytes:
    """A byte for each leaf: `GONE`, or a sum of `HERE`, `REQUIRES` and `HAS_GRADIENT`."""
    return _look[0](leaves)
