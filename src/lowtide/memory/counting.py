"""Bytes of the storages that operators make, counted while they live, on tensors without memory.

Problem: an allocator reports real memory only. Invariant: every storage that an operator makes is
counted from the moment it is made to the moment it would be freed, and the kernel's workspace is
added while the operator runs. Imports `_compat` and the tape's facts. Rejected: summing sizes,
which misses what is freed in between.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lowtide import _compat
from lowtide.kernels.workspace import kernel_workspace, read_by
from lowtide.tape.operators import FACTS, facts_of
from lowtide.tape.values import flatten, tensors_in


class Counting(_compat.Mode):
    """Counts the bytes of the storages that operators make while it is open."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.level = 0
        self.peak = 0  # the highest level so far, workspace included
        self.beside = 0  # what else is there while the call runs that a subclass has begun
        self._device = device  # whose kernels' workspace to add; None: that of the tensors' device
        self._known: dict[int, _Block] = {}

        me = weakref.ref(self)  # not `self`, which keeps this function

        def forget(block: Any) -> None:
            counting = me()
            if counting is not None and counting._known.pop(block.key, None) is not None:
                counting.level -= block.nbytes

        self._forget = forget

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; a subclass may do it in another way."""
        return func(*args, **kwargs)

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called after every operator that may have made something."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self.call(func, args, kwargs)
        if (FACTS.get(id(func)) or facts_of(func)).view:
            return result
        made = self._count(args, kwargs, result)
        self.ran(func, args, kwargs, result)
        room = max(0, self.beside + self._workspace(func, args, kwargs, result, made))
        self.peak = max(self.peak, self.level + room)
        return result

    def _count(self, args: Any, kwargs: Any, result: Any) -> int:
        """Add the storages that a call has made; returns their bytes."""
        made = 0
        given: dict[int, None] | None = None
        for tensor in flatten(result):
            storage = _compat.storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if storage is None or _compat.storage_id(storage) in self._known:
                continue
            if given is None:
                given = storage_keys(tensors_in(args, kwargs))
            if _compat.storage_id(storage) not in given:
                block = self._known[_compat.storage_id(storage)] = _Block(storage, self._forget)
                block.key, block.nbytes = _compat.storage_id(storage), storage.nbytes()
                block.node = _compat.node_in_backward()
                made += block.nbytes
        self.level += made
        return made

    def _workspace(self, func: Any, args: Any, kwargs: Any, result: Any, made: int) -> int:
        if not made:  # written in place, or into what was given as `out`
            made = sum(t.nbytes for t in flatten(result) if _dense(t))
        name, tensors = _compat.schema_of(func).name, read_by(func, args, kwargs)
        return kernel_workspace(name, tensors, args, made, self._device)


def _dense(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.layout is torch.strided


class _Block(weakref.ref):  # type: ignore[type-arg]
    """A live storage that an operator made."""

    __slots__ = ("key", "nbytes", "node")
    key: int
    nbytes: int
    node: int | None
    """Of the backward that made it."""


def storage_keys(tensors: list[torch.Tensor]) -> dict[int, None]:
    """The keys of the tensors' storages, unique while these live, in order."""
    return {_compat.storage_id(s): None for s in map(_compat.storage_of, tensors) if s is not None}
