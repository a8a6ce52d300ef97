"""The device whose bytes a budget counts.

Problem: a process may have a CPU and several accelerator devices, a limit is for one of them, and a
budget is entered before it can know which one the step will use. Invariant: the device that the
user named counts; else the first accelerator device on which a step makes something, or the CPU if
there is none. What is made on other devices counts as no bytes, so nothing of it is dropped.
Imports measure. Rejected: the current device: for a model that was moved to another one by name,
nothing would be counted and every limit would seem to be kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowtide import _compat
from lowtide.measure import counted_device

CPU = torch.device("cpu")


class Where:
    """The device of one budget.

    Attributes:
        device: the one whose bytes count.
        open: `device` is a guess, and a step may show that it is another one.
    """

    __slots__ = ("_moved", "_on_cpu", "device", "open")

    def __init__(self, given: torch.device | None, moved: Callable[[], None]) -> None:
        self._moved = moved
        self._on_cpu = False  # the last step made nothing on an accelerator
        self.device = CPU if given is None else given
        self.open = given is None

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
        """A device on which a whole forward made nothing does not count: the CPU does."""
        if self.open and self.device != CPU:
            self.device, self._on_cpu = CPU, True
            self._moved()
