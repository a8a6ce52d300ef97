"""What a refused backward leaves in memory for a moment.

Problem: on an accelerator autograd runs a backward on a thread of the device's own, and that thread
releases the graph only after its error has arrived at the caller. The next step would begin with
that memory, lose it halfway, and be measured too low; its plan would go past the limit. Invariant:
nothing is measured on an accelerator before such a graph was released, or the program was found to
keep it. Imports `_compat`. Rejected: to discard a measurement that falls below what the tape has
live, which would discard those of programs that free storages themselves (FSDP).
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol

import torch

from lowtide import _compat

_MOST = 0.25  # seconds; longer than that, it is the program that keeps the graph
_EACH = 0.001  # lets the thread of the device run
_STEADY = 3  # looks in a row that find no byte less: gradients go after what was saved


class Refused(Protocol):
    """A step whose backward was refused."""

    def abandoned(self) -> bool:
        """Whether autograd has released all that it saved."""
        ...


_refused: list[tuple[weakref.ref[Refused], torch.device]] = []


def leaves(step: Refused, device: torch.device) -> None:
    """The backward of a step is about to be refused."""
    _refused.append((weakref.ref(step), device))


def wait() -> None:
    """Wait until refused backwards have released their memory; nobody waits for one twice."""
    if not _refused:
        return
    waiting = _refused[:]
    _refused.clear()
    end, steady = time.monotonic() + _MOST, 0
    devices = {device for _, device in waiting}
    least = _allocated(devices)
    while steady < _STEADY and time.monotonic() < end:
        time.sleep(_EACH)
        now = _allocated(devices)
        waits = any(not step.abandoned() for link, _ in waiting if (step := link()) is not None)
        steady = 0 if waits or now < least else steady + 1
        least = min(least, now)


def _allocated(devices: set[torch.device]) -> int:
    return sum(_compat.allocated(device).now for device in devices)
