"""torch's profiler as a recorder of this thread's allocations: how it is started and stopped.

Problem: the profiler writes to the terminal, and its state belongs to a thread while the recorder
behind it belongs to the process, so that stopping it in the wrong order crashes. Invariant: the
terminal gets nothing that the user did not ask for, and a thread stops only what it has started.
Imports torch and `_compat`.
Rejected: a lock held while a recording runs, which would let one thread train at a time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch

from lowtide._compat import profiling

_REPORT = b"SyncActivityProfilerHandler.cpp"
_NOT_MAIN = b"External init callback must run in same thread"
_REPLACED = b"disableProfiler called but no active profiling session"
_first_use = True
_loud = False  # the program used Kineto first, which goes on to report what we start and stop


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep messages of the profiler's C++ side off the user's terminal.

    Kineto reports every start and stop on stderr unless a variable says otherwise when it is first
    used; the variable is set for that moment only, and a value set by the user is left alone. The
    CPU allocator reports the first block (then every thousandth) that is older than the profile and
    freed in it; one such block is freed here with stderr held back, and whatever else arrives on
    stderr in that instant is passed on. Held back likewise is Kineto's warning that its first use
    is not on the main thread, which does not matter for memory events, and what torch says if a
    thread takes the recorder over from another one, whose step was abandoned.
    """
    global _first_use, _loud
    if not _first_use:
        unwanted: tuple[bytes, ...] = (_REPORT,) if _loud else ()
        if profiling.profiler_left_behind():
            unwanted += (_REPLACED,)
        with _without_lines(*unwanted) if unwanted else contextlib.nullcontext():
            yield
        return
    _first_use = False
    block = torch.UntypedStorage(1)
    ours = "KINETO_LOG_LEVEL" not in os.environ
    if ours:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with _without_lines(_NOT_MAIN, _REPORT) as dropped:
            yield
        _loud = ours and any(_REPORT in line for line in dropped)
    finally:
        if ours:
            del os.environ["KINETO_LOG_LEVEL"]
    with _without_lines(b"Memory block of unknown size"):
        del block


@contextlib.contextmanager
def _without_lines(*unwanted: bytes) -> Iterator[list[bytes]]:
    """Hold back file descriptor 2, then write to it every line that has none of `unwanted` in it.
    The list has the other lines in the end."""
    dropped: list[bytes] = []
    try:
        stderr = os.dup(2)
    except OSError:  # a process without stderr has no terminal to keep clean
        yield dropped
        return
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield dropped
            finally:
                os.dup2(stderr, 2)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if any(each in line for each in unwanted):
                    dropped.append(line)
                else:
                    os.write(2, line)
    finally:
        os.close(stderr)


def start_memory_profiler() -> None:
    with _quiet_kineto():
        profiling.start_memory_profiler()


def stop_memory_profiler() -> list[Any]:
    """The allocations, see `lowtide._compat.profiling`."""
    with _without_lines(_REPORT) if _loud else contextlib.nullcontext():
        return profiling.stop_memory_profiler()


def drop_memory_profiler() -> None:
    """Stop what an unfinished or disturbed recording left on this thread, without its events.

    Does nothing while a profiler of the user's is on: the next recording tries again. If another
    thread took the recorder over and gave it back, this thread still has a profiler without a
    recorder, which torch cannot stop without a crash. So a recorder is started on a thread of its
    own first, and ends with that thread.
    """
    if profiling.profiler_of_another():
        return
    token = profiling.profiler_token.token
    if profiling.profiler_on_this_thread():
        if profiling.profiler_untouched(token):
            stop_memory_profiler()
        else:
            _stop_beside_another()
    profiling.profiler_token.token = None  # last: after an interrupt, this is done again


def _stop_beside_another() -> None:
    started, finished = threading.Event(), threading.Event()

    def hold_recorder() -> None:
        with contextlib.suppress(RuntimeError):  # one is on that thread, against all expectation
            start_memory_profiler()
        started.set()
        finished.wait()

    holder = threading.Thread(target=hold_recorder)
    holder.start()
    try:
        started.wait()
        stop_memory_profiler()
    finally:
        finished.set()  # else the process could not end
    holder.join()
