"""Functions with a backward of their own whose forward may run again.

Problem: the forward of a `torch.autograd.Function` often is a kernel that no dispatcher sees (one
of Triton's, of a C++ extension): it fills memory of `torch.empty`, and what it makes has to be kept
(rule 5), though who wrote it knows that it may run twice. Invariant: such a forward is one
operation of the record, whose results are what it returns and what it saves besides; the program
gets what its own call returned, and a replay calls the forward with a context that is thrown away.
Imports `_compat`, errors, operators and values. Rejected: recording what it calls, which
is the part that can be seen; a custom operator made of it, which would need the types of its
arguments.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function, FunctionCtx

from lowtide import _compat
from lowtide.errors import UnsupportedError
from lowtide.tape.operators import FACTS, Facts
from lowtide.tape.values import tensors_in

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder

_MARK = "_lowtide_replayable"  # on a class: what runs its forward


class _Call:
    """The program's own call of a forward, while it is recorded."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.ran = False
        self.result: Any = None


class _OfThread(threading.local):
    call: _Call | None = None


_now = _OfThread()


class Rerun:
    """A forward as an operator: a function of its arguments that returns tensors, flat."""

    def __init__(self, function: type[Function]) -> None:
        self.name = function.__name__
        self.forward: Callable[..., Any] = function.forward
        self.has_context = function.setup_context is Function.setup_context
        FACTS[id(self)] = Facts.of_forward(self, f"function::{self.name}")

    def record(self, recorder: Recorder, ctx: Any, args: tuple[Any, ...]) -> Any:
        """Run the forward for the program, as an operation of the record."""
        call = _now.call = _Call(ctx)
        try:
            recorder.record_forward(self, (getattr(ctx, "needs_input_grad", ()), *args))
        finally:
            _now.call = None
        return call.result if call.ran else self._forward(ctx, args)

    def __call__(self, needs: tuple[bool, ...], *args: Any) -> tuple[Any, ...]:
        """`needs`: which arguments need a gradient, as the forward may ask its context."""
        call = _now.call
        if call is not None and not call.ran:
            ctx = call.ctx
            call.result = result = self._forward(ctx, args)
            call.ran = True  # only now: where a device had no room, it is called once more
        else:
            ctx = _thrown_away(needs)
            result = self._forward(ctx, args)
        if getattr(ctx, "dirty_tensors", None):
            raise UnsupportedError(
                f"the forward of {self.name} writes to its arguments (ctx.mark_dirty), so it "
                "cannot be run again: leave lowtide.replayable out for this Function"
            )
        saved = () if ctx is None else getattr(ctx, "to_save", None) or ()
        return _made_by(result if isinstance(result, tuple) else (result,), saved, args)

    def _forward(self, ctx: Any, args: tuple[Any, ...]) -> Any:
        return self.forward(ctx, *args) if self.has_context else self.forward(*args)


def _thrown_away(needs: tuple[bool, ...]) -> Any:
    ctx: Any = FunctionCtx()
    ctx.needs_input_grad = needs
    return ctx


def _made_by(
    results: tuple[Any, ...], saved: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The results and what was saved, each in its place, without those that were there before."""
    there = {_key(tensor) for tensor in tensors_in(args, {})}

    def new(item: Any) -> Any:
        return item if isinstance(item, torch.Tensor) and _key(item) not in there else None

    return tuple(map(new, (*results, *saved)))


def _hides_tensors(argument: Any) -> bool:
    """Whether it has tensors that no record would know of: in anything but a list."""
    if isinstance(argument, dict):
        argument = tuple(argument.values())
    elif type(argument) is list:
        return any(map(_hides_tensors, argument))
    if not isinstance(argument, tuple | set | frozenset):
        return False
    return any(isinstance(item, torch.Tensor) or _hides_tensors(item) for item in argument)


def _key(tensor: torch.Tensor) -> int | None:
    storage = _compat.storage_of(tensor)
    return None if storage is None else _compat.storage_id(storage)


def declare(function: type[Function], recorder_here: Callable[[], Recorder | None]) -> None:
    """Record calls of this Function's forward from now on as one operation."""
    if _MARK in vars(function):
        return
    rerun = Rerun(function)
    plain = rerun.forward

    def recordable(args: tuple[Any, ...]) -> Recorder | None:
        if torch.compiler.is_compiling() or _now.call is not None or _compat.in_functorch():
            return None
        return None if any(map(_hides_tensors, args)) else recorder_here()

    if rerun.has_context:

        @functools.wraps(plain)
        def forward(ctx: Any, *args: Any) -> Any:
            recorder = recordable(args)
            if recorder is None:
                return plain(ctx, *args)
            return rerun.record(recorder, ctx, args)

    else:

        @functools.wraps(plain)
        def forward(*args: Any) -> Any:
            recorder = recordable(args)
            return plain(*args) if recorder is None else rerun.record(recorder, None, args)

    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(function, _MARK, rerun)
