"""Staying out of the way of torch.compile, and noticing it.

Problem: Dynamo would trace the recorder, or give up for good on a function that was called while a
recorder is open. Invariant: as in `lowtide._compat`, of which this is a part; nothing here imports
Dynamo, which takes seconds, and nothing is changed until something else has. Imports `imports`
and torch. Rejected: `torch.compiler.disable` and its like, which import it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lowtide._compat.imports import when_imported


class _EagerWhileRecording:
    """Dynamo's stance: eager on a thread that records, the user's own on every other.

    Otherwise Dynamo would find our mode on the stack, skip the function *for good*, and raise if it
    was compiled with ``fullgraph=True``; inside the mode's own frames, where the mode is off the
    stack, it would compile the recorder. `torch.compiler.set_stance` acts on the whole process.
    Unnecessary when compiled code can be recorded.
    """

    def __init__(self, users: Any, recording: Callable[[], bool], lost: Callable[[], None]) -> None:
        self.users = users
        self.recording = recording
        self.lost = lost

    @property
    def stance(self) -> str:
        return "force_eager" if self.recording() else str(self.users.stance)

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        # Read once per call of a compiled function, and not for a function that is exempt.
        if self.recording() and self.users.stance != "force_eager":
            self.lost()
        return bool(self.users.skip_guard_eval_unsafe)

    @property
    def backend(self) -> Any:
        return self.users.backend


_DYNAMO = "torch._dynamo.eval_frame"


def run_compiled_eagerly(recording: Callable[[], bool], lost: Callable[[], None]) -> None:
    """From now on, run compiled functions eagerly on a thread where `recording()` is true.

    Each such call calls `lost`. If Dynamo is not imported yet, this takes effect as soon as it is,
    even inside a recording.
    """
    dynamo: Any = sys.modules.get(_DYNAMO)
    if dynamo is None:
        when_imported(_DYNAMO, lambda: run_compiled_eagerly(recording, lost))
        return
    users = getattr(dynamo, "_stance", None)
    if users is not None and type(users) is not _EagerWhileRecording:
        dynamo._stance = _EagerWhileRecording(users, recording, lost)
        _whatever_is_set(dynamo, recording, lost)


def _whatever_is_set(dynamo: Any, recording: Callable[[], bool], lost: Callable[[], None]) -> None:
    """Go on with a stance that the program sets from now on, inside a recording perhaps."""
    original = dynamo._set_stance

    def set_stance(stance: Any) -> Any:
        before = original(stance)
        if type(stance) is not _EagerWhileRecording:
            dynamo._stance = _EagerWhileRecording(stance, recording, lost)
        return before

    set_stance._dynamo_forbidden = True  # type: ignore[attr-defined]  # as torch's own
    dynamo._set_stance = set_stance
    public = sys.modules.get("torch._dynamo.decorators")  # has its own name for it
    if hasattr(public, "_set_stance"):
        public._set_stance = set_stance  # type: ignore[union-attr]


_aoti = getattr(torch._C, "_aoti", None)
# What runs packages of AOTInductor's; loaded without importing Inductor.
_PACKAGED = [each for each in vars(_aoti).values() if isinstance(each, type)] if _aoti else []
_hidden_for: list[Any] = []  # Inductor's class of graphs, or None, when that was last done


def hide_generated_code(around: Callable[[Callable[[], Any]], Any]) -> None:
    """From now on, call `around(run)` wherever code that Inductor has generated would run.

    Such code calls some operators, and writes their results further by kernels that nothing sees.
    Dynamo is kept from calling it, but `torch._inductor.compile` and its like return it, and so do
    those that load a package of AOTInductor's. It has no public hook.
    """
    module: Any = sys.modules.get("torch._inductor.output_code")
    graph = getattr(module, "CompiledFxGraph", None)
    if _hidden_for and _hidden_for[0] is graph:
        return
    each: Any
    for each in _PACKAGED if graph is None else (*_PACKAGED, graph):
        if "_lowtide_around" not in vars(each):
            for name in vars(each).keys() & {"__call__", "run", "boxed_run"}:
                setattr(each, name, _hidden(getattr(each, name), around))
            each._lowtide_around = around
    _hidden_for[:] = [graph]


def _hidden(
    original: Callable[..., Any], around: Callable[[Callable[[], Any]], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *inputs: Any, **named: Any) -> Any:
        return around(lambda: original(self, *inputs, **named))

    return call


_F = TypeVar("_F", bound=Callable[..., Any])


def constant_while_compiling(function: _F) -> _F:
    """While Dynamo traces, `function` is called once, with constants, and its result is one.

    Like `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: Callable[..., Any]) -> None:
    """Keep Dynamo out of `function` and everything that it calls, without importing Dynamo."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it is called inline
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def is_tracing() -> bool:
    """Whether Dynamo traces a function on this thread; `torch.compiler.is_compiling` says so in the
    traced code only, not in what Dynamo asks of the objects that it meets there. Unnecessary once
    torch 2.10 is not supported: Dynamo of 2.13 traces an overridden forward without it."""
    return torch._guards.CompileContext.current_compile_id() is not None


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs a backward now. Unnecessary when torch tells."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY


def is_traced_by_fx() -> bool:
    """Whether `make_fx` traces on this thread. `torch.compiler.is_compiling` says so only where
    Dynamo or `torch.export` called it; unnecessary once that covers `make_fx`."""
    if _mode(_PROXY) is not None:
        return True
    return torch._ops._get_dispatch_mode_pre_dispatch(_PROXY) is not None


def is_exporting() -> bool:
    """Whether `torch.export` traces. In torch 2.10, Dynamo takes torch's own function of this name
    for true in all that it compiles; unnecessary once 2.13 is the oldest."""
    return torch.compiler._is_exporting_flag


def is_traced_by_jit() -> bool:
    """Whether `torch.jit.trace` traces on this thread. Unnecessary once `torch.jit` exports
    `is_tracing`."""
    return torch._C._is_tracing()


def is_compiled_in_place(module: object) -> bool:
    """Whether ``module.compile()`` was called. Unnecessary when torch tells."""
    return module.__dict__.get("_compiled_call_impl") is not None


def is_compiled_module(module: object) -> bool:
    """Whether `module` is what `torch.compile(module)` returned, or was compiled in place.

    Recognised by name: importing torch._dynamo takes seconds, and unless it is imported there is no
    such module. Unnecessary when torch tells.
    """
    return is_compiled_in_place(module) or any(
        c.__name__ == "OptimizedModule" and c.__module__ == "torch._dynamo.eval_frame"
        for c in type(module).__mro__
    )
