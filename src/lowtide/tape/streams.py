"""Memory that is read on another stream of an accelerator than the one it was made on (rule 14).

Problem: an allocator hands freed memory on to the stream that it was given out on, which may write
it before a kernel of another stream has read it. In a plain step autograd holds what it has saved
until backward, and by then the program has ordered its streams; a tape lets go of it while the
forward runs, and a replay makes it again where nothing orders anything. Invariant: what a recorded
or a replayed operation reads on its stream is reported to the allocator if it was made on another,
and whoever gets a value waits for the stream it was made on. Both are no calls at all where there
is one stream. Imports values. Rejected: to wait for all streams before anything is let go, which
orders what the program wanted side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from lowtide import _compat
from lowtide.tape.values import Operation, Value


def homes(op: Operation) -> list[torch.Stream]:
    """The other streams on which what it reads was made."""
    found = []
    for ref in op.refs:
        maker = None if ref.value is None else ref.value.op
        if maker is not None and maker.stream is not None and maker.stream != op.stream:
            found.append(maker.stream)
    return found


def protect(op: Operation, tensors: Iterable[torch.Tensor]) -> None:
    """Nobody gets the memory of these arguments before the operation has read it on its stream."""
    for tensor in tensors:
        if tensor.device == op.stream.device:
            tensor.record_stream(op.stream)


@contextlib.contextmanager
def replaying(op: Operation, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Run an operation again on its stream: after what it reads was made, there or by a replay, and
    between what the current stream did before and does next."""
    others = homes(op)
    if others or _compat.current_stream(op.stream.device) != op.stream:
        protect(op, tensors)
    for stream in others:
        if stream.device == op.stream.device:
            op.stream.wait_stream(stream)
    with _compat.on_stream(op.stream):
        yield


def hand_over(value: Value, tensor: torch.Tensor) -> None:
    """The current stream is about to read a tensor: it waits for the one it was made on."""
    made_on = None if value.op is None else value.op.stream
    if made_on is None or tensor.device != made_on.device:
        return
    current = _compat.current_stream(tensor.device)
    if current != made_on:
        current.wait_stream(made_on)
        with _compat.below_autograd():
            tensor.record_stream(current)
