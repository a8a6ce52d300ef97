"""Bytes and seconds of operators on fake tensors.

Problem: a dry run allocates nothing, and its peak has to be known to the byte. Invariant: every
storage that an operator makes is counted from the moment it is made to the moment it would be
freed, forward and backward alike, and what a kernel takes besides is added while it runs; levels
and peaks come out as from a real measurement (`Marks`). Imports costs, workspace, marks. Rejected:
predicting backward's memory from the forward, which misses the order in which gradients go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide._memory_events import Timeline
from lowtide.costs import CostModel
from lowtide.fakeshapes import Shapes
from lowtide.marks import Arrived
from lowtide.tape.operators import FACTS, facts_of
from lowtide.tape.values import flatten
from lowtide.workspace import kernel_workspace


class FakeMemory(_compat.Mode):
    """Counts the bytes and the seconds of operators on fake tensors; answers as `Marks` do."""

    def __init__(self, costs: CostModel, mode: Any) -> None:
        super().__init__()
        self._call = Shapes(mode)
        self.costs = costs
        self.seconds = 0.0  # of all operators so far
        self.last = 0.0  # of the last one
        self._level = 0
        self._peak = 0
        self._levels = [0]
        self._peaks: list[int] = []
        self._known: dict[int, _Block] = {}

        def forget(block: Any) -> None:
            if self._known.pop(block.key, None) is not None:
                self._level -= block.nbytes

        self._forget = forget
        self.ask: Callable[[Any, Any, Any], Any] | None = None  # what only data can tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _compat.asks_for_device(func):
            return args[0].fake_device
        kwargs = kwargs or {}
        try:
            result = self._call(func, args, kwargs)
        except _compat.depends_on_data():
            if self.ask is None:
                raise
            result = self.ask(func, args, kwargs)
        if (FACTS.get(func) or facts_of(func)).view:
            return result
        made = self._count(args, kwargs, result)
        self.last = self.costs.seconds(func, args, kwargs, result)
        self.seconds += self.last
        room = _workspace(func, args, kwargs, made) if made else 0
        self._peak = max(self._peak, self._level + room)
        return result

    def _count(self, args: Any, kwargs: Any, result: Any) -> int:
        """Add the storages that a call has made."""
        made = 0
        given: set[int] | None = None
        for tensor in flatten(result):
            storage = _compat.storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if storage is None or storage._cdata in self._known:
                continue
            if given is None:
                given = _keys((*args, *kwargs.values()))
            if storage._cdata not in given:
                block = self._known[storage._cdata] = _Block(storage, self._forget)
                block.key, block.nbytes = storage._cdata, storage.nbytes()
                made += block.nbytes
        self._level += made
        return made

    def mark(self) -> int:
        self._peaks.append(max(self._peak, self._level))
        self._levels.append(self._level)
        self._peak = self._level
        return len(self._levels) - 1

    def over(self) -> None:
        """Nothing runs after the step."""

    def stop(self, then: Arrived) -> None:
        self.mark()
        then(Timeline(self._levels[:-1], self._peaks, self._level))


class _Block(weakref.ref):  # type: ignore[type-arg]
    """A live storage that an operator made."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


def _keys(arguments: tuple[Any, ...]) -> set[int]:
    found = set()
    for argument in arguments:
        for tensor in flatten(argument):
            storage = _compat.storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if storage is not None:
                found.add(storage._cdata)
    return found


def _workspace(func: Any, args: Any, kwargs: Any, made: int) -> int:
    tensors = [t for a in (*args, *kwargs.values()) for t in flatten(a)
               if isinstance(t, torch.Tensor)]  # fmt: skip
    return kernel_workspace(func._schema.name, tensors, args, made)
