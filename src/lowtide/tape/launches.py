"""Kernels of Triton's, which no dispatcher sees.

Problem: a library's rotary embedding or cross entropy writes to its inputs in place. A replay of
what made those would bring the old content back, and gradients would be wrong without an error.
What its norm and activation make had to be kept besides, as nobody knew where it came from.
Invariant: before a kernel is launched inside a recording, the recorder knows what it writes to: all
that it is given, where its code cannot be followed. A launch is an operation of the record if the
kernel is a function of its arguments (`ttir`), and is replayed as it was launched; else the new
content is kept (rule 5). Nobody takes it for the old one (rule 4). Imports `_compat`, operators,
ttir and watch. Rejected: recording those that add up with atomics, whose bits depend on which
program comes first; an autotuner's trials, of which all but one would be replayed for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide._compat import launches
from lowtide.tape.operators import FACTS, Facts
from lowtide.tape.ttir import Code, read_code
from lowtide.tape.watch import PLAIN

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder

_TENSOR = object()  # in place of one among the arguments of a launch
Arguments = list[tuple[Any, bool]]  # as `launches.bound` gives them


class Launch:
    """A launch in place of an operator: its first argument runs it, the others are the tensors that
    the kernel is given. `fills`: places of those that are fresh memory, or None: not replayed."""

    def __init__(
        self, kernel: str, writes: tuple[int, ...], fills: frozenset[int] | None = None
    ) -> None:
        FACTS[id(self)] = Facts.of_launch(self, f"triton::{kernel}", writes, fills)

    def __call__(self, launch: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        return launch(*tensors)


_launch = functools.cache(Launch)  # one for all launches that are alike; `FACTS` needs it to live


class _Call:
    """One launch, with all but its tensors.

    Attributes:
        numbers: what tells it from other launches of its kernel, besides how it is compiled.
    """

    __slots__ = ("_args", "_kernel", "_kwargs", "_run", "numbers")

    def __init__(
        self,
        kernel: Any,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Arguments,
    ) -> None:
        self._kernel, self._run = kernel, run
        self._args = list(map(_without_tensor, args))
        self._kwargs = {name: _without_tensor(each) for name, each in kwargs.items()}
        grid = kwargs["grid"]  # the program may change it, or what a function of it reads
        settled = functools.partial(self._settle, grid) if callable(grid) else tuple(grid)
        self._kwargs["grid"] = settled
        self.numbers = tuple(
            [
                each.data_ptr() if isinstance(each, torch.Tensor) else each
                for each, constant in arguments
                if not constant
            ]
        )

    def _settle(self, grid: Callable[[Any], Any], constants: Any) -> tuple[Any, ...]:
        found = self._kwargs["grid"] = tuple(grid(constants))
        return found

    def __call__(self, *tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        args = [next(left) if each is _TENSOR else each for each in self._args]
        named = {
            name: next(left) if each is _TENSOR else each for name, each in self._kwargs.items()
        }
        self._run(self._kernel, *args, **named)

    def is_another_try(self, other: Any) -> bool:
        """Whether a launch differs from another at most in how its kernel is compiled."""
        alike = isinstance(other, _Call) and other._kernel is self._kernel
        return alike and other.numbers == self.numbers


def _without_tensor(argument: Any) -> Any:
    return _TENSOR if isinstance(argument, torch.Tensor) else argument


@functools.cache  # once
def watch(recorder_here: Callable[[], Recorder | None]) -> None:
    """From now on, tell the recorder that is open on a thread of what Triton launches there."""
    launches.watch_launches(telling(recorder_here))


def telling(recorder_here: Callable[[], Recorder | None]) -> launches.Launched:
    def launched(
        kernel: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorder = recorder_here()
        if recorder is None or launches.is_warmup(kwargs) or not recorder.sees_calls():
            return run(kernel, *args, **kwargs)
        recorder.met_unusual()
        kwargs = launches.in_order(kernel, args, kwargs)
        arguments = launches.bound(kernel, args, kwargs)
        code = _code(kernel, arguments, lambda: launches.ttir_of(kernel, run, args, kwargs))
        if code is not None and code.repeatable and _may_be_recorded(arguments):
            call = _Call(kernel, run, args, kwargs, arguments)
            tensors = [each for each, _ in arguments if isinstance(each, torch.Tensor)]
            writes = [1 + place for place in sorted(code.writes)]
            fills = _filled(recorder, call, tensors, code)
            operation = _launch(launches.kernel_name(kernel), tuple(writes), fills)
            return recorder.hand(operation, (call, *tensors))
        given = [each for argument, _ in arguments for each in launches.pointers(argument)]
        tensors = [tensor for tensor in given if tensor is not None]
        at = [place for place, tensor in enumerate(given) if tensor is not None]
        writes = [1 + n for n, place in enumerate(at) if code is None or place in code.writes]
        operation = _launch(launches.kernel_name(kernel), tuple(writes))
        return recorder.hand(operation, (lambda *_: run(kernel, *args, **kwargs), *tensors))

    return launched


def _code(kernel: Any, arguments: Arguments, compiled: Callable[[], str | None]) -> Code | None:
    """What a kernel does, as it is compiled for such arguments; None: it is not known."""
    if launches.has_hooks(kernel):  # compiling would run them once more
        return None
    kind = tuple([_kind(*each) for each in arguments])
    known = launches.known_of(kernel)
    if kind not in known:
        try:
            text = compiled()
        except Exception:  # the launch says why; in a dry run, tensors have no addresses
            return None
        code = None if text is None else read_code(text)
        count = sum(len(launches.pointers(argument)) for argument, _ in arguments)
        known[kind] = code if code is not None and code.addresses == count else None
    found: Code | None = known[kind]
    return found


def _kind(argument: Any, constant: bool) -> Any:
    """For arguments of one kind, a kernel is the same code, as far as its writes go. Triton takes a
    one for a constant."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    if constant:
        return launches.constant_kind(argument)
    if isinstance(argument, int):
        return argument if isinstance(argument, bool) else argument == 1
    if isinstance(argument, float):
        return float
    if isinstance(argument, tuple | list):
        return (type(argument), *[_kind(each, constant) for each in argument])
    if launches.pointers(argument):
        return launches.pointer_kind(argument)
    return launches.constant_kind(argument)  # such as a function, or one that says it is one


def _may_be_recorded(arguments: Arguments) -> bool:
    """Whether a replay can be given the same: tensors, and what cannot change."""
    return all(
        type(argument) in PLAIN
        or constant
        or argument is None
        or argument is launches.DEFAULT
        or isinstance(argument, int | float | str)
        for argument, constant in arguments
    )


def _filled(
    recorder: Recorder, call: _Call, tensors: list[torch.Tensor], code: Code
) -> frozenset[int] | None:
    """Which of the tensors that a launch writes to are fresh memory; None: it is not recorded, as
    what is in another cannot be made again, or it seems to be a trial of an autotuner's."""
    fills = []
    for place in code.writes:
        entry = recorder.entry_of(tensors[place])
        if entry is None:
            return None
        pieces = entry.pieces
        if pieces is not None and pieces.untouched:
            if entry.constant or place in code.reads:  # something of it may stay
                return None
            fills.append(1 + place)
            continue
        maker = recorder.value_in(entry).op
        if maker is None or (maker.args and call.is_another_try(maker.args[0])):
            return None
    return frozenset(fills)
