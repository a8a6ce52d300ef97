"""A forward as numbers, kept with the plan that was made from it.

Problem: whether a step is the planned one is told by its operations, but not whether its backward
is: to freeze a parameter, or to run a part under `no_grad`, changes what autograd saves and the
gradients to come, and no operation shows it. Invariant: no tensor is held, leaves are known by weak
references. Imports rebuild, modelled. Rejected: what requires grad in the signature of each
operation, which costs every planned step a look at every argument.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide.modelled import look_closer
from lowtide.rebuild import OpLog


@dataclass(frozen=True)
class Seen:
    """What an observer knows of a forward, as numbers; kept with the plan that was made from it."""

    ops: tuple[OpLog, ...]
    carries_grad: frozenset[int]
    parameters: dict[int, tuple[int, int]]
    leaves: dict[int, tuple[int, weakref.ref[torch.Tensor]]]
    """Every leaf that may collect a gradient; `parameters` are those that had none yet."""
    forward: int
    """Operations before backward began."""
    saved: frozenset[int] | None = None
    """Values that autograd had saved when backward began; None: not known."""
    frozen: tuple[weakref.ref[torch.Tensor], ...] = ()
    """Parameters that were read and collect no gradient."""
    place: int = 0
    """Among the steps of its context, see `lowtide.known_plans`."""
    before: int = 0
    """Bytes that those before it had left in memory."""
    retains: bool = False
    """Whether its backward gave nothing back of what was saved, as `retain_graph` asks."""

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process its tensors are not there, nor can operators be sent to one: what
        they cost can."""
        look_closer(self.ops, self.carries_grad)
        ops = tuple(
            [replace(log, kind=None, hidden=None, node=False, function=False) for log in self.ops]
        )
        parameters = {-1 - place: pair for place, pair in enumerate(self.parameters.values())}
        return Seen, (
            ops, self.carries_grad, parameters, {}, self.forward, self.saved, (), self.place,
            self.before, self.retains,
        )  # fmt: skip

    def __deepcopy__(self, _: Any) -> Seen:
        return self

    def current(self) -> bool:
        """Whether the leaves that collect gradients are still those of this step.

        What a user freezes or unfreezes changes what autograd saves and the gradients to come, and
        no operation shows it.
        """
        for weak in self.frozen:
            leaf = weak()
            if leaf is not None and leaf.requires_grad:
                return False
        for _, weak in self.leaves.values():
            leaf = weak()
            if leaf is not None and not leaf.requires_grad:
                return False
        return True

    def same_gradients(self) -> bool:
        """Whether exactly those gradients are to be allocated now that were in this step."""
        for key, (_, weak) in self.leaves.items():
            leaf = weak()
            if leaf is not None and (leaf.grad is None) != (key in self.parameters):
                return False
        return True

    def appeared(self) -> dict[int, tuple[int, int]]:
        """Leaves that had a gradient in this step and have none now: it will be allocated."""
        readers = {}
        for key, (reader, weak) in self.leaves.items():
            leaf = weak()
            if leaf is not None and leaf.grad is None and key not in self.parameters:
                readers[key] = (reader, leaf.numel() * leaf.element_size())
        return readers
