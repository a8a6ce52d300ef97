"""Kernels of Triton's, which write to what they are given where no dispatcher sees it.

Problem: a library's rotary embedding or cross entropy writes to its inputs in place. A replay of
what made those would bring the old content back, and gradients would be wrong without an error.
Invariant: before a kernel is launched inside a recording, the recorder knows what it writes to (all
that it is given, where its code cannot be followed): the new content is kept (rule 5), and nobody
takes it for the old (rule 4). What a kernel only reads may be dropped as before. Imports `_compat`,
operators and ttir. Rejected: recording launches as operations, as a kernel may add up
with atomics, or be one of the trials of an autotuner: `lowtide.replayable` is where a program says
that it may run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide._compat import launches
from lowtide.tape.operators import FACTS, Facts
from lowtide.tape.ttir import written_pointers

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder


class Launch:
    """A launch in place of an operator: its first argument runs it, the others are the tensors that
    the kernel is given."""

    def __init__(self, kernel: str, writes: tuple[int, ...]) -> None:
        FACTS[id(self)] = Facts.of_launch(self, f"triton::{kernel}", writes)

    def __call__(self, launch: Callable[[], Any], *tensors: torch.Tensor) -> Any:
        return launch()


_launch = functools.cache(Launch)  # one for all launches that are alike; `FACTS` needs it to live


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
        arguments = launches.bound(kernel, args, kwargs)
        given = [each for argument, _ in arguments for each in launches.pointers(argument)]
        known = launches.known_of(kernel)
        kind = tuple([_kind(*each) for each in arguments])
        if kind not in known:
            known[kind] = _written(kernel, run, args, kwargs, len(given))
        places = known[kind]
        tensors = [tensor for tensor in given if tensor is not None]
        at = [place for place, tensor in enumerate(given) if tensor is not None]
        writes = tuple([1 + n for n, place in enumerate(at) if places is None or place in places])
        launch = functools.partial(run, kernel, *args, **kwargs)
        return recorder.hand(_launch(launches.kernel_name(kernel), writes), (launch, *tensors))

    return launched


def _written(
    kernel: Any,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
) -> frozenset[int] | None:
    """Places among the addresses that a kernel is given of those that it writes to; None: it may
    write to any."""
    try:
        text = launches.ttir_of(kernel, run, args, kwargs)
    except Exception:  # where it does not compile, the launch says so
        return None
    found = None if text is None else written_pointers(text)
    return None if found is None or found[0] != count else found[1]


def _kind(argument: Any, constant: bool) -> Any:
    """For arguments of one kind, a kernel is the same code, as far as its writes go. Triton takes a
    one for a constant."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    if constant:
        return repr(argument)
    if isinstance(argument, int):
        return argument if isinstance(argument, bool) else argument == 1
    if isinstance(argument, tuple | list):
        return tuple([_kind(each, constant) for each in argument])
    return type(argument)
