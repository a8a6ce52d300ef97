"""The device whose bytes a budget counts.

Problem: a process may have a CPU and several accelerator devices, a limit is for one of them, and a
budget is entered before it can know which one the step will use. Invariant: the device that the
user named counts; else the first accelerator device on which a step makes something, or the CPU if
there is none. What is made on other devices counts as no bytes, so nothing of it is dropped, and
tensors that have only a shape (on the meta device, fake ones) count nowhere; unless a device was
named, a step that computes on two is told which one counts. Imports measure, operators. Rejected:
the current device: for a model that was moved to another one by name, nothing would be counted and
every limit would seem to be kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.errors import DeviceWarning, users_frame
from lowtide.measure import counted_device
from lowtide.tape.operators import Facts
from lowtide.tape.values import tensors_in
from lowtide.tape.watch import PLAIN

CPU = torch.device("cpu")
_REAL = (*PLAIN, type(None))


class Where:
    """The device of one budget.

    Attributes:
        device: the one whose bytes count.
        open: `device` is a guess, and a step may show that it is another one.
    """

    __slots__ = ("_also", "_moved", "_on_cpu", "_said", "device", "open")

    def __init__(self, given: torch.device | None, moved: Callable[[], None]) -> None:
        self._moved = moved
        self._on_cpu = False  # the last step made nothing on an accelerator
        self._said = given is not None  # that one device counts: who names it knows
        self._also: torch.device | None = None  # another one, on which this step computes
        self.device = CPU if given is None else given
        self.open = given is None

    def computes_on(self, device: torch.device) -> None:
        """An operation of a step ran on a device that does not count."""
        if not self._said and _compat.is_accelerator(device):
            self._also = device

    def look(self) -> None:
        """A step is about to be recorded: guess its device."""
        if not self.open or self._on_cpu or not _compat.accelerator_in_use():
            return
        current = _compat.current_device()
        if _compat.counts_bytes(current):
            self.device = current

    @property
    def counts(self) -> torch.device | None:
        """The one device whose bytes count; None: not known yet, so those of all do."""
        return None if self.open else self.device

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of a tensor count, where it is."""
        return tensor.device.type != "meta" and (self.open or tensor.device == self.device)

    def makes_elsewhere(self, facts: Facts, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether what a call makes is on a device whose bytes do not count, or has none: it is on
        the meta device, or made of fake tensors."""
        tensors = tensors_in(args, {})
        # A number, as a tensor on the CPU, is combined with tensors on any device.
        first = next((t for t in tensors if t.dim()), tensors[0] if tensors else None)
        if fakes.mode_is_on() or (type(first) not in _REAL and fakes.is_fake(first)):
            return True
        device = kwargs.get("device")
        if not isinstance(device, torch.device):  # an operator of a library may mean anything by it
            device = None
        if device is None and first is not None:
            device = first.device
        elif device is None:
            if not facts.places:  # an operator of a library, which may make it anywhere
                return False
            device = CPU
        elif device.index is None and _compat.is_accelerator(device):
            device = _compat.current_device()
        return device.type == "meta" or not (self.open or device == self.device)

    @property
    def settle(self) -> Callable[[torch.device], None] | None:
        """To be called with the first accelerator device on which a step makes something."""
        return self._settle if self.open and _compat.accelerator_in_use() else None

    def _settle(self, device: torch.device) -> None:
        before, self.device = self.device, counted_device(device, "a budget")
        self.open = False
        if device != before:
            self._moved()

    def forward_over(self) -> None:
        """A device on which a whole forward made nothing does not count: the CPU does. If it
        computed on another accelerator device as well, it is said now, outside of torch's code."""
        if self.open and self.device != CPU:
            self.device, self._on_cpu = CPU, True
            self._moved()
        if self._also is not None:
            also, self._also, self._said = self._also, None, True
            warnings.warn(
                f"the step computes on {self.device} and on {also}, and the limit is for "
                f"{self.device} alone: what is made on {also} is kept, as in the plain step. For a "
                "limit on each, give each part of the model its own: lowtide.fit(part, limit, "
                f'device="{also}"). For one limit, name its device: budget(limit, '
                f'device="{self.device}").',
                DeviceWarning,
                stacklevel=users_frame(),
            )
