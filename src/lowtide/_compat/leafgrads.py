"""What a custom backward returns as the gradient of a leaf.

Problem: the first gradient of a leaf becomes its `.grad` without a copy if nobody else refers to
that tensor. A custom backward may return what it has saved. Without hooks, that is the very tensor
that the program or another node still refers to; what a saved-tensor hook returns, autograd wraps
in a new tensor over the same memory: two leaves, or a leaf and a parameter, would share it, and the
next step would add to both. Invariant: as in `lowtide._compat`, of which this is a part; such a
gradient is copied if anybody else has its memory. Imports autograd and tensors. Rejected: handing
out copies, which costs the size of a weight for each custom layer that saves it.
"""

from __future__ import annotations

import torch
from torch.autograd.function import BackwardCFunction

from lowtide._compat.autograd import queue_after_backward
from lowtide._compat.tensors import has_own_dispatch, storage_holders, storage_id, storage_of

_ITS_OWN = 2  # owners of a storage of which there is one tensor: that, and Python's wrapper of it


def keep_from_leaves(tensor: torch.Tensor) -> None:
    """A saved tensor is about to be unpacked: see to it that no leaf's gradient shares its memory
    with anything else.

    Unnecessary when torch does so for what hooks return, as `AccumulateGrad` does for what nobody
    has packed.
    """
    if torch.is_grad_enabled():  # then gradients are copied anyway
        return
    node = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction) or has_own_dispatch(type(tensor)):
        return
    for following, _ in node.next_functions:
        leaf = getattr(following, "variable", None)
        if leaf is None or leaf.grad is not None:
            continue
        if leaf.shape == tensor.shape and leaf.dtype == tensor.dtype:
            storage = storage_of(tensor)
            if storage is not None:
                handle = following.register_prehook(_Copies(storage_id(storage)))
                queue_after_backward(handle.remove)


class _Copies:
    """A hook of a leaf's node: copies a gradient over a certain memory that somebody else has."""

    def __init__(self, key: int) -> None:
        self._key = key

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> object:
        (gradient,) = gradients
        storage = None if gradient is None else storage_of(gradient)
        if gradient is None or storage is None or storage_id(storage) != self._key:
            return None
        return None if storage_holders(storage) == _ITS_OWN else (gradient.clone(),)
