"""What earlier steps inside the same context have left in memory.

Problem: adversarial training, a GAN, gradient accumulation run several backwards inside one
context. Each ends a step, but they share one limit, and a step may take only what those before it
have left of it: they leave gradients, moved parameters, an optimizer's state. Invariant: bytes are
those of storages that are alive when the number is read, and nothing is kept alive for it.
Imports where and the recorder. Rejected: measuring on the CPU too, which is not done in every step;
counting anew from the end of each backward, which lets the limit grow with every one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide import _compat
from lowtide.running.where import Where
from lowtide.tape.recorder import Recorder


class Earlier:
    """The steps of one context that are over.

    Attributes:
        steps: how many.
        failures: how often the device had run out of memory before the first began, or by the time
            that somebody last asked.
    """

    def __init__(self, where: Where) -> None:
        self.steps = 0
        self._where = where
        self.begin()
        # For each recording, the bytes that are left, and the table that counts them.
        self._recorded: list[tuple[list[int], dict[int, Any]]] = []
        self._newest: dict[int, Any] | None = None  # the table that was added last

    def begin(self) -> None:
        """Count from here on, on the device whose bytes count now."""
        device = self._where.device
        self._device = None if device.type == "cpu" else device
        given = _compat.Given() if self._device is None else _compat.allocated(self._device)
        self._entry, self.failures = given.now, given.failures

    def add(self, recorder: Recorder) -> None:
        """A step that this recorder recorded is over: only what it has left is still looked at. The
        same step is added once, also if an interrupt has come in between."""
        live, table = recorder.live, recorder.table
        if table is self._newest:
            return
        self._newest = table
        self.steps += 1
        for entry in list(table.values()):
            entry.value = entry.weak = entry.counter = None
        # Held until they are in the table again: other threads may free them at any time.
        left = [
            (entry, storage)
            for entry in list(table.values())
            if entry.counted and (storage := entry()) is not None
        ]
        recorder.close()
        for entry, _ in left:
            table[entry.key] = entry
        live[0] = sum(entry.counted for entry, _ in left)
        self._recorded.append((live, table))
        self._drop(lambda live: not live[0])

    def ran_out(self) -> bool:
        """Whether the device has run out of memory since the context began, or this was asked."""
        if self._device is None:
            return False
        before, self.failures = self.failures, _compat.allocated(self._device).failures
        return self.failures > before

    def end(self) -> None:
        """The context is left."""
        self._drop(lambda live: True)
        self._newest = None

    def _drop(self, which: Callable[[list[int]], bool]) -> None:
        """A table and its entries hold one another, the compiled ones unseen by the collector."""
        for live, table in self._recorded:
            if which(live):
                table.clear()
        self._recorded = [known for known in self._recorded if not which(known[0])]

    @property
    def nbytes(self) -> int:
        """Bytes that they have left in memory; on the CPU, of what was made in their recordings."""
        if self._device is not None:
            return max(0, _compat.allocated(self._device).now - self._entry)
        return sum(live[0] for live, _ in self._recorded)
