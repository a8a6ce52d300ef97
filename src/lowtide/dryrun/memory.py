"""Bytes and seconds of operators on fake tensors.

Problem: a dry run allocates nothing, but its peak has to be known to the byte. Invariant: every
storage is counted as by `Counting`, in forward and backward alike; levels and peaks are reported as
by a real measurement (`Marks`). Imports costs, counting, filled, marks, rows. Rejected: predicting
backward's memory from the forward, which misses the order in which gradients are freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.dryrun.rows import hold_rows
from lowtide.dryrun.shapes import Shapes
from lowtide.dryrun.traces import Undone
from lowtide.kernels.costs import CostModel
from lowtide.memory.counting import Counting
from lowtide.memory.filled import Filled
from lowtide.memory.marks import Arrived, Marks
from lowtide.memory.timeline import Timeline
from lowtide.tape.operators import facts_of


class FakeMemory(Counting, Marks):
    """Counts bytes and seconds of operators on fake tensors, of one step and nothing after it."""

    def __init__(self, costs: CostModel, mode: Any) -> None:
        super().__init__()
        self._shapes = Shapes(mode)
        self._filled = Filled()
        self.undone = Undone()
        self.costs = costs
        self.seconds = 0.0  # of all operators so far
        self.last = 0.0  # of the last one
        self._levels = [0]
        self._rises: list[int] = []
        self._noted: list[bool] = []
        self.ask: Callable[[Any, Any, Any], Any] | None = None  # for calls that depend on data

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if fakes.asks_for_device(func):
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.undone.calls(func, args, kwargs)
        self.beside = 0
        if func is torch.ops.aten.add.Tensor and self._accumulates(args, kwargs):
            func = torch.ops.aten.add_.Tensor
        if _compat.node_in_backward() is None or torch.is_grad_enabled():
            return self._called(func, args, kwargs)
        func = self._filled.as_real(func, args)
        self.beside = self._filled.beside
        result = self._called(func, args, kwargs)
        self._filled.ran(func, result)
        hold_rows(self, func, args, result)
        return result

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Nothing is drawn for a fake tensor, and some of torch's functions refuse a generator.
        drawn = kwargs if kwargs.get("generator") is None else {**kwargs, "generator": None}
        try:
            return _itself(func, args, kwargs, self._shapes(func, args, drawn))
        except fakes.depends_on_data():
            if self.ask is None:
                raise
            return self.ask(func, args, kwargs)

    def _accumulates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a sum is that of two gradients that autograd makes in place, in the memory of the
        first. Of fake tensors, and under a mode, it makes a third.

        What an earlier node has made, and nobody but autograd has, is such a gradient.
        """
        node = _compat.node_in_backward()
        if node is None or kwargs or len(args) != 2 or torch.is_grad_enabled():
            return False
        one, other = args
        if not isinstance(other, torch.Tensor) or one.shape != other.shape:
            return False
        storage = _compat.storage_of(one)
        block = None if storage is None else self._known.get(_compat.storage_id(storage))
        if block is None or block.node in (None, node) or one.dtype != other.dtype:
            return False
        whole = block.nbytes == one.numel() * one.element_size()
        return whole and _compat.only_the_engine_has(one)

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.last = self.costs.seconds(func, args, kwargs, result)
        self.seconds += self.last

    def mark(self) -> int:
        self._rises.append(max(self.peak, self.level))
        self._levels.append(self.level)
        self.peak = 0  # the peak since this mark
        return len(self._levels) - 1

    def note(self, storage: torch.UntypedStorage) -> int:
        self._noted.append(_compat.storage_id(storage) in self._known)
        return len(self._noted) - 1

    def stop(self, then: Arrived) -> None:
        self.mark()
        then(Timeline(self._levels[:-1], self._rises, self.level, tuple(self._noted)))


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What a call returns: of one that returns what it writes, if that was made outside, that
    tensor. Torch makes a fake one of it for the call, whose memory would count as a result's; it
    does if the call resizes it."""
    facts = facts_of(func)
    if facts.makes or not facts.writes or not fakes.is_fake(result):
        return result
    where = facts.writes[0]
    written = kwargs.get(where) if isinstance(where, str) else dict(enumerate(args)).get(where)
    if not isinstance(written, torch.Tensor) or fakes.is_fake(written):
        return result
    return written if written.shape == result.shape else result
