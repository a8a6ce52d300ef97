"""Replay: runs recorded operations again, to give autograd a tensor that was dropped.

Problem: backward asks for one freed tensor; the operations between it and what is still in memory
must run again with the same bits, without a trace in the user's state, in as little memory as
possible.
Invariant: replays run below autograd, autocast and every mode; they write to fresh memory only,
never to an external (rule 4); each temporary is freed after its last reader. The order is that of
recording, so all ranks replay alike (rule 14). Imports tape. Rejected: recursion from the request
to its inputs, whose depth Python's stack limits and whose order varies (rule 9).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide._compat import switches
from lowtide.errors import ReplayError
from lowtide.tape import generators
from lowtide.tape.retained import free_later, free_once_asked
from lowtide.tape.retry import with_room
from lowtide.tape.streams import hand_over, replaying
from lowtide.tape.values import (
    Handle,
    Kept,
    Operation,
    Ref,
    Value,
    flatten,
    versions,
)
from lowtide.tape.watch import copy_of
from lowtide.tape.whose import name_of
from lowtide.tape.wrapped import Wrapped

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder

Tensor = torch.Tensor

listeners: list[Callable[[list[Operation]], None]] = []
"""Functions that are called with the operations of each replay, as a list; ``facts.name`` is an
operation's name. Tests count what was recomputed with them. Append one, and remove it when done."""


def unpack(packed: Any) -> Any:
    """Saved-tensor hook: the tensor behind a handle, from memory or from a replay."""
    if not isinstance(packed, Handle):
        if not packed.intact():
            raise _changed(packed)
        kept: Tensor = packed.tensor
        _compat.keep_from_leaves(kept)
        return kept
    tape = packed.tape
    with tape.lock:
        tape.decisions.requested(packed)
        value = packed.value
        base = in_memory(value)
        if base is not None and packed.counter is not None and packed.counter.moved_over(base):
            base = None  # it was written through the part that was saved, while nothing recorded
            value.held = None if value.op is not None else value.held
        if base is None:
            if value.op is None:
                raise _lost(value, packed.ref)
            began = time.perf_counter()
            with _all_stays_held(tape.recorder):
                base, operations = with_room(
                    lambda: rematerialize(value, packed),
                    tape.decisions.replay_out_of_memory,
                    limited=tape.decisions.where is not None,
                )
            seconds = time.perf_counter() - began
            tape.decisions.replayed(operations, seconds)
            for listener in listeners:
                listener(operations)
            if tape.recorder is not None:
                tape.recorder.adopt(value, base)
        hand_over(value, base)
        tape.decisions.answered(value, base)
        free_once_asked(packed)
        tensor = _as_saved(base, packed.ref)
        _compat.keep_from_leaves(tensor)
        return tensor


def _as_saved(base: Tensor, ref: Ref) -> Tensor:
    """The tensor that autograd has saved, over the memory of `base`."""
    if base.shape == ref.size and base.dtype == ref.dtype and ref.fits(base):
        return base
    # A custom backward may write what it is given: a view shows that to the value it is of.
    with (
        _compat.without_inference_mode(),
        _compat.below_autograd(),
        _compat.no_overrides(),
        _compat.counting_writes(),
    ):
        return ref.of(as_dtype(base, ref))


def as_dtype(base: Tensor, ref: Ref) -> Tensor:
    """The memory of `base` as a view of the dtype of `ref`, as far as whole elements go."""
    if base.dtype == ref.dtype:
        return base
    nbytes = base.untyped_storage().nbytes()
    whole = nbytes - nbytes % max(base.itemsize, ref.dtype.itemsize)
    if whole < nbytes and base.itemsize > ref.dtype.itemsize:
        return base  # `ref` may lie where no element of `base` does: memory is all they share
    return torch.as_strided(base, (whole // base.itemsize,), (1,), 0).view(ref.dtype)


@contextlib.contextmanager
def _all_stays_held(recorder: Recorder | None) -> Iterator[None]:
    """Let nothing be dropped while a replay inside the forward relies on what is in memory."""
    if recorder is None:
        yield
        return
    recorder.replaying = True
    recorder.writes_were_seen()
    try:
        yield
    finally:
        recorder.replaying = False


def in_memory(value: Value) -> Tensor | None:
    """The value's tensor if it is held and unchanged; forgets one that was overwritten."""
    held = value.held
    if held is None:
        return None
    if value.intact():
        return held
    if value.op is not None:
        value.held = None
    return None


def closure(value: Value) -> list[Operation]:
    """The operations that must run to make `value` from what is in memory, in recorded order."""
    found: set[Operation] = set()
    stack: list[tuple[Value, Ref | None]] = [(value, None)]
    while stack:
        wanted, read_as = stack.pop()
        op = wanted.op
        if op is None:
            raise _lost(wanted, read_as)
        if op in found:
            continue
        found.add(op)
        for ref in op.refs:
            if ref.value is not None and in_memory(ref.value) is None:
                stack.append((ref.value, ref))
    return sorted(found, key=_sequence)


def peak_of(value: Value, needs: Callable[[Operation], int]) -> int:
    """The most bytes that making `value` again from what is in memory has allocated at once.

    Args:
        needs: bytes that an operation allocates, results included.
    """
    if in_memory(value) is not None:
        return 0
    operations = closure(value)
    readers = Counter(ref.value for op in operations for ref in op.refs)
    readers[value] += 1
    made: dict[Value, int] = {}
    level = peak = 0
    for op in operations:
        peak = max(peak, level + needs(op))
        for ref in op.refs:
            readers[ref.value] -= 1
            if ref.value is not None and not readers[ref.value]:
                level -= made.pop(ref.value, 0)
        for result in op.made():
            if readers[result]:
                made[result] = result.nbytes
                level += result.nbytes
    return peak


def _sequence(op: Operation) -> int:
    return op.sequence


def rematerialize(value: Value, request: Handle) -> tuple[Tensor, list[Operation]]:
    """Replay until `value` exists; hold what the decisions want retained on the way."""
    decisions = request.tape.decisions
    operations = closure(value)
    readers = {value: 1}
    for op in operations:
        for ref in op.refs:
            if ref.value is not None:
                readers[ref.value] = readers.get(ref.value, 0) + 1
    live: dict[Value, Tensor] = {}
    now = switches.ambient()
    with (
        _compat.without_inference_mode(),
        _compat.below_autograd(),
        _compat.no_overrides(),
        torch.set_grad_enabled(True),
    ):
        for op in operations:
            if op.grad_mode is not torch.is_grad_enabled():
                _compat.set_grad_mode(op.grad_mode)
            made = run(op, live, readers, now)
            for ref in op.refs:
                if ref.value is not None:
                    _read(ref.value, live, readers)
            for result, tensor in made:
                if readers.get(result, 0):
                    live[result] = tensor
                if result.held is None and decisions.retained(result, request):
                    result.held = tensor
                    result.version = _compat.version_of(tensor)
                    free_later(result, request.tape)
            made.clear()
    return live[value], operations


def _read(value: Value, live: dict[Value, Tensor], readers: dict[Value, int]) -> None:
    left = readers[value] - 1
    readers[value] = left
    if not left:
        live.pop(value, None)


def run(
    op: Operation,
    live: dict[Value, Tensor],
    readers: dict[Value, int],
    now: tuple[object, ...],
) -> list[tuple[Value, Tensor]]:
    """Run one operation again; returns the values it makes that are still in use, with tensors."""
    if op.stream is None:
        return _run(op, live, readers, now)
    with replaying(op, _read_by(op, live)):
        return _run(op, live, readers, now)


def _read_by(op: Operation, live: dict[Value, Tensor]) -> list[tuple[Value, Tensor]]:
    found = []
    for value in op.values():
        tensor = live.get(value)
        if tensor is None:
            tensor = in_memory(value)
        if tensor is not None:
            found.append((value, tensor))
    return found


def _run(
    op: Operation,
    live: dict[Value, Tensor],
    readers: dict[Value, int],
    now: tuple[object, ...],
) -> list[tuple[Value, Tensor]]:
    bases: dict[Value | Ref, Tensor] = {}
    for ref, _ in op.writes:
        bases[ref.value or ref] = _private(ref, live, readers, op)
    args = op.args.copy()
    for place, argument in enumerate(args):
        if type(argument) is Ref:
            args[place] = _tensor(argument, bases, live)
        elif type(argument) is list:
            args[place] = _tensors(argument, bases, live)
    kwargs = op.kwargs
    if kwargs:
        kwargs = {}
        for name, argument in op.kwargs.items():
            if type(argument) is Ref:
                argument = _tensor(argument, bases, live)
            elif type(argument) is list:
                argument = _tensors(argument, bases, live)
            kwargs[name] = argument
    if (
        op.draws
        or op.casting is not None
        or op.default_dtype is not torch.get_default_dtype()
        or op.threads != torch.get_num_threads()
        or op.flushes is not switches.flushes_denormals()
        or (op.ambient is not None and op.ambient != now)
    ):
        result = _under_recorded_state(op, args, kwargs, now)
    else:
        result = op.facts.func(*args, **kwargs)
    flat = flatten(result)
    made: list[tuple[Value, Tensor]] = []
    for place, weak in op.outputs:
        value = weak()
        if value is not None:
            made.append((value, flat[place]))
    for ref, weak in op.writes:
        value = weak()
        if value is not None:
            made.append((value, bases[ref.value or ref]))
    return made


def _tensor(ref: Ref, bases: dict[Value | Ref, Tensor], live: dict[Value, Tensor]) -> Tensor:
    value = ref.value
    if value is None:
        base = bases.get(ref)
        if base is None:
            base = bases[ref] = _fresh(ref)
    else:
        found = bases.get(value) if bases else None
        if found is None:
            found = live.get(value)
        if found is None:
            found = in_memory(value)
        if found is None:
            raise _lost(value, ref)
        base = found
    return ref.of(base)


def _tensors(
    items: list[Any], bases: dict[Value | Ref, Tensor], live: dict[Value, Tensor]
) -> list[Any]:
    return [_tensor(item, bases, live) if type(item) is Ref else item for item in items]


def _under_recorded_state(
    op: Operation, args: Sequence[Any], kwargs: dict[str, Any], now: tuple[object, ...]
) -> Any:
    """Call the operator under the state that it was recorded under (rules 3 and 5)."""
    with contextlib.ExitStack() as stack:
        ambient = op.ambient is not None and op.ambient != now
        if ambient or op.default_dtype is not torch.get_default_dtype():
            stack.enter_context(switches.lock)  # from here on they are as the program has set them
        if ambient and op.ambient is not None:
            stack.enter_context(switches.restored_ambient(op.ambient))
        default = torch.get_default_dtype()
        if op.default_dtype is not default:
            torch.set_default_dtype(op.default_dtype)
            stack.callback(torch.set_default_dtype, default)
        threads = torch.get_num_threads()
        if op.threads != threads:
            torch.set_num_threads(op.threads)
            stack.callback(torch.set_num_threads, threads)
        flushes = switches.flushes_denormals()
        if op.flushes is not flushes:
            torch.set_flush_denormal(op.flushes)
            stack.callback(torch.set_flush_denormal, flushes)
        if op.casting is not None:
            stack.enter_context(_compat.cast_as(op.casting))
        own = generators.copy_to_draw_from(op) if op.draws else None
        if own is not None:
            args, kwargs = generators.given(op, own, args, kwargs)
            return op.facts.with_generator(*args, **kwargs)
        if op.draws:
            stack.enter_context(generators.drawing(op.draws))
        return op.facts.func(*args, **kwargs)


def _private(
    ref: Ref, live: dict[Value, Tensor], readers: dict[Value, int], op: Operation
) -> Tensor:
    """Memory of its own for the operation to write, with the content that it is going to change."""
    value = ref.value
    if value is None:
        return _fresh(ref)
    base = live.get(value)
    if base is not None and value.held is not base:
        here = sum(1 for other in op.refs if other.value is value)
        if readers[value] == here:
            return base  # a temporary of this replay, which no later operation reads
    if base is None:
        base = in_memory(value)
    if base is None:
        raise _lost(value, ref)
    return copy_of(base)


def _fresh(ref: Ref) -> Tensor:
    assert ref.blank is not None
    nbytes, device = ref.blank
    storage = torch.UntypedStorage(nbytes, device=device)
    empty = torch.empty(0, dtype=ref.dtype, device=device)
    return empty.set_(storage, ref.offset, ref.size, ref.stride)


def _changed(kept: Kept | Wrapped) -> ReplayError:
    tensor = kept.counted
    return ReplayError(
        f"backward needs a {type(tensor).__name__} of shape {tuple(kept.shape)} that "
        "was modified by an in-place operation after the forward saved it: it is at version "
        f"{_compat.version_of(tensor)}, expected version {kept.version}. Clone it before "
        "changing it."
    )


def _lost(value: Value, ref: Ref | None) -> ReplayError:
    what = "a tensor"
    if ref is not None:
        what = f"a tensor of shape {tuple(ref.size)} and dtype {ref.dtype}"
    held = value.held
    whose = None if held is None else name_of(held)
    what += f" ({whose})" if whose is not None else ""
    if held is not None and held.untyped_storage().nbytes() < value.nbytes:
        return ReplayError(
            f"backward needs {what}, made outside the recorded region, whose memory has been "
            f"freed since the forward: its storage has {held.untyped_storage().nbytes()} of "
            f"{value.nbytes} bytes. FSDP2 does that when it reshards parameters: keep the modules "
            "that share a recorded region inside one fully_shard group, or pass "
            "reshard_after_forward=False."
        )
    if held is not None:
        now, then = versions(value)
        return ReplayError(
            f"backward needs {what} that was modified by an in-place operation after the forward "
            f"read it: it is at version {now}, expected version {then}. "
            "Parameters and inputs must not change between forward and backward "
            "(is optimizer.step() called before backward()? does x += block(x) overwrite what a "
            "region was given?); clone the tensor before changing it, or make the change inside a "
            "region or budget that is around both, so that it is seen."
        )
    return ReplayError(
        f"backward needs {what} that can neither be found in memory nor be made again. This is a "
        "defect of lowtide: please report the model and the operators around it."
    )
