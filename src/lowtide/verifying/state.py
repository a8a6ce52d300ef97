"""Everything that a step reads and moves, to start it again and again from the same state.

Problem: two runs of one step can be compared only if both begin alike. Invariant: inside of
`from_here` the step begins without gradients, with the parameters, buffers, inputs, optimizers,
schedulers, scalers and random states that there were, and afterwards all of it is as it was; what
holds a state is the same object. Imports dryrun. Rejected: `load_state_dict` of optimizers, which
casts what they keep in float32 for parameters of half precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.dryrun.standins import Found, RealState

Tensor = torch.Tensor
_OTHERS = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)


class Reached(Found):
    """What a step reaches, with what else has a state of its own.

    Attributes:
        optimizers: of torch's kind.
        others: gradient scalers and schedulers.
        generators: of the program's own.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.others: list[Any] = []
        self.generators: list[torch.Generator] = []
        super().__init__(function, args, kwargs)
        for module in self.modules():  # which are looked into for parameters and buffers alone
            for item in vars(module).values():
                if isinstance(item, (torch.Generator, torch.optim.Optimizer, *_OTHERS)):
                    self._visit("", item, 0)
        known = {id(tensor) for tensor in (*self.state(), *self.tensors)}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self.tensors += [t for t in group["params"] if id(t) not in known]
                known.update(map(id, group["params"]))

    def _visit(self, label: str, item: Any, depth: int) -> None:
        places: list[Any]
        if isinstance(item, torch.optim.Optimizer):
            places = self.optimizers
        elif isinstance(item, _OTHERS):
            places = self.others
        elif isinstance(item, torch.Generator):
            places = self.generators
        else:
            super()._visit(label, item, depth)
            return
        if all(item is not other for other in places):
            places.append(item)

    def leaves(self) -> list[Tensor]:
        """Those to which a backward may give gradients."""
        return [t for t in (*self.state(), *self.tensors) if t.is_leaf]

    @contextmanager
    def from_here(self) -> Iterator[None]:
        """Start without gradients, and leave everything as it was."""
        leaves = self.leaves()
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        optimizers = [_Optimizer(optimizer) for optimizer in self.optimizers]
        others = [copy.deepcopy(other.state_dict()) for other in self.others]
        drawn = [generator.get_state() for generator in self.generators]
        try:
            with RealState(self, whole=True):
                yield
        finally:
            for optimizer in optimizers:
                optimizer.put_back()
            for other, state in zip(self.others, others, strict=True):
                other.load_state_dict(state)
            for generator, state in zip(self.generators, drawn, strict=True):
                generator.set_state(state)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient

    def named(self) -> Iterator[tuple[str, str, Tensor]]:
        """(kind, name, tensor) of parameters, buffers and inputs, each of them once."""
        seen: set[int] = set()
        for label, root in self.roots.items():
            prefix = f"{label}." if len(self.roots) > 1 else ""
            for kind, tensors in (
                ("parameter", root.named_parameters()),
                ("buffer", root.named_buffers()),
            ):
                for name, tensor in tensors:
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield kind, prefix + name, tensor
        for place, tensor in enumerate(self.tensors):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield "input", f"{place} of shape {tuple(tensor.shape)}", tensor


class _Optimizer:
    """What an optimizer keeps: its groups, and for each parameter a dictionary."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._kept = [
            (parameter, entries, {name: (item, _copy(item)) for name, item in entries.items()})
            for parameter, entries in optimizer.state.items()
        ]

    def put_back(self) -> None:
        for group, before in self._groups:
            group.clear()
            group.update(before)
        self._optimizer.state.clear()
        for parameter, entries, before in self._kept:
            entries.clear()
            for name, (item, content) in before.items():
                if isinstance(item, Tensor):
                    item.data.copy_(content)
                entries[name] = item if isinstance(item, Tensor) else content
            self._optimizer.state[parameter] = entries


def _copy(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.detach().to("cpu", copy=True)
    return copy.deepcopy(item)
