"""torch's profiler, for memory events only, and the CUDA allocator's own record.

Problem: exact bytes on the CPU come from the profiler's C++ side, whose Python front end collects
far more than allocations. Invariant: as in `lowtide._compat`, of which this is the part that
`lowtide.memory` and `lowtide.tracing` use. Imports autograd and torch. Rejected: `torch.profiler`,
at a hundred times the cost.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch._C import _autograd as _bindings
from torch._C import _profiler as _kinds
from torch.autograd import profiler as _profiler

from lowtide._compat.autograd import in_backward

# torch has no public "memory events only" profile. All of this is unnecessary when it gets one, or
# a peak counter for the CPU.
_ACTIVITIES = {_kinds.ProfilerActivity.CPU}
# No operator runs in this scope, so no operator is recorded.
_SILENT_SCOPE = {_kinds.RecordScope.LITE_INTERPRETER}
_ALLOCATION = _kinds._ExtraFields_Allocation


class _Untouched:
    """A false value put into torch's "a profiler is on" flag while memory events are recorded.

    The recorder behind the flag exists once per process, and stopping it after somebody else has
    started it crashes. Whoever starts or stops a profiler overwrites the flag, so if it still holds
    this very object, nobody did.
    """

    def __init__(self) -> None:
        self.outside = not in_backward()

    def __bool__(self) -> bool:
        return False


class _OfThread(threading.local):
    token: _Untouched | None = None


profiler_token = _OfThread()


_running: weakref.ref[Any] | None = None  # the last profiler with a schedule that was found


def _scheduled() -> bool:
    """Whether a profiler with a schedule has started, which may wait or warm up: no flag shows it.

    Its step counter is there from the construction of a profiler on, but only the end of a `with`
    removes it: after one that was never started, or was ended by `stop`, it is there for ever. So
    the objects themselves are looked for, once they may exist; torch keeps no list of them.
    """
    global _running
    if torch.profiler.profiler.PROFILER_STEP_NAME not in _profiler.KinetoStepTracker._step_dict:
        return False
    known = None if _running is None else _running()
    if known is not None and _is_running(known):
        return True
    for each in gc.get_objects():
        # Not `isinstance`: what stands for another object may load it when asked for its class.
        if issubclass(type(each), torch.profiler.profile) and _is_running(each):
            _running = weakref.ref(each)
            return True
    return False


def _is_running(profile: Any) -> bool:
    """Whether it has a schedule and is between its start and its stop: it then has a step open.

    Before torch 2.13 a stopped one still has, and is taken to run until it is collected.
    """
    return getattr(profile, "step_rec_fn", None) is not None


def profiler_of_another() -> bool:
    """Whether a profiler of the user's is on or scheduled, on this thread or any other."""
    unknown = _bindings._profiler_enabled() and profiler_token.token is None
    return _scheduled() or unknown or bool(_profiler._is_profiler_enabled)


def profiler_is_a_copy() -> bool:
    """Whether the profiler on this thread is a backward's copy of one that was started outside it.

    Stopped inside, it would be on again after the backward, with no recorder behind it.
    """
    token = profiler_token.token
    return token is not None and token.outside and in_backward()


def profiler_on_this_thread() -> bool:
    return bool(_bindings._profiler_enabled())


def start_memory_profiler() -> None:
    token, flagged = _Untouched(), cast(Any, _profiler)
    # First: an interrupt may come right after the profiler is on, and who has the token stops it.
    before = flagged._is_profiler_enabled
    profiler_token.token = flagged._is_profiler_enabled = token
    try:
        _turn_on()
    except BaseException as error:
        if not isinstance(error, RuntimeError):  # an interrupt: nothing may stay half started
            if not profiler_on_this_thread():
                _turn_on()
            _bindings._disable_profiler()
        profiler_token.token, flagged._is_profiler_enabled = None, before
        raise


def _turn_on() -> None:
    """Prepare the recorder and start it, in one call of C: an interrupt between the two would leave
    it prepared, and torch complains of that when the next one is.

    If it is there already, as a thread that has ended left it, torch before 2.12 says so in an
    error, and later ones on stderr. It can be started all the same. Without the error it could not
    be for the rest of the process. That part is unnecessary from torch 2.12 on.
    """
    config = _kinds.ProfilerConfig(
        _kinds.ProfilerState.KINETO,
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # flops
        False,  # modules
        _kinds._ExperimentalConfig(),
    )
    enable: Any = _bindings._enable_profiler  # the stub lacks the scopes
    prepared = functools.partial(_bindings._prepare_profiler, config, _ACTIVITIES)
    enabled = functools.partial(enable, config, _ACTIVITIES, _SILENT_SCOPE)
    both: tuple[Callable[[], None], ...] = prepared, enabled
    try:
        list(map(operator.call, both))
    except RuntimeError:
        enabled()


def profiler_left_behind() -> bool:
    """Whether a recorder of lowtide's is still there, of a recording that was not stopped: on a
    thread that cannot be asked to, or that has ended."""
    flag: object = _profiler._is_profiler_enabled
    return isinstance(flag, _Untouched)


def profiler_untouched(token: object) -> bool:
    """Whether the recorder still runs as the thread with this token started it."""
    flag: object = _profiler._is_profiler_enabled
    mine = flag is token and bool(_bindings._profiler_enabled())
    return mine and not _scheduled()


def stop_memory_profiler() -> list[Any]:
    """Stop, and return the allocations: objects with `alloc_size` (signed), `ptr` and `device`.

    The token is left to the caller, because a thread that ends no longer has one. It is taken back
    after this, as an interrupt may come before the profiler is off.
    """
    events = _bindings._disable_profiler().experimental_event_tree()
    _profiler._is_profiler_enabled = False
    fields = [event.extra_fields for event in events]
    return [field for field in fields if type(field) is _ALLOCATION]


# --- what the CUDA allocator did ----------------------------------------------------------------


# What memory_viz opens; torch documents these names, but with an underscore.
@contextlib.contextmanager
def cuda_history() -> Iterator[None]:
    """While this is open, the CUDA allocator records every block and its stack trace."""
    record: Any = torch.cuda.memory._record_memory_history
    record(max_entries=1_000_000)
    try:
        yield
    finally:
        record(enabled=None)


def write_cuda_snapshot(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)
