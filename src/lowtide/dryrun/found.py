"""What a step reaches: its modules and its tensors.

Problem: a step is a function, and its parameters are somewhere behind it. Invariant: what is found
does not depend on having run the step; tensors elsewhere are treated as constants. Imports
`_compat` and reached. Rejected: a list of modules as an argument, which would be forgotten in part.

What is found: modules and tensors among the arguments (in lists, tuples, dictionaries), in the
function's closure, in the globals that it names, and behind `functools.partial`, bound methods and
attributes of objects found in this way.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.models.reached import named_globals

DEPTH = 5
ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype,
         torch.device, torch.Generator)  # fmt: skip

OWN = "(model)"
"""The module of what runs directly in the forward of the only model: its qualified name is empty.
"""
OUTSIDE = "(outside of modules)"
"""Shown for what no module runs, for example a loss."""


class Found:
    """The modules, tensors and random generators that a function reaches."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.roots: dict[str, nn.Module] = {}
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # keeps ids valid: bound methods are new objects each time
        self._visit("", function, DEPTH)
        self._visit("", (args, kwargs), DEPTH)
        inside = {id(m) for root in self.roots.values() for m in root.modules() if m is not root}
        self.roots = {k: m for k, m in self.roots.items() if id(m) not in inside}

    def modules(self) -> Iterator[nn.Module]:
        seen: set[nn.Module] = set()
        for root in self.roots.values():
            for module in root.modules():
                if module not in seen:
                    seen.add(module)
                    yield module

    def names(self) -> dict[int, str]:
        """Qualified names by module id; if there are several roots, prefixed with the variable."""
        names: dict[int, str] = {}
        for label, root in self.roots.items():
            for name, module in root.named_modules():
                prefix = label if len(self.roots) > 1 else ""
                names.setdefault(id(module), ".".join(filter(None, (prefix, name))))
        return names

    def state(self) -> Iterator[torch.Tensor]:
        for module in self.modules():
            for tensors in _compat.parameters_and_buffers(module):
                yield from (t for t in tensors.values() if t is not None)

    def _visit(self, label: str, item: Any, depth: int) -> None:
        if depth < 0 or id(item) in self._seen:
            return
        if isinstance(item, torch.Generator):
            self.generators.append(item)
        if isinstance(item, ATOMS):
            return
        self._seen.add(id(item))
        self._keep.append(item)
        if isinstance(item, nn.Module):
            name = label or type(item).__name__
            while name in self.roots:
                name += "'"
            self.roots[name] = item
        elif isinstance(item, torch.Tensor):
            self.tensors.append(item)
        else:
            for name, part in _parts(item):
                self._visit(name, part, depth - 1)


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object that is neither a module nor a tensor, with names if they have any."""
    if isinstance(item, dict):
        yield from ((key if isinstance(key, str) else "", part) for key, part in item.items())
    elif isinstance(item, list | tuple | set | frozenset | deque):
        yield from (("", part) for part in item)
    elif isinstance(item, functools.partial):
        yield from (("", part) for part in (item.func, item.args, item.keywords))
    elif isinstance(item, types.MethodType):
        yield from (("self", item.__self__), ("", item.__func__))
    elif isinstance(item, types.FunctionType):
        yield from _reached(item)
    elif not isinstance(item, types.BuiltinFunctionType):
        home = type(item).__module__.partition(".")[0]
        if home != "torch" and home not in sys.stdlib_module_names:
            yield from _attributes(item)


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """An object's own, in its dictionary and in slots."""
    if hasattr(item, "__dict__"):
        yield from vars(item).items()
    for kind in type(item).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield name, slot.__get__(item)
                except AttributeError:  # not assigned yet
                    continue


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield "", function.__defaults__ or ()
    yield "", function.__kwdefaults__ or {}
    yield "", vars(function).get("__wrapped__")
    home = str(function.__module__).partition(".")[0]
    if home in ("torch", "lowtide") or home in sys.stdlib_module_names - {"__main__"}:
        return
    yield from named_globals(function)
