"""What autograd saves during a recording.

Problem: autograd saves tensors in the middle of a forward, in graphs that may die before any
backward. Invariant: what it has saved is in memory, or can be replayed from the tape with the
content that it had (rules 3 and 5); what only dead graphs had saved is dropped. Imports known,
wrapped and writes. Rejected: handing autograd an alias of every tensor and freeing what a plan
drops when the forward ends: the forward's own peak would be the plain step's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.tape import wrapped
from lowtide.tape.known import Entry
from lowtide.tape.values import Handle, Kept, Ref
from lowtide.tape.writes import Writes

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

Tensor = torch.Tensor


class Saves(Writes):
    """The part of a recorder that autograd calls.

    Attributes:
        unpack: the saved-tensor hook that goes with `pack`; set by `lowtide.engine`.
        next_step: set once a backward has ended the recorded step: called before autograd saves
            anything more. It may call `begin` with another tape.
        failed: while a backward runs inside the recording: called before autograd saves anything
            outside of it, which shows that it has raised an error. torch does not report that.
    """

    unpack: Callable[[Any], Any]
    new_handle: Callable[..., Handle] = Handle
    takes_apart = True  # sees an operation on a wrapper subclass before those on its parts
    replaying = False  # a backward inside the forward is replaying
    _thread = 0  # the thread that records

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.tape = tape
        self.decisions = tape.decisions
        self.next_step: Callable[[], None] | None = None
        self.failed: Callable[[], None] | None = None
        self.paused = False  # a backward runs inside the recording
        self._asks = tape.decisions.asks

    def _elsewhere(self) -> bool:
        """Whether this is another thread of the program's, which need not wait for the one that
        records: TorchScript's `fork` hands modes and hooks on to it. Autograd's threads wait."""
        return threading.get_ident() != self._thread and not _compat.in_backward()

    def pack(self, tensor: Tensor) -> Any:
        """Saved-tensor hook: a handle in place of the tensor."""
        if _compat.is_traced_by_fx():
            return Kept(tensor)  # of any other tensor the traced graph knows the values only
        if self._elsewhere():
            return self._kept(tensor)
        if self.paused and self.failed is not None and not _compat.in_backward():
            self.failed()
        if self.next_step is not None:
            self.next_step()
        entry = self.entry_of(tensor)
        if entry is None or self._needs_care(entry, tensor):
            return self._kept(tensor)
        if entry.pieces is not None and not entry.pieces.cover(tensor):
            self._unwritten(entry, tensor)
        value = entry.value
        if value is None:
            value = self.value_in(entry)
        region = self.region
        if value.op is not None:
            if value.op.sequence < self._group:
                value.op = None  # see `_look_for_freed`
            elif value.op.facts.constant:
                value.op = None  # a foreign kernel may have filled it
            elif value.scope is None or region.depth < value.scope.depth:
                value.scope = region
        if value.held is None and (
            value.op is None or value.keep or (self._asks and self.decisions.saved(value, region))
        ):
            with _compat.disable_dispatch():
                self._hold(entry, value, tensor)
        elif value.op is None:
            with _compat.disable_dispatch():
                self._know_counters(entry, value, tensor)
        if value.op is not None and entry.counter is None and value.held is None:
            entry.counter = self.new_counter(tensor)  # while held, its alias shows the counter
        handle = self.new_handle(Ref(value, tensor), region, self.tape, self.sequence)
        held = value.held if entry.counter is not None else None
        if self._other_counter(entry, tensor) or (
            held is not None and not _compat.shares_counter(held, tensor)
        ):
            handle.counter = self.new_counter(tensor)
        if self._asks:
            self.decisions.packed(handle, value)
        return handle

    def forgotten(self, handle: Handle) -> None:
        """A graph dies while the forward runs, and this handle with it.

        A value that only such graphs have saved is dropped. If the program still has its memory,
        the table refers to the value again, as in `let_go`.
        """
        value = handle.value
        if (
            not self._asks
            or self.paused
            or self.next_step is not None
            or self.replaying  # it relies on what is held
            or value.op is None
            or value.held is None
            or value.keep
            or any(other is not handle for other in value.handles())
        ):
            return
        self.decisions.forgotten(value)
        self.let_go(value)

    def _saved_before(self, entry: Entry, tensor: Tensor) -> None:
        """Autograd saved a tensor before the call that filled it: do now what `pack` would do."""
        value = self.value_in(entry)
        handles = value.handles()
        if not handles:
            return
        if value.held is None and (
            value.keep or (self._asks and self.decisions.saved(value, self.region))
        ):
            with _compat.disable_dispatch():
                self._hold(entry, value, tensor)
        if entry.counter is None and value.held is None:
            entry.counter = self.new_counter(tensor)
        if self._asks:
            for handle in handles:
                self.decisions.packed(handle, value)

    def _kept(self, tensor: Tensor) -> Any:
        if _compat.has_own_dispatch(type(tensor)):
            if self.takes_apart:
                return wrapped.kept(tensor, self.pack, self.unpack)
            return Kept(_compat.detached_alias(tensor))  # the class's own detach keeps the class
        with _compat.disable_dispatch():
            return Kept(tensor.detach())
