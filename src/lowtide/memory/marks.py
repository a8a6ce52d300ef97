"""Marks in the stream of allocations, from which a watched step is reconstructed.

Problem: a budget wants the bytes allocated at each operation and the peak between two, on the CPU
from memory events and on an accelerator from its allocator's counters, even while `lowtide.measure`
runs around the step. Invariant: levels are relative to the moment of `start_marks`; the result of a
disturbed measurement is None, and so is that of one which ended before its step did. Imports memory
events and timeline. Rejected: two code paths in the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from lowtide import _compat
from lowtide.memory.events import MemoryEvents, recording_on_this_thread
from lowtide.memory.timeline import Timeline

Arrived = Callable[[Timeline | None], None]


class Marks:
    """A running measurement."""

    def mark(self) -> int:
        """Put a mark here; returns its index."""
        raise NotImplementedError

    def note(self, storage: torch.UntypedStorage) -> int:
        """Note a storage that was there at the last mark; returns its place in
        `Timeline.known`."""
        raise NotImplementedError

    def of_step(self, pending: Callable[[], bool]) -> None:
        """What is measured is a step; it is wanted as long as `pending` says that this is
        pending."""

    def over(self) -> None:
        """Nothing more is measured, unless another mark follows."""

    def stop(self, then: Arrived) -> None:
        """End it; `then` is called with the timeline, now or when that is available."""
        raise NotImplementedError


class OwnEvents(Marks):
    """Memory events of our own, on the CPU."""

    def __init__(self, events: MemoryEvents) -> None:
        self._events = events
        self._cut = False

    def mark(self) -> int:
        mark = self._events.mark()
        if not mark:
            # It gave way after a backward, and now another one goes through the same graph.
            self._cut = True
        return mark

    def note(self, storage: torch.UntypedStorage) -> int:
        return self._events.note(storage)

    def of_step(self, pending: Callable[[], bool]) -> None:
        self._events.of_step(pending)

    def over(self) -> None:
        self._events.over()

    def stop(self, then: Arrived) -> None:
        timeline = self._events.stop()
        then(None if self._cut else timeline)


class SharedEvents(Marks):
    """Marks in a recording that was started around the step, as `measure` does, or for a step of
    another budget whose backward is still to come.

    Its timeline is available once that recording stops, before or after this measurement ends.
    """

    def __init__(self, events: MemoryEvents) -> None:
        self._events = events
        self._base = events.mark()
        self._over = self._astray = False
        self._timeline: Timeline | None = None
        self._then: Arrived | None = None
        events.when_stopped(self._arrived)

    def mark(self) -> int:
        if self._over or self._astray:
            self._timeline = None  # the step goes on: what was recorded is only a part of it
            return 0
        if not self._events.sees_this_thread():  # such a mark would void the recording around
            self._astray = True
            return 0
        return self._events.mark() - self._base

    def note(self, storage: torch.UntypedStorage) -> int:
        return self._events.note(storage)

    def stop(self, then: Arrived) -> None:
        if self._over:
            then(self._timeline)
        else:
            self._then = then
            self._events.another_is_over()

    def _arrived(self, timeline: Timeline | None) -> None:
        self._over = True
        if timeline is not None and not self._astray:
            zero = timeline.levels[self._base]
            self._timeline = Timeline(
                [level - zero for level in timeline.levels[self._base :]],
                [rise - zero for rise in timeline.rises[self._base :]],
                timeline.final - zero,
                timeline.known,
            )
        if self._then is not None:
            self._then(self._timeline)


class DevicePeak:
    """The peak on an accelerator device while it is open, even if a budget inside resets the
    allocator's statistics."""

    _open: ClassVar[list[DevicePeak]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0

    def __enter__(self) -> DevicePeak:
        reset_peak(self._device)
        self._open.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._note(_compat.allocated(self._device).peak)
        self._open.remove(self)

    def _note(self, nbytes: int) -> None:
        self._highest = max(self._highest, nbytes)

    def nbytes(self) -> int:
        """Bytes allocated on the device at the peak, once this is closed."""
        return self._highest

    @classmethod
    def tell(cls, device: torch.device, nbytes: int) -> None:
        """The statistics are about to be reset; up to now their peak was `nbytes`."""
        for stretch in cls._open:
            if stretch._device == device:
                stretch._note(nbytes)


def reset_peak(device: torch.device) -> _compat.Given:
    """Start a device's peak anew; returns what its allocator had given out until now."""
    given = _compat.allocated(device)
    DevicePeak.tell(device, given.peak)
    _compat.reset_peak(device)
    return given


class DeviceCounters(Marks):
    """The counters of the allocator of an accelerator. Resets its peak statistics.

    They do not separate what was there at a mark from what was allocated after it: a rise is too
    high if memory is freed between the mark and the next allocation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = reset_peak(device)
        self._entry = self._last.now
        self._levels = [0]
        self._rises: list[int] = []
        self._noted = 0

    def mark(self) -> int:
        last, self._last = self._last, reset_peak(self._device)
        grown = self._last.altogether > last.altogether
        rise = self._last.peak if grown else self._last.now
        self._levels.append(self._last.now - self._entry)
        self._rises.append(rise - self._entry)
        return len(self._levels) - 1

    def note(self, storage: torch.UntypedStorage) -> int:
        """Whenever it was allocated, its release is counted."""
        self._noted += 1
        return self._noted - 1

    def stop(self, then: Arrived) -> None:
        self.mark()
        known = (True,) * self._noted
        then(Timeline(self._levels[:-1], self._rises, self._levels[-1], known))


def start_marks(
    device: torch.device, tell: Callable[[str], object] = lambda why_not: None
) -> Marks | None:
    """Begin to measure a device; None if another profiler is in the way, or a backward: its end
    takes away the profiler of this thread, which torch then misses on the terminal. `tell` is
    called with what was in the way."""
    if device.type != "cpu":
        return DeviceCounters(device)
    around = recording_on_this_thread()
    if around is not None:
        return SharedEvents(around)
    if _compat.in_backward():
        tell("it ran inside of a backward")
        return None
    events = MemoryEvents()
    if events.start(patient=True):
        return OwnEvents(events)
    tell(events.obstacle)
    return None
