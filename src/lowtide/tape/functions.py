"""Functions with a backward of their own whose forward may run again.

Problem: the forward of a `torch.autograd.Function` often is a kernel that no dispatcher sees (one
of Triton's, of a C++ extension): it fills memory of `torch.empty`, and what it makes has to be kept
(rule 5), though who wrote it knows that it may run twice. Invariant: such a forward is one
operation of the record, whose results are what it returns and what it saves besides; the program
gets what its own call returned, and a replay calls the forward with a context that is thrown away,
with arguments that are what the program's were, and has to make what the program's call made.
Imports `_compat`, errors, arguments, known, operators and values. Rejected: recording what it
calls, which is the part that can be seen; a custom operator made of it, which would need the types
of its arguments.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from lowtide import _compat
from lowtide.errors import ReplayError, UnsupportedError
from lowtide.tape.arguments import Contents, copied, kind_of, may_be_recorded, needing
from lowtide.tape.known import is_lazy
from lowtide.tape.operators import FACTS, Facts
from lowtide.tape.values import tensors_in

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder

_MARK = "_lowtide_replayable"  # on a class: what runs its forward


class _OfThread(threading.local):
    inside = False  # of a forward that is recorded or replayed: what it calls is a part of it


_now = _OfThread()


class _Call:
    """What a call of a forward depends on besides its arguments, and what it made.

    Attributes:
        ctx, given, result: the program's context, arguments and results, while its call runs.
        ran: it has.
        needs: which arguments need a gradient, as the forward may ask its context.
        grads: which of the tensors among the arguments require one.
        device: the default one.
        lazy: it made a lazily conjugated or negated tensor.
        made: of each result, its shape and dtype; None: it is none of the record's.
    """

    __slots__ = ("ctx", "device", "given", "grads", "lazy", "made", "needs", "ran", "result")

    def __init__(self, ctx: Any, args: tuple[Any, ...]) -> None:
        self.ctx, self.result, self.ran, self.lazy = ctx, None, False, False
        self.given: tuple[Any, ...] | None = args
        self.needs: tuple[bool, ...] = getattr(ctx, "needs_input_grad", ())
        self.grads = tuple([tensor.requires_grad for tensor in tensors_in(args, {})])
        self.device = torch.get_default_device()
        self.made: list[Any] | None = None

    def over(self) -> Any:
        result = self.result
        self.ctx = self.given = self.result = None
        return result


class Rerun:
    """A forward as an operator: a function of its arguments that returns tensors, flat."""

    def __init__(self, function: type[Function]) -> None:
        self.name = function.__name__
        self.forward: Callable[..., Any] = function.forward
        self.has_context = function.setup_context is Function.setup_context
        self._seen: set[Any] = set()  # kinds of calls that were seen not to write to arguments
        FACTS[id(self)] = Facts.of_forward(self, f"function::{self.name}")

    def record(self, recorder: Recorder, ctx: Any, args: tuple[Any, ...]) -> Any:
        """Run the forward for the program, as an operation of the record."""
        call, kind = _Call(ctx, args), kind_of(args)
        before = Contents(args, whole=kind not in self._seen)  # here, where no clock runs
        try:
            recorder.hand(self, (call, *map(copied, args)))
        finally:
            result = call.over()
        if call.ran and before.changed():
            raise self._writes()
        self._seen.add(kind)
        if call.lazy:
            recorder.met_lazy()
        return result if call.ran else self._forward(ctx, args)

    def __call__(self, call: _Call, *args: Any) -> tuple[Any, ...]:
        with _alone():
            if call.ran:
                return self._again(call, args)
            return self._first(call)

    def _first(self, call: _Call) -> tuple[Any, ...]:
        """The program's. Where a device had no room, it is called once more."""
        ctx, args = call.ctx, call.given
        assert args is not None
        result = self._forward(ctx, args)
        if getattr(ctx, "dirty_tensors", None):
            raise self._writes()
        made = _made_by(ctx, result, args)
        call.lazy = any(item is not None and is_lazy(item) for item in made)
        made = _without_lazy(made)
        call.made = [item if item is None else _look(item) for item in made]
        call.result, call.ran = result, True
        return made

    def _writes(self) -> UnsupportedError:
        return UnsupportedError(
            f"the forward of {self.name} writes to its arguments, so it cannot be run again: "
            "leave lowtide.replayable out for this Function if torch's operators do that, or "
            "it says so by ctx.mark_dirty. What a kernel of another library writes there, "
            "nobody sees: put it into an operator that says so (torch.library.custom_op with "
            "mutates_args), or call the Function outside of the budget or region"
        )

    def _again(self, call: _Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = needing(tuple(map(copied, args)), call.grads)
        ctx: Any = FunctionCtx()
        ctx.needs_input_grad = call.needs
        with _compat.through_autograd_again(), _compat.default_device(call.device):
            made = _without_lazy(_made_by(ctx, self._forward(ctx, args), args))
        again = [item if item is None else _look(item) for item in made]
        if again != call.made:
            raise ReplayError(
                f"the forward of {self.name} made something else when it ran again: {again}, not "
                f"{call.made} (shapes and dtypes, None for what was there before). It is no "
                "function of its arguments: leave lowtide.replayable out for this Function"
            )
        return made

    def _forward(self, ctx: Any, args: tuple[Any, ...]) -> Any:
        return self.forward(ctx, *args) if self.has_context else self.forward(*args)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """What runs inside is no operation, and a graph that it makes is not the step's."""
    before, _now.inside = _now.inside, True
    try:
        with saved_tensors_hooks(_itself, _itself):
            yield
    finally:
        _now.inside = before


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _look(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    # A nested tensor's is not to be had.
    return () if tensor.is_nested else tuple(tensor.shape), tensor.dtype


def _made_by(ctx: Any, result: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results and what was saved, each in its place, without those that were there before."""
    results = result if isinstance(result, tuple) else (result,)
    saved = () if ctx is None else getattr(ctx, "to_save", None) or ()
    there = {_key(tensor) for tensor in tensors_in(args, {})}

    def new(item: Any) -> Any:
        return item if isinstance(item, torch.Tensor) and _key(item) not in there else None

    return tuple(map(new, (*results, *saved)))


def _without_lazy(made: tuple[Any, ...]) -> tuple[Any, ...]:
    """Their memory is not what they are; if nothing else is over it, it is kept (rule 5)."""
    return tuple([None if item is None or is_lazy(item) else item for item in made])


def _key(tensor: torch.Tensor) -> int | None:
    storage = _compat.storage_of(tensor)
    return None if storage is None else _compat.storage_id(storage)


def declare(function: type[Function], recorder_here: Callable[[], Recorder | None]) -> None:
    """Record calls of this Function's forward from now on as one operation."""
    if _MARK in vars(function):
        return
    rerun = Rerun(function)
    plain = rerun.forward

    def recordable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
        if torch.compiler.is_compiling() or _now.inside or _compat.in_functorch():
            return None
        if kwargs or torch.is_grad_enabled():  # it was called as a function of the program's
            return None
        recorder = recorder_here()
        if recorder is None or _compat.function_modes_of_users():  # replays are below those
            return None
        return recorder if all(map(may_be_recorded, args)) else None

    if rerun.has_context:

        @functools.wraps(plain)
        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = recordable(args, kwargs)
            # A subclass may have told its context something before.
            if recorder is None or not isinstance(ctx, BackwardCFunction) or vars(ctx):
                return plain(ctx, *args, **kwargs)
            return _rerun_of(function).record(recorder, ctx, args)

    else:

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            recorder = recordable(args, kwargs)
            if recorder is None:
                return plain(*args, **kwargs)
            return _rerun_of(function).record(recorder, None, args)

    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(function, _MARK, rerun)


def _rerun_of(function: type[Function]) -> Rerun:
    """What runs its forward. Looked up, as torch 2.10's Dynamo refuses functions that refer to such
    an object, even where they do not use it."""
    found: Rerun = vars(function)[_MARK]
    return found
