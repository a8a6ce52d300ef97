"""The leaves that a step reads: which gradients backward will allocate, and after which operation.

Problem: a gradient is there from the last reader of its leaf (the first that backward reaches) to
the end of the step, and belongs to no operation's result. Invariant: leaves are known by weak
references and by identity; what is counted are gradients that are not there yet. Imports rebuild.
Rejected: looking through a model's parameters, which knows neither what a step reads nor leaves
that are no parameters.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from lowtide import _compat

if TYPE_CHECKING:
    from lowtide.rebuild import OpLog
    from lowtide.seen import Seen


class Leaves:
    """What a step reads that collects a gradient, or might.

    Attributes:
        gradients: leaf -> (last reader, bytes), of gradients to be allocated.
        known: leaf -> (last reader, the leaf), of all that may collect one.
        readers: of each leaf, as far as they were watched.
        frozen: parameters that collect none.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, tuple[int, int]] = {}
        self.known: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self.readers: dict[int, list[int]] = {}
        self.frozen: dict[int, weakref.ref[torch.Tensor]] = {}

    def resume(self, seen: Seen, count: int) -> None:
        """Those that the first `count` operations of another step have read."""
        for key, (reader, nbytes) in seen.parameters.items():
            if reader < count:
                self.gradients[key] = (reader, nbytes)
        self.known = {key: leaf for key, leaf in seen.leaves.items() if leaf[0] < count}
        self.frozen = dict(enumerate(seen.frozen))

    def read(self, tensor: torch.Tensor, ops: list[OpLog]) -> None:
        """The operation that follows `ops` reads a tensor."""
        if not tensor.requires_grad:
            self._no_leaf(tensor)
            return
        leaf = _compat.leaf_of(tensor)
        if leaf is None:
            return
        nbytes = leaf.numel() * leaf.element_size()
        reader, _ = self.known.get(id(leaf), (-1, None))
        if 0 <= reader < len(ops):
            ops[reader].besides += nbytes  # it adds to what a later reader gave
        self.known[id(leaf)] = (len(ops), _weak(leaf))
        self.readers.setdefault(id(leaf), []).append(len(ops))
        if leaf.grad is None:
            self.gradients[id(leaf)] = (len(ops), nbytes)

    def _no_leaf(self, tensor: torch.Tensor) -> None:
        """It gets no gradient; that may change before another step."""
        parameter = _compat.frozen_parameter(tensor)
        if parameter is not None and id(parameter) not in self.frozen:
            self.frozen[id(parameter)] = _weak(parameter)

    def look_again(self) -> None:
        """Gradients may have been set to None since the forward, or allocated."""
        for key, (reader, weak) in self.known.items():
            leaf = weak()
            if leaf is None:
                continue
            if leaf.grad is None:
                self.gradients[key] = (reader, leaf.numel() * leaf.element_size())
            else:
                self.gradients.pop(key, None)


def _weak(leaf: torch.Tensor) -> weakref.ref[torch.Tensor]:
    return weakref.ref(leaf)
