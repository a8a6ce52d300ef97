"""Everything that a step reads and moves, to start it again and again from the same state.

Problem: two runs of one step can be compared only if both begin alike. Invariant: inside of
`from_here` the step begins without gradients, with the parameters, buffers, inputs, optimizers,
schedulers, scalers and random states that there were, and afterwards all of it is as it was; what
holds a state is the same object. Imports `_compat`, dryrun and kept. Rejected: `load_state_dict` of
optimizers, which casts what they keep in float32 for parameters of half precision.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import _compat
from lowtide.dryrun.found import DEPTH, Found
from lowtide.dryrun.putback import RealState, without_gradients
from lowtide.verifying import kept

Tensor = torch.Tensor
_OTHERS = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")


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
        self._drawing: list[Any] = []  # of Python's and NumPy's
        self._program: list[Any] = []  # objects and containers that are not lowtide's
        self._foreign = False
        super().__init__(function, args, kwargs)
        given, looked = len(self.tensors), set[int]()
        while more := [module for module in self.modules() if id(module) not in looked]:
            for module in more:  # which are looked into for parameters and buffers alone
                looked.add(id(module))
                for name, item in _compat.plain_attributes(module).items():
                    self._visit(name, item, DEPTH)
        known = {id(tensor) for tensor in self.state()}
        self.tensors[given:] = [
            t
            for t in self.tensors[given:]
            if id(t) not in known and t.device.type != "meta" and _usable(t)
        ]
        for optimizer in self.optimizers:
            self._add_parameters(optimizer)

    def _visit(self, label: str, item: Any, depth: int) -> None:
        places: list[Any]
        if isinstance(item, torch.optim.Optimizer):
            places = self.optimizers
            if depth and all(item is not other for other in places):
                places.append(item)
                self._program.append(vars(item))
                for name, part in vars(item).items():  # such as the optimizer that it wraps
                    if name not in _OF_OPTIMIZERS:
                        self._visit(name, part, depth - 1)
        elif isinstance(item, _OTHERS):
            places = self.others
        elif isinstance(item, torch.Generator):
            places = self.generators
        elif kept.generator(item) is not None:
            places = self._drawing
        else:
            before, home = self._foreign, _home(item)
            self._foreign = home == "lowtide" or (before and home in sys.stdlib_module_names)
            if not self._foreign:
                self._program.append(item)
            super()._visit(label, item, depth)
            self._foreign = before
            return
        if all(item is not other for other in places):
            places.append(item)

    def shares_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether one of its parameters is among the leaves."""
        known = set(map(id, self.leaves()))
        return any(id(t) in known for group in optimizer.param_groups for t in group["params"])

    def meet(self, optimizer: torch.optim.Optimizer) -> kept.Back | None:
        """Take in an optimizer that takes a step and was not found, as hooks may hold one; returns
        what puts it back."""
        if any(optimizer is other for other in self.optimizers):
            return None
        self.optimizers.append(optimizer)
        added = len(self.tensors)
        self._add_parameters(optimizer)
        backs = [kept.optimizer(optimizer), kept.noted(self.tensors[added:], set())]
        return lambda: [back() for back in backs]

    def _add_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        known = {id(tensor) for tensor in (*self.state(), *self.tensors)}
        for group in optimizer.param_groups:
            self.tensors += [t for t in group["params"] if id(t) not in known]

    def leaves(self) -> list[Tensor]:
        """The leaves among its tensors, to which a backward may give gradients."""
        return [t for t in (*self.state(), *self.tensors) if t.is_leaf]

    def drawn(self) -> list[Any]:
        """The states of the generators of Python's and NumPy's."""
        return [get() for get, _ in filter(None, map(kept.generator, self._drawing))]

    @contextmanager
    def from_here(self) -> Iterator[None]:
        """Start without gradients, and leave everything as it was."""
        backs = self._noted()
        with without_gradients(self.leaves()), RealState(self, whole=True, more=self._program):
            try:
                yield
            finally:
                for back in backs:
                    back()

    def _noted(self) -> list[kept.Back]:
        """What puts back all but the contents of tensors and the attributes of objects."""
        tensors = {id(t): t for t in (*self.state(), *self.tensors)}
        backs = [kept.form(t) for t in tensors.values() if not t.is_inference()]
        for optimizer in self.optimizers:
            backs.append(kept.optimizer(optimizer))
        for other in self.others:
            if isinstance(other, torch.amp.GradScaler):
                backs.append(kept.noted(vars(other), set()))
            else:
                state = copy.deepcopy(other.state_dict())
                backs.append(functools.partial(other.load_state_dict, state))
        for generator in self.generators:
            backs.append(functools.partial(generator.set_state, generator.get_state()))
        for access in filter(None, map(kept.generator, self._drawing)):
            backs.append(functools.partial(access[1], copy.deepcopy(access[0]())))
        backs += filter(None, map(kept.array, self._program))
        functions = (item for item in self._program if isinstance(item, types.FunctionType))
        return backs + [kept.variables(function) for function in functions]

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
            for within, module in root.named_modules():
                for name, tensor in _plain_attributes(module):
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield "buffer", prefix + ".".join(filter(None, (within, name))), tensor
        for place, tensor in enumerate(self.tensors):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield "input", f"{place} of shape {tuple(tensor.shape)}", tensor


def _plain_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are a module's attributes, or in them, without being registered. A step may
    have set them to others."""
    for name, held in _compat.plain_attributes(module).items():
        parts: Iterable[Any] = held.items() if isinstance(held, dict) else [("", held)]
        if isinstance(held, list | tuple | deque):
            parts = enumerate(held)
        for place, part in parts:
            if isinstance(part, Tensor) and _usable(part):
                yield name if held is part else f"{name}[{place!r}]", part


def _usable(tensor: Tensor) -> bool:
    """Whether autograd lets anybody use it: not a part of what was overwritten as a whole, as FSDP1
    has of its flat parameters between two steps."""
    try:
        return bool(tensor.is_leaf or tensor.grad_fn is not None)
    except RuntimeError:
        return False


def _home(item: Any) -> str:
    """The package of a function, or of an object's class."""
    made = item if isinstance(item, types.FunctionType) else type(item)
    return str(made.__module__).partition(".")[0]
