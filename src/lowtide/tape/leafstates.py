"""The present state of leaf tensors: whether each exists, requires grad, has a gradient.

Problem: whether the plan of a step fits the next one depends on the state of every leaf that the
step reads, and a model has thousands. Invariant: each leaf is looked at once and gets one byte;
the caller remembers what it concluded from the bytes. Imports torch. Rejected: asking tensor by
tensor where it matters, a third of what lowtide cost a step of small kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

LeafRefs = Sequence["weakref.ref[torch.Tensor]"]

GONE = 0
HERE, REQUIRES, HAS_GRADIENT = 1, 2, 4
"""The state of a leaf that exists is the sum of those that apply."""


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
    """Use the compiled core's function in place of Python's."""
    _look[0] = look


def states(leaves: LeafRefs) -> bytes:
    """A byte for each leaf: `GONE`, or a sum of `HERE`, `REQUIRES` and `HAS_GRADIENT`."""
    return _look[0](leaves)
