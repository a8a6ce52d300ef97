"""Memory that is read on another stream of an accelerator than the one it was made on (rule 14).

Problem: an allocator hands freed memory on to the stream that it was given out on, which may write
it before a kernel of another stream has read it. In a plain step autograd holds what it has saved
until backward, and by then the program has ordered its streams; a tape lets go of it while the
forward runs, and a replay makes it again where nothing orders anything. Invariant: what a recorded
or a replayed operation reads on its stream is reported to the allocator if it was made on another,
or nobody knows where, and whoever gets a value waits for the stream it was made on, of whatever
device. A step on one stream pays for it only where a replay reads what was made outside. Imports
values. Rejected: to wait for all streams before anything is let go, which orders what the program
wanted side by side.
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
    """The stream on which a value was made; None: on none, or nobody knows where."""
    stream: torch.Stream | None = value.home if value.op is None else value.op.stream
    return stream


def homes(op: Operation) -> list[torch.Stream]:
    """The other streams on which what it reads was made."""
    found: list[torch.Stream] = []
    for value in op.values():
        stream = made_on(value)
        if stream is not None and stream != op.stream and stream not in found:
            found.append(stream)
    return found


def put_on(op: RareOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An operation is about to run and to be recorded."""
    op.stream = _compat.stream_of((*args, *kwargs.values()))
    if op.stream is None:
        return
    if homes(op):
        for tensor in tensors_in(args, kwargs):
            _protect(op, tensor)
    _wait_for_the_cpu(op, args, kwargs)


def read_unrecorded(known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An operation is about to run that is not recorded: what it reads may be let go of as well."""
    for tensor in tensors_in(args, kwargs):
        entry = known.entry_of(tensor) if _compat.is_accelerator(tensor.device) else None
        stream = None if entry is None else made_on(known.value_in(entry))
        if stream is not None:
            current = _compat.current_stream(tensor.device)
            if current != stream:
                _compat.record_stream(tensor, current)


def _wait_for_the_cpu(op: RareOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A copy to the CPU that does not block is replayed as one that does: the program has waited
    before it read it, and what a replay runs next does not."""
    if op.facts.name == "aten::_to_copy":
        to = kwargs.get("device")
        if kwargs.get("non_blocking") and to is not None and to.type == "cpu":
            op.kwargs = {k: v for k, v in op.kwargs.items() if k != "non_blocking"}
    elif op.facts.name == "aten::copy_" and args[2:] == (True,) and args[0].device.type == "cpu":
        op.args = op.args[:2]


def _protect(op: Operation, tensor: torch.Tensor) -> None:
    """Nobody gets the memory of this argument before the operation has read it on its stream."""
    if tensor.device == op.stream.device:
        _compat.record_stream(tensor, op.stream)
    elif _compat.is_accelerator(tensor.device):  # a copy between devices is ordered with this one
        _compat.record_stream(tensor, _compat.current_stream(tensor.device))


@contextlib.contextmanager
def replaying(op: Operation, read: Iterable[tuple[Value, torch.Tensor]]) -> Iterator[None]:
    """Run an operation again on its stream: after what it reads was made, there or by a replay, and
    between what the current stream did before and does next. Copies of what it writes are made
    there too."""
    for value, tensor in read:
        home = made_on(value)
        if home is None or home != op.stream:  # torch says that no stream is unlike None
            _protect(op, tensor)
    for stream in homes(op):
        op.stream.wait_stream(stream)
    with _compat.on_stream(op.stream):
        yield


def hand_over(value: Value, tensor: torch.Tensor) -> None:
    """The current stream is about to read a tensor: it waits for the one it was made on."""
    stream = made_on(value)
    if stream is None or not _compat.is_accelerator(tensor.device):
        return
    current = _compat.current_stream(tensor.device)
    if current != stream:
        current.wait_stream(stream)
        with _compat.below_autograd():
            _compat.record_stream(tensor, current)
