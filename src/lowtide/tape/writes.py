"""What an operator call writes, and whether it can be written again.

Problem: in-place activations, buffers, running statistics and `.data` change what is in a storage,
in ways that autograd notices or does not. Invariant: what a call will write is known before it
runs; what cannot be replayed is not recorded as reading anything (rule 5); where autograd does not
notice that what it saved changes, it reads what it would in the plain step (rule 4). Imports
sharded, operators, pieces. Rejected: treating every write alike, which keeps too much or gives
gradients of the wrong content.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lowtide import _compat
from lowtide.tape.known import Entry
from lowtide.tape.operators import Facts, hidden_statistics
from lowtide.tape.pieces import covers
from lowtide.tape.sharded import Sharded
from lowtide.tape.values import Handle, Ref, Value, tensors_at, tensors_in
from lowtide.tape.watch import hold

Tensor = torch.Tensor

FILLED = (0, "out")
"""The places of arguments that a call may overwrite piece by piece: see `Pieces`."""


class Behind(NamedTuple):
    """A storage that is written without autograd noticing, or not for all that it saved of it."""

    saved: Value | None
    """What is in it, if autograd has saved that."""
    tensor: Tensor
    """What is written."""
    handles: list[Handle]
    """Those that go on with the new content: none or all."""
    elsewhere: bool
    """Whether the counter that is known of the storage does not move."""


class Writes(Sharded):
    """The part of a recorder that deals with writes."""

    def _written(
        self,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statistics: tuple[int, ...],
    ) -> list[tuple[Entry, int | str]]:
        """The storages that the call is about to write, each once, and through which argument."""
        places = facts.writes if not statistics else (*facts.writes, *statistics)
        if not places:
            return []
        found: dict[int, tuple[Entry, int | str]] = {}
        for place in places:
            for dense, _ in _parts_at(place, args, kwargs):
                entry = self.entry_of(dense)
                if entry is not None:
                    found.setdefault(entry.key, (entry, place))
        return list(found.values())

    def _behind(
        self,
        facts: Facts,
        written: list[tuple[Entry, int | str]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statistics: tuple[int, ...],
    ) -> dict[int, Behind]:
        """The storages that a call is about to write without autograd noticing, by key.

        Running statistics are written without a new version, and so is what a kernel writes that no
        dispatcher sees. `.data` has a version counter of its own, and so has each chunk of an
        `unsafe_chunk`, and a sparse tensor, which may share the memory of the dense ones it was
        made of: autograd does not notice that what it saved through another counter changes, and
        goes on with the new content, as in the plain step (rule 4). What it saved through this one
        keeps the old content.
        """
        found: dict[int, Behind] = {}
        for entry, place in written:
            hidden = facts.unversioned or (place in statistics and place not in facts.writes)
            for dense, apart in _parts_at(place, args, kwargs):
                if self.entry_of(dense) is not entry:
                    continue
                elsewhere = hidden or apart or self._other_counter(entry, dense)
                saved = self._saved(entry)
                handles = [] if saved is None else saved.handles()
                if not (hidden or apart):
                    handles = _unnoticing(handles, dense, elsewhere)
                if saved is not None and handles and not hidden:
                    if len(handles) < len(saved.handles()):
                        self._part(saved, dense, handles)
                        handles = []
                    else:
                        self._hide(saved, dense)
                if elsewhere or handles:
                    found[entry.key] = Behind(saved, dense, handles, elsewhere)
        return found

    def _part(self, saved: Value, written: Tensor, handles: list[Handle]) -> None:
        """Some of what autograd saved of a value goes on with what is in memory, and some does
        not: the former is another value, which shows what is written."""
        live = self.new_value(None, saved.nbytes, saved.region)
        live.scope = saved.scope
        with _compat.disable_dispatch():
            hold(live, self._uncounted(written))
        saved.hand_over(live, handles)
        if self._asks:
            for handle in handles:
                self.decisions.packed(handle, live)

    def _hide(self, saved: Value, written: Tensor) -> None:
        """Where what is held of a saved value would show a write that autograd does not notice,
        through the counter of another chunk, hold it without that counter."""
        held = saved.held
        if held is not None and _compat.shares_counter(held, written):
            saved.held = self._uncounted(held)
            saved.version = _compat.version_of(saved.held)

    def _written_in_backward(
        self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A backward inside the recording writes, such as an optimizer in a hook. What autograd
        does not notice, no version would show to the replays that are still to come: they are to
        read the old content (rule 4)."""
        written = self._written(facts, args, kwargs, ())
        behind = self._behind(facts, written, args, kwargs, ())
        for entry, _ in written:
            unnoticed = behind.get(entry.key)
            if facts.unversioned or unnoticed is not None:
                hidden = facts.unversioned or bool(unnoticed and unnoticed.handles)
                self._overwriting(entry, hidden)

    def _follow_live(self, unnoticed: Behind, entry: Entry, before: tuple[int, bool]) -> None:
        """After a write that autograd did not notice: what it saved is the new content. `before`:
        the entry's version before the write."""
        if unnoticed.elsewhere:
            entry.version, entry.loose = before  # the known counter did not move
        old, tensor, handles = unnoticed.saved, unnoticed.tensor, unnoticed.handles
        if old is None or not handles or old.held is not None:
            return  # nothing was saved, or a held alias shows the new content
        new = self.value_in(entry)
        self._rebind(old, new)
        keep = new.op is None or new.keep or (
            self._asks and self.decisions.saved(new, self.region)
        )  # fmt: skip
        if keep and new.held is None:
            with _compat.disable_dispatch():
                self._hold(entry, new, self._uncounted(tensor))
        if self._asks:
            for handle in handles:
                self.decisions.packed(handle, new)

    def _uncounted(self, tensor: Tensor) -> Tensor:
        """An alias with a counter of its own, which the write that is running will not move."""
        return tensor.data

    def _can_be_made(
        self,
        facts: Facts,
        written: list[tuple[Entry, int | str]],
        args: tuple[Any, ...],
        statistics: bool,
    ) -> bool:
        """False if what the call writes cannot be replayed, whatever its inputs are. They are then
        not recorded: a counter that moves once a step need not be copied for a replay."""
        if facts.blank or (facts.constant and not torch.is_grad_enabled()):
            return False
        return statistics or all(
            self._fills_anew(entry, place, args)
            if place in facts.fills
            else self.value_in(entry).op is not None
            for entry, place in written
        )

    def _fills_anew(self, entry: Entry, place: int | str, args: tuple[Any, ...]) -> bool:
        """False for a parameter whose old content may be part of the new one, as if a weight is
        normalized in place. The new one is in memory anyway, and a record of it would keep a copy
        of the old one as long. Of a buffer it is kept: that may move again before backward.

        False, too, for a part of what has no operation (a cache, a queue), see `_write_refs`: if
        the call were taken to read the rest, all of it would be copied."""
        value = self.value_in(entry)
        argument = None if isinstance(place, str) else args[place]
        if value.op is not None or not isinstance(argument, Tensor):
            return True
        if not entry.counted and value.read and argument.requires_grad:
            return False
        plain = argument.layout is torch.strided and not argument.is_nested
        return not plain or entry.pieces is not None or covers(Ref(None, argument), entry.nbytes)

    def _write_refs(
        self,
        facts: Facts,
        written: list[tuple[Entry, int | str]],
        refs: list[Ref],
        statistics: bool,
    ) -> dict[int, Ref] | None:
        """The ref through which each storage is written, by key; None: cannot be replayed.

        Refs to memory that the operation overwrites entirely lose their value: the old content
        does not matter.
        """
        through: dict[int, Ref] = {}
        if not written or statistics:
            return through
        for entry, place in written:
            value = self.value_in(entry)
            found = [ref for ref in refs if ref.value is value]
            if not found:
                return None
            ref = found[-1 if isinstance(place, str) else 0]  # `out` comes after what is read
            if (
                place in facts.fills
                and len(found) == 1
                and (covers(ref, entry.nbytes) or _first_piece(entry, place, facts))
            ):
                ref.make_blank(entry.nbytes, self._device(entry))
            elif value.op is None or (_untouched_constant(value) and not facts.placing):
                return None
            through[entry.key] = ref
        return through

    def _read_of(self, written: list[tuple[Entry, int | str]]) -> list[weakref.ref[Value]]:
        """Which values in these storages a replay may read."""
        values = [self.value_in(entry) for entry, _ in written]
        return [weakref.ref(value) for value in values if value.read]

    def _not_read(
        self, written: list[tuple[Entry, int | str]], read: list[weakref.ref[Value]]
    ) -> None:
        """A call turns out not to be recorded, so that it has read nothing that a replay needs:
        what it overwrites need not be copied for it. `read`: what others have read."""
        for entry, _ in written:
            value = self.value_in(entry)
            if value.op is None and all(weak() is not value for weak in read):
                value.read = False

    @staticmethod
    def _through(
        through: dict[int, Ref] | None, entry: Entry, place: int | str, kwargs: dict[str, Any]
    ) -> Ref | None:
        """The ref through which a replay writes a storage; None: it cannot make that again. Nor can
        it an `out=` that the call has resized, unless that was empty: a replay would not know what
        is left of the old content, and torch would warn again."""
        ref = None if through is None else through.get(entry.key)
        out = kwargs.get(place) if isinstance(place, str) else None
        if ref is None or not isinstance(out, Tensor) or not ref.size.numel():
            return ref
        return ref if out.shape == ref.size else None

    def _written_inside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Entry, int | str]]:
        """Plain tensors inside subclasses (the local part of a DTensor), which may share memory
        with recorded ones: a write to the subclass changes them without a new version."""
        found: dict[int, tuple[Entry, int | str]] = {}
        for tensor in tensors_in(args, kwargs):
            for inner in _compat.inner_tensors(tensor):
                entry = self.entry_of(inner)
                if entry is not None:
                    found[entry.key] = (entry, 0)
        return list(found.values())

    def _statistics_move(self, facts: Facts, args: tuple[Any, ...]) -> None:
        """A call that is not recorded may be about to move running statistics, without a new
        version: earlier operations, of any recorder, have read the old ones."""
        for place in hidden_statistics(facts, args):
            entry = self.entry_of(args[place])
            if entry is not None and place not in facts.writes:
                self._overwriting(entry, hidden=True)
                entry.value = self.new_value(None, entry.nbytes, self.region)

    # ------------------------------------------------------------------ inputs

    @staticmethod
    def _rebind(old: Value, new: Value) -> None:
        """Let handles that autograd got before the call mean the content after it."""
        old.hand_over(new)
        new.scope = old.scope or new.region
        if new.op is None and old.held is not None:
            new.held, new.version = old.held, old.version

    def _saved(self, entry: Entry) -> Value | None:
        """The value in a storage, if autograd still has a handle on it."""
        value = entry.value or (entry.weak() if entry.weak is not None else None)
        return value if value is not None and value.pending() else None


def _unnoticing(handles: list[Handle], written: Tensor, elsewhere: bool) -> list[Handle]:
    """The handles on tensors whose version counters a write does not move. `elsewhere`: nor does it
    move the one that is known of the storage."""
    return [
        handle
        for handle in handles
        if (elsewhere if handle.counter is None else not handle.counter.shares(written))
    ]


def _parts_at(
    place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """The dense tensors of an argument: each tensor, or what it consists of if it is nested or
    sparse, and whether it is sparse: then its parts have counters of their own."""
    for tensor in tensors_at(place, args, kwargs):
        if _compat.has_own_dispatch(type(tensor)):
            yield tensor, False
        elif tensor.is_nested:
            yield _compat.nested_buffer(tensor), False
        elif tensor.layout is torch.strided:
            yield tensor, False
        else:
            yield from ((member, True) for member in _compat.sparse_members(tensor))


def reads_moved(args: tuple[Any, ...], statistics: tuple[int, ...]) -> bool:
    """Whether a call that moves running statistics reads them through another argument too (a
    weight that is the running variance): its kernel may then read what it has just written."""
    moved = [_bytes_of(args[place]) for place in statistics if isinstance(args[place], Tensor)]
    for place, argument in enumerate(args):
        if place in statistics or not isinstance(argument, Tensor):
            continue
        key, start, end = _bytes_of(argument)
        if any(key == other and start < last and first < end for other, first, last in moved):
            return True
    return False


def _bytes_of(tensor: Tensor) -> tuple[int, Any, Any]:
    """A tensor's storage, and where in it the tensor begins and ends."""
    storage = _compat.storage_of(tensor)
    if storage is None or not tensor.numel():
        return 0, 0, 0
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    span = sum((n - 1) * st for n, st in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return _compat.storage_id(storage), start, start + span * size


def _first_piece(entry: Entry, place: int | str, facts: Facts) -> bool:
    """Whether a write is the first one to uninitialized memory, of which it overwrites a part: a
    replay puts fresh memory around it, since what else is in there is never read from the record
    (see `Known._unwritten`)."""
    known = facts.handed or place in FILLED
    return known and entry.pieces is not None and entry.pieces.untouched


def _untouched_constant(value: Value) -> bool:
    return value.op is not None and value.op.facts.constant
