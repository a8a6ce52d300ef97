"""Memory that is read on another stream of an accelerator than the one it was made on (rule 14).

Problem: an allocator reuses freed memory on the stream that it was allocated for, where it may be
overwritten before a kernel on another stream has read it. In a plain step autograd holds what it
has saved until backward, and by then the program has ordered its streams; a tape may drop it while
the forward runs, and a replay makes it again where nothing orders the streams. Invariant: memory
that an operation reads on its stream is reported to the allocator if it was made on another one
(in a replay also if that is unknown), and whatever receives a value waits for the stream that made
it, on any device. In a step on a single stream this costs only where a replay reads an external.
Imports values. Rejected: waiting for all streams before dropping anything, which puts in order what
the program wanted to run concurrently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.tape.values import Operation, RareOperation, Value, tensors_in

if TYPE_CHECKING:
    from lowtide.tape.known import Known


def made_on(value: Value) -> torch.Stream | None:
    """The stream on which a value was made; None: on no stream, or on an unknown one."""
    stream: torch.Stream | None = value.home if value.op is None else value.op.stream
    return stream


def homes(op: Operation) -> list[torch.Stream]:
    """The streams, other than its own, on which what an operation reads was made."""
    found: list[torch.Stream] = []
    for value in op.values():
        stream = made_on(value)
        if stream is not None and stream != op.stream and stream not in found:
            found.append(stream)
    return found


def put_on(op: RareOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the stream of an operation that is about to run and be recorded; protect its inputs."""
    op.stream = _compat.stream_of((*args, *kwargs.values()))
    if op.stream is None:
        return
    if homes(op):
        for tensor in tensors_in(args, kwargs):
            _protect(op, tensor)
    _wait_for_the_cpu(op, args, kwargs)


def read_unrecorded(known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Protect the inputs of an operation about to run unrecorded: they too may be dropped."""
    for tensor in tensors_in(args, kwargs):
        entry = known.entry_of(tensor) if _compat.is_accelerator(tensor.device) else None
        stream = None if entry is None else made_on(known.value_in(entry))
        if stream is not None:
            current = _compat.current_stream(tensor.device)
            if current != stream:
                _compat.record_stream(tensor, current)


def _wait_for_the_cpu(op: RareOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A non-blocking copy to the CPU is replayed as a blocking one: the program waited before it
    read the copy, but the next operation of a replay does not."""
    if op.facts.name == "aten::_to_copy":
        to = kwargs.get("device")
        if kwargs.get("non_blocking") and to is not None and to.type == "cpu":
            op.kwargs = {k: v for k, v in op.kwargs.items() if k != "non_blocking"}
    elif op.facts.name == "aten::copy_" and args[2:] == (True,) and args[0].device.type == "cpu":
        op.args = op.args[:2]


def _protect(op: Operation, tensor: torch.Tensor) -> None:
    """Keep the allocator from reusing an argument's memory before the operation has read it."""
    if tensor.device == op.stream.device:
        _compat.record_stream(tensor, op.stream)
    elif _compat.is_accelerator(tensor.device):  # its current stream is ordered with a copy
        _compat.record_stream(tensor, _compat.current_stream(tensor.device))


@contextlib.contextmanager
def replaying(op: Operation, read: Iterable[tuple[Value, torch.Tensor]]) -> Iterator[None]:
    """Run an operation again on its recorded stream, after the streams that made what it reads, and
    in order with the current stream, whose later work waits for it. Copies of what it writes are
    made there too."""
    for value, tensor in read:
        home = made_on(value)
        if home is None or home != op.stream:  # in torch `None != stream` is False
            _protect(op, tensor)
    for stream in homes(op):
        op.stream.wait_stream(stream)
    with _compat.on_stream(op.stream):
        yield


def hand_over(value: Value, tensor: torch.Tensor) -> None:
    """The current stream is about to read a tensor: make it wait for the one that made it."""
    stream = made_on(value)
    if stream is None or not _compat.is_accelerator(tensor.device):
        return
    current = _compat.current_stream(tensor.device)
    if current != stream:
        current.wait_stream(stream)
        with _compat.below_autograd(), _compat.no_overrides():
            _compat.record_stream(tensor, current)
