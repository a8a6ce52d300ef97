"""What a step may change besides the contents of tensors, to put it back.

Problem: steps count in attributes, draw from generators of their own, give a parameter other memory
and switch what requires grad; a second run would begin elsewhere. Invariant: what is put back is
the same object, with what it held. Imports `_compat` and models. Rejected: deep copies of the
program's objects, which its closures do not follow.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide.models.reached import named_globals

Tensor = torch.Tensor
Back = Callable[[], Any]
"""Puts something back, and returns it."""


def noted(item: Any, spared: set[int]) -> Back:
    """Note what is in nested containers and tensors, except in those whose ids are `spared`."""
    if id(item) in spared:
        return lambda: item
    if isinstance(item, Tensor):
        content = item.detach().to("cpu", copy=True)

        def refill() -> Tensor:
            item.data.copy_(content)
            return item

        return refill
    if isinstance(item, dict):
        entries = {key: noted(part, spared) for key, part in item.items()}

        def update() -> Any:
            before = {key: back() for key, back in entries.items()}
            item.clear()
            item.update(before)
            return item

        return update
    if isinstance(item, list):
        places = [noted(part, spared) for part in item]

        def replace() -> Any:
            item[:] = [back() for back in places]
            return item

        return replace
    try:
        copied = copy.deepcopy(item)
    except Exception:  # a lock, a tensor with a graph: it stays what it is
        return lambda: item
    return lambda: copied


def optimizer(item: torch.optim.Optimizer) -> Back:
    """Note its groups and what it keeps, but not its parameters."""
    spared = {id(tensor) for group in item.param_groups for tensor in group["params"]}
    backs = [noted(part, spared) for part in (item.param_groups, item.state)]
    return lambda: [back() for back in backs]


def array(item: Any) -> Back | None:
    """Note what is in an array of NumPy's, which a step may write to."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(item, numpy.ndarray) or not item.flags.writeable:
        return None
    content = item.copy()

    def back() -> Any:
        item[...] = content
        return item

    return back


def variables(function: types.FunctionType) -> Back:
    """Note what the closure of a function and the globals that it names hold."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            cells.append((cell, cell.cell_contents))
    names = dict(named_globals(function))

    def back() -> None:
        for cell, before in cells:
            cell.cell_contents = before
        for name, before in names.items():
            if function.__globals__.get(name) is not before:
                function.__globals__[name] = before

    return back


def generator(item: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """How to get and set the state of a random generator of Python's or NumPy's."""
    if isinstance(item, random.Random):
        return item.getstate, item.setstate
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(item, numpy.random.RandomState):
        return item.get_state, item.set_state
    if isinstance(item, numpy.random.Generator):
        bits = item.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def form(tensor: Tensor) -> Back:
    """Note which memory a tensor has, whether it requires grad, and its hooks."""
    alias, leaf, wanted = tensor.detach(), tensor.is_leaf, tensor.requires_grad
    memory = _compat.storage_of(tensor)
    hooks = [dict(held or {}) for held in _compat.hooks_of(tensor)]

    def back() -> None:
        if leaf and not tensor.is_leaf:  # something with a graph was written into it
            tensor.detach_()
        now = _compat.storage_of(tensor)
        if memory is not None and (
            now is None or _compat.storage_id(now) != _compat.storage_id(memory)
        ):
            tensor.data = alias
        if leaf and tensor.requires_grad is not wanted:
            tensor.requires_grad_(wanted)
        for before, held in zip(hooks, _compat.hooks_of(tensor), strict=True):
            if held is not None and held != before:
                held.clear()
                held.update(before)

    return back
