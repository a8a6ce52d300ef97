"""Opening and closing a recording on this thread.

Problem: a region, a budget and a fitted model all install the same recorder and the same hooks,
may be nested, and must leave nothing behind when the forward raises.
Invariant: a thread has at most one open recorder; a region opened inside it only marks a part of
its tape, so the insides of nested regions are planned and replayed together (rule 9). Imports
tape and replay. Rejected: one tape for each region, whose externals would keep the insides of
nested regions alive.
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, Protocol, TypeVar

import torch

from lowtide import _compat, engine
from lowtide.errors import (
    CompiledWarning,
    KeptWarning,
    UnsupportedError,
    UsageError,
    users_frame,
)
from lowtide.replay import unpack
from lowtide.tape import launches
from lowtide.tape.recorder import Recorder
from lowtide.tape.regions import Region
from lowtide.tape.tape import Decisions, Tape

R = TypeVar("R")

# What a generator or coroutine function returns: its code has not run yet.
RUNS_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType)


class _Open(threading.local):
    recorder: Recorder | None = None
    off = False  # whether regions and budgets are to have no effect
    make: Callable[[Tape], Recorder] | None = None  # see `recorded_by`


_open = _Open()


@contextmanager
def recorded_by(make: Callable[[Tape], Recorder]) -> Iterator[None]:
    """On this thread, `make` the recorder of each recording that is opened inside, but for those
    of dry runs, which have one of their own."""
    before, _open.make = _open.make, make
    try:
        yield
    finally:
        _open.make = before


def _new_recorder(tape: Tape) -> Recorder:
    return (_open.make or engine.new_recorder)(tape)


def current_recorder() -> Recorder | None:
    """The recorder that is open on this thread."""
    return _open.recorder


@contextmanager
def nothing_recorded() -> Iterator[None]:
    """On this thread, run regions and budgets as the plain step that they stand for."""
    before, _open.off = _open.off, True
    try:
        yield
    finally:
        _open.off = before


def _recording() -> bool:
    return _open.recorder is not None


def _leave_the_parents_recording() -> None:
    """In a forked process (a `DataLoader` worker): leave the recording that its parent has open.

    Hooks and modes of others, below ours or above them, stay. If the child returns through the
    contexts of the recording, these find it left.
    """
    recorder, _open.recorder = _open.recorder, None
    if recorder is None:
        return
    _compat.pop_saved_tensor_hooks(recorder.pack, every=True)
    recorder.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_the_parents_recording)


_warned = False


def _compilation_lost() -> None:
    """A compiled function was called inside a recording: warn, once per process."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "a function compiled with torch.compile was called inside a lowtide budget or region: "
            "it runs eagerly there, with the right result but without its compilation, because "
            "the operations inside compiled code cannot be recorded yet. Call it outside, or do "
            "not compile it. From torch 2.13 on, backend=lowtide.CompileBudget(limit) keeps "
            "compiled code inside a limit, outside of budgets and regions.",
            CompiledWarning,
            stacklevel=5,
        )


def _around_generated_code(run: Callable[[], Any]) -> Any:
    """Run code that Inductor has generated: the recorder sees only what it returns."""
    recorder = _open.recorder
    return run() if recorder is None else recorder.unseen(run)


# Dynamo must not look into these when they are called under a compiled function.
for _function in (Recorder.__torch_dispatch__, Recorder.pack, unpack):
    _compat.never_compiled(_function)


class Recording:
    """Context manager: record what runs inside onto a new tape."""

    __slots__ = ("_recorder", "tape")

    # A dry run replaces this.
    new_recorder: Callable[[Tape], Recorder] = staticmethod(_new_recorder)

    def __init__(self, decisions: Decisions, policy: Any = None, *, timed: bool = False) -> None:
        self.tape = Tape(decisions, Region(None, policy), timed=timed)
        self._recorder: Recorder | None = None

    def __enter__(self) -> Tape:
        if _compat.in_functorch():
            raise UnsupportedError(
                "lowtide cannot record inside a torch.func transform (grad, vmap, jvp, vjp, "
                "jacrev, ...): torch does not offer saved-tensor hooks there. Call the transform "
                "outside of the budget or region, or use torch.autograd.grad in its place."
            )
        _compat.run_compiled_eagerly(_recording, _compilation_lost)
        _compat.hide_generated_code(_around_generated_code)
        launches.watch(current_recorder)
        recorder = self._recorder = self.new_recorder(self.tape)
        try:
            _push_hooks(recorder)
            recorder.__enter__()
            self.tape.recorder = recorder
            _open.recorder = recorder
            return self.tape
        except BaseException:
            self.make_sure()
            raise

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    @property
    def at_its_root(self) -> bool:
        """Whether no nested region is open."""
        return self.recorder.region is self.tape.root

    def renew(self, decisions: Decisions, *, timed: bool) -> Tape:
        """From here on, record onto a new tape."""
        self.tape.recorder = None
        self.tape = Tape(decisions, Region(None, None), timed=timed)
        self.recorder.begin(self.tape)
        self.tape.recorder = self.recorder
        return self.tape

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.make_sure()
        if isinstance(error, RuntimeError):
            refused = _torchs_refusal(error)
            if refused is not None:
                raise refused from error

    def make_sure(self) -> None:
        """Leave what is still open of it; called again if an interrupt has cut that short.

        An interrupt arrives between any two instructions of Python, so also between those that open
        and close a recording, and at the first one of an `__exit__`. What it leaves open would go
        on recording for as long as the process lives.
        """
        recorder = self._recorder
        if recorder is None:
            return
        try:
            self._leave(recorder)
        except BaseException:
            self._leave(recorder)
            raise

    def _leave(self, recorder: Recorder) -> None:
        # Each of these does nothing where it was done before: here, or by a forked process.
        recorder.leave()
        _compat.pop_saved_tensor_hooks(recorder.pack, every=True)
        if _open.recorder is recorder:
            _open.recorder = None
        self.tape.recorder = None
        recorder.close()
        self._recorder = None


def _push_hooks(recorder: Recorder) -> None:
    try:
        _compat.push_saved_tensor_hooks(recorder.pack, recorder.unpack)
    except RuntimeError as error:
        refused = _torchs_refusal(error)
        if refused is None:
            raise
        raise refused from error


def _torchs_refusal(error: RuntimeError) -> UnsupportedError | None:
    """Our error for one with which torch refuses saved-tensor hooks; None for any other."""
    text = str(error)
    if "torch.func" in text and "saved tensor hooks" in text:
        return UnsupportedError(
            "a torch.func transform that differentiates backwards (grad, vjp, jacrev, ...) ran "
            "inside a lowtide budget or region: torch does not offer saved-tensor hooks there. "
            "Call the transform outside of it, or use torch.autograd.grad in its place."
        )
    if _compat.refuses_hooks(error):
        return UnsupportedError(
            "a lowtide budget or region and torch.autograd.graph.disable_saved_tensors_hooks "
            "stand one inside the other: what a step saves for its backward is recorded through "
            "saved-tensor hooks, which are disabled there. Disable them outside of the budget or "
            f"region only, before it or after it. They were disabled with the words: {text}"
        )
    return None


class Nested:
    """Context manager: a region inside the recording that is open on this thread."""

    __slots__ = ("_outer", "policy", "recorder")

    def __init__(self, recorder: Recorder, policy: Any) -> None:
        self.recorder = recorder
        self.policy = policy

    def __enter__(self) -> Tape:
        # Push our hooks again, on top: hooks that others pushed between the two regions (torch's
        # checkpoint, save_on_cpu) must see the same saves with and without a recording around them.
        self.recorder.met_unusual()
        _push_hooks(self.recorder)
        if self.recorder.tape.passing is None:
            self.recorder.tape.passing = []
        self._outer = self.recorder.region
        self.recorder.region = Region(self._outer, self.policy)
        return self.recorder.tape

    def make_sure(self) -> None:
        """The recording around it takes off whatever an interrupt has left of it."""

    def __exit__(self, *exc: object) -> None:
        self.recorder.region = self._outer
        if _open.recorder is self.recorder:  # else a forked process has left it
            _compat.pop_saved_tensor_hooks(self.recorder.pack)


class _Context(Protocol):
    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def make_sure(self) -> None:
        """Leave it, also if an interrupt has cut that short."""


def called_inside(context: _Context, function: Callable[[], R]) -> R:
    """Call a function inside a recording, and leave nothing open whenever an interrupt comes: at
    the first instruction of the context's `__exit__`, nothing inside the context can know of it."""
    try:
        with context:
            return function()
    except BaseException:
        context.make_sure()
        raise


def tell_of_what_runs_later(result: object) -> None:
    """A region returned a generator or coroutine: it is right, but saves no memory there."""
    kind = "generator" if isinstance(result, GeneratorType) else "coroutine"
    if isinstance(result, AsyncGeneratorType):
        kind = "asynchronous generator"
    warnings.warn(
        f"a checkpointed region returned a {kind}, {getattr(result, '__qualname__', '')}: what it "
        "computes runs after the region, where nothing is recomputed and activations are kept as "
        "without lowtide. Return a list or tensors; or checkpoint the functions that it calls.",
        KeptWarning,
        stacklevel=users_frame(),
    )


def check_runs_now(function: Any) -> None:
    """Refuse a step whose call computes nothing yet: every figure of it would be zero."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    for is_one, kind in (
        (inspect.isgeneratorfunction, "generator"),
        (inspect.iscoroutinefunction, "coroutine"),
        (inspect.isasyncgenfunction, "asynchronous generator"),
    ):
        if is_one(called):
            raise UsageError(
                f"a call of this step makes a {kind}, which computes nothing before it is run. "
                "Pass a function that runs it to its end and returns the loss."
            )


def recordable() -> bool:
    """Whether a backward could ask for anything that runs now (rule 12).

    False while torch.compile, make_fx or torch.jit.trace traces: what a replay makes is no part of
    the traced graph, which would have the values of this one call in its place. And torch.jit.trace
    makes tensors of all sizes that are asked for, also of those that a recorder compares. Raises
    while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling() or _open.off:
        return False
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    if _compat.is_traced_by_fx() or _compat.is_traced_by_jit():
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "lowtide cannot record while a CUDA graph is captured: the graph would run again "
            "without what is decided, measured and replayed in Python. Capture the step without "
            "lowtide, or leave the graph out."
        )
    return True
