"""torch's profiler as a recorder of this thread's allocations: how it goes on and comes off.

Problem: the profiler talks to the terminal, and its state is of one thread while the recorder
behind it is of the process, so that stopping it in the wrong order crashes. Invariant: nothing is
written that the user did not ask for, and what is stopped is what this thread started. Imports
torch and `_compat`.
Rejected: a lock held while a recording runs, which would let one thread train at a time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator

import torch

from lowtide._compat import profiling

_first_use = True


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep three notes of the profiler's C++ side off the user's terminal.

    Kineto reports every start and stop on stderr unless a variable says otherwise when it is first
    used; the variable is set for that moment only, and a value of the user's is left alone. The
    CPU allocator notes the first block (then every thousandth) that is older than the profile and
    freed in it; one such block is freed here with stderr held back, and whatever else arrives on
    stderr in that instant is passed on. So is what Kineto says if its first use is not on the main
    thread, which does no harm to memory events.
    """
    global _first_use
    if not _first_use:
        yield
        return
    _first_use = False
    block = torch.UntypedStorage(1)
    ours = "KINETO_LOG_LEVEL" not in os.environ
    if ours:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with _without_lines(b"External init callback must run in same thread"):
            yield
    finally:
        if ours:
            del os.environ["KINETO_LOG_LEVEL"]
    with _without_lines(b"Memory block of unknown size"):
        del block


@contextlib.contextmanager
def _without_lines(unwanted: bytes) -> Iterator[None]:
    """Hold back file descriptor 2, then write to it every line that does not contain `unwanted`."""
    try:
        stderr = os.dup(2)
    except OSError:  # a process without stderr has no terminal to keep clean
        yield
        return
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(stderr, 2)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if unwanted not in line:
                    os.write(2, line)
    finally:
        os.close(stderr)


def start_memory_profiler() -> None:
    with _quiet_kineto():
        profiling.start_memory_profiler()


def drop_memory_profiler() -> None:
    """Take down what an unfinished or disturbed recording left on this thread, events unread.

    Nothing is done while a profiler of the user's is on: the next recording tries again. Where
    another thread took the recorder over and gave it back, this thread still carries a profiler
    without a recorder, and torch crashes when that is stopped; so one is started for the occasion
    on a thread of its own, whose end takes the rest away.
    """
    if profiling.profiler_of_another():
        return
    token, profiling.profiler_token.token = profiling.profiler_token.token, None
    if not profiling.profiler_on_this_thread():
        return
    if profiling.profiler_untouched(token):
        profiling.stop_memory_profiler()
    else:
        started, finished = threading.Event(), threading.Event()

        def hold_recorder() -> None:
            start_memory_profiler()
            started.set()
            finished.wait()

        holder = threading.Thread(target=hold_recorder)
        holder.start()
        started.wait()
        profiling.stop_memory_profiler()
        finished.set()
        holder.join()
