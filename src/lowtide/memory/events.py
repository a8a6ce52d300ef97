"""Every allocation in a part of a program, in order, from torch's own profiler.

Problem: a budget is checked against the true peak, and on the CPU torch has no peak counter. Its
profiler can report each allocation, and with operators switched off that costs a microsecond per
allocation while the step runs and ten afterwards. Invariant: a recording never disturbs a profiler
that the user runs: the one that was started first keeps the profiler, and a timeline that cannot be
trusted is `None`, never a guess. Imports torch, `_compat`, `profiler` and timeline. Rejected:
sampling the resident size of the process, which misses short peaks and cannot tell what the
allocator caches; counting in a dispatch mode, which does not see the temporaries inside an
operator.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
import weakref
from collections.abc import Callable

import torch

from lowtide._compat import profiling
from lowtide.memory.profiler import (
    drop_memory_profiler,
    start_memory_profiler,
    stop_memory_profiler,
)
from lowtide.memory.timeline import MARKER_SIZES, Timeline, read_timeline

# The recording of a step waits for its backward while this many other steps begin and end.
_PATIENT = 16

_lock = threading.Lock()
_recording: weakref.ref[MemoryEvents] | None = None


class MemoryEvents:
    """Records what this thread, and autograd on its behalf, allocates on one device.

    On the CPU the release of a block that is older than the recording is not subtracted, as torch
    does not report its size reliably: levels and peaks are too high by it. Threads that the program
    starts are not seen. One recording runs at a time in a process, as torch has one recorder.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        device = torch.device("cpu") if device is None else device
        self.device = device
        self.obstacle = ""
        self._thread = 0
        self._token: object = None  # the profiler's token while it belongs to this recording
        self._turned_away: set[int] = set()  # threads that wanted the recorder after `over`
        self._marker: torch.UntypedStorage | None = None
        self._addresses: list[int] = []
        self._noted: list[tuple[int, int]] = []  # (marks before it, address)
        self._waiting: list[Callable[[Timeline | None], None]] = []
        self._over = False
        self._step: weakref.WeakMethod[Callable[[], bool]] | None = None
        self._others = 0  # steps that were measured in this recording and are over
        self._held = False  # garbage was collected, and this recording survived it
        self._early: list[Timeline | None] = []

    def over(self) -> None:
        """This recording is no longer wanted: anything that needs the recorder may end it.

        It cannot be stopped right where a backward ends, as inside a backward the profiler's state
        is a copy.
        """
        self._over = True

    def of_step(self, pending: Callable[[], bool]) -> None:
        """What is recorded is a step; it is wanted as long as `pending` says that this is
        pending."""
        self._step = weakref.WeakMethod(pending)

    def another_is_over(self) -> None:
        """Another step was measured in this recording."""
        self._others += 1

    def wanted(self) -> bool:
        """Whether more of this recording may still be needed."""
        if self._step is None or self._over:
            return not self._over
        return self._others < _PATIENT and self._is_pending()

    def _is_pending(self) -> bool:
        pending = None if self._step is None else self._step()
        return pending is not None and pending()

    def _give_way(self) -> None:
        timeline = self._stop()
        # Of a step whose backward has not come to its end, this is only a part.
        self._early.append(timeline if self._over else None)
        self._tell(timeline)

    def _tell(self, timeline: Timeline | None) -> None:
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(timeline)

    def when_stopped(self, then: Callable[[Timeline | None], None]) -> None:
        """Call `then` with the timeline when this recording ends."""
        self._waiting.append(then)

    def start(self, *, patient: bool = False) -> bool:
        """Begin recording. False, with the reason in `obstacle`, if that is not possible.

        A recording of another thread that is no longer wanted has to give way and is lost, as its
        profiler cannot be stopped from here. If `patient`, the first attempt leaves it alone, so
        that its thread can take its result in the meantime.
        """
        global _recording
        active = recording_on_this_thread(wanted=False)
        if active is not None and not profiling.profiler_is_a_copy():
            active._give_way()
        del active
        _collect_abandoned()
        with _lock:
            _take_over(patient)
            self.obstacle = _obstacle()
            if self.obstacle:
                return False
            if profiling.profiler_is_a_copy():
                self.obstacle = (
                    "an earlier recording of this thread cannot end inside of this backward"
                )
                return False
            if profiling.profiler_token.token is not None:
                drop_memory_profiler()
            try:
                start_memory_profiler()
            except RuntimeError as error:  # a profiler of the program's is on after all
                self.obstacle = f"torch's profiler does not start ({error})"
                return False
            _recording = weakref.ref(self)
            self._thread = threading.get_ident()
            self._token = profiling.profiler_token.token
            _thread_end.of_recording(self)
        self._marker = torch.UntypedStorage(MARKER_SIZES[0], device="cpu")
        self._addresses = [self._marker.data_ptr()]
        return True

    def mark(self) -> int:
        """Put a mark at this point and return its index; 0 if nothing is recorded.

        A mark resizes a block that only this object owns. No other part of the program can free
        that block, so the mark is found exactly among the events.
        """
        marker = self._marker
        if marker is None:
            return 0
        index = len(self._addresses)
        marker.resize_(MARKER_SIZES[index % 2])
        self._addresses.append(marker.data_ptr())
        return index

    def sees_this_thread(self) -> bool:
        """Whether a mark put here would be found: not on a thread that the program has started."""
        return profiling.profiler_on_this_thread()

    def note(self, storage: torch.UntypedStorage) -> int:
        """Note a storage that was there at the last mark; returns its place in `known`."""
        # A fake tensor's storage is a meta one, and torch warns about its address.
        try:
            address = 0 if storage.device.type == "meta" else storage.data_ptr()
        except RuntimeError:  # a storage without memory, as `torch.func.linearize` traces with
            address = 0
        self._noted.append((len(self._addresses) - 1, address))
        return len(self._noted) - 1

    def stop(self) -> Timeline | None:
        """End the recording; `None`, with the reason in `obstacle`, if it was disturbed."""
        timeline = self._early[0] if self._early else self._stop()
        self._early.clear()
        self._tell(timeline)
        return timeline

    def _stop(self, *, ending: bool = False) -> Timeline | None:
        """With `ending`, the thread is ending: its thread-local state cannot be used any more."""
        global _recording
        with _lock:
            if self._marker is None:
                return None
            self._marker = None
            if _recording is not None and _recording() is self:
                _recording = None
            if threading.get_ident() != self._thread:
                self.obstacle = "the recording was stopped on another thread than started it"
                return None
            if not ending and profiling.profiler_is_a_copy():
                self.obstacle = "the recording was stopped inside of a backward"
                return None
            if not profiling.profiler_untouched(self._token):
                self.obstacle = "another profiler was started during the recording"
                if not ending:
                    drop_memory_profiler()
                return None
            fields = stop_memory_profiler()
            if not ending:
                profiling.profiler_token.token = None
        timeline = read_timeline(fields, self.device, self._addresses, self._noted)
        if timeline is None:
            self.obstacle = "part of the recording is missing"
        return timeline


class _OfThread(threading.local):
    """Freed on its thread when that ends, which ends a recording that still runs there.

    No other thread could end it: the recorder would be in use for the rest of the process.
    """

    end: _ThreadEnd | None = None

    def of_recording(self, events: MemoryEvents) -> None:
        if self.end is None:
            self.end = _ThreadEnd()
        self.end.events, self.end.token = weakref.ref(events), events._token


class _ThreadEnd:
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.events: weakref.ref[MemoryEvents] | None = None
        self.token: object = None

    def __del__(self) -> None:
        if sys.is_finalizing() or threading.get_ident() != self.thread:
            return
        events = self.events() if self.events is not None else None
        if events is not None and events._marker is not None:
            events._early.append(events._stop(ending=True))
            return
        with _lock:  # the recording was freed without being stopped
            if profiling.profiler_untouched(self.token):
                stop_memory_profiler()


_thread_end = _OfThread()


@atexit.register
def _stop_at_exit() -> None:
    """torch crashes if a profiler is still on when the interpreter shuts down."""
    active = _recording() if _recording is not None else None
    if active is not None:
        active.stop()
    if profiling.profiler_token.token is not None:
        drop_memory_profiler()


def recording_on_this_thread(*, wanted: bool = True) -> MemoryEvents | None:
    """The recording that runs on this thread, if there is one and it is wanted, or not `wanted`."""
    active = _recording() if _recording is not None else None
    if active is None or active._marker is None or active._thread != threading.get_ident():
        return None
    return active if active.wanted() is wanted else None


def _collect_abandoned() -> None:
    """Free a recording whose step the program has abandoned, as after an error in a forward.

    Its graph and its tape may refer to each other, so only the garbage collector ends such a
    recording. It is run once for each recording, not at every start.
    """
    active = _recording() if _recording is not None else None
    if active is None or active._held:
        return
    active._held = True
    del active
    gc.collect()


def _take_over(patient: bool) -> None:
    """Void an unwanted recording of another thread that still runs.

    The profiler stays on there until that thread starts a recording or ends.
    """
    global _recording
    active = _recording() if _recording is not None else None
    here = threading.get_ident()
    if active is None or active._thread == here or active.wanted():
        return
    if patient and active._over and here not in active._turned_away:
        active._turned_away.add(here)
        return
    _recording = active._marker = None
    active.obstacle = "another thread needed the recorder"
    active._early.append(None)


def _obstacle() -> str:
    active = _recording() if _recording is not None else None
    if active is not None:
        here = active._thread == threading.get_ident()
        held = f"{'this' if here else 'another'} thread already records memory events"
        if here and not active.wanted():
            held += ", which cannot end inside of this backward"
        elif active._step is not None:
            held += " of a step under a budget (run its backward first, or let go of its loss)"
        return held
    return "a torch profiler is active" if profiling.profiler_of_another() else ""
