"""What is known about the storages of a recording.

Problem: autograd and user code hand over tensors, but the tape knows values. Invariant: an entry is
found by its storage's identity and leaves the table with the storage; every write, recorded or
noticed by autograd's version counter, gives the storage a new value (rules 4 and 6). Imports
values, pieces and watch. Rejected: identifying tensors by Python object, which autograd replaces by
fresh aliases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.tape.pieces import Pieces
from lowtide.tape.regions import common_region
from lowtide.tape.values import Kept, Operation, Ref, Value, tensors_in
from lowtide.tape.watch import PLAIN, hold, overwriting, watch

if TYPE_CHECKING:
    from lowtide.tape.tape import Decisions, Tape

Tensor = torch.Tensor
# mypy cannot see that calling `weakref.ref` on a slotted class is typed
weak_value: Callable[[Value], weakref.ref[Value]] = weakref.ref


class Entry(weakref.ref):  # type: ignore[type-arg]
    """What is in one live storage now. Dies, and leaves the table, with the storage.

    `value` owns the value at first. Once the value holds an alias of this very storage, the
    reference must be weak (`weak`), or the table would keep the storage alive through it.
    """

    __slots__ = (
        "constant", "counted", "counter", "given_out", "key", "loose", "nbytes", "pieces", "value",
        "version", "weak",
    )  # fmt: skip

    key: int
    value: Value | None
    weak: weakref.ref[Value] | None
    version: int
    loose: bool  # autograd may or may not add one to the version after this write
    nbytes: int
    counter: Any  # the version counter of what autograd saved of it, where no alias shows it
    counted: int  # bytes that this recording allocated for it: 0 if it was there before
    given_out: bool  # see `Known._given_out`
    pieces: Pieces | None  # uninitialized memory: what the record has written of it
    constant: bool  # that memory was filled with a constant, which is not recorded


class Known:
    """The table of one recording: every live storage, and the value that is in it now.

    Attributes:
        wrapper_met: called when a wrapper subclass is met; set by `lowtide.engine`.
    """

    wrapper_met: Callable[[], None]
    _wholes: list[Kept]
    # The compiled recorder has its own.
    new_value: Callable[..., Value] = Value
    decisions: Decisions
    _asks: bool  # whether the decisions want to be asked
    new_entry: Callable[..., Entry] = Entry
    new_table: Callable[[], dict[int, Entry]] = dict
    new_counter: Callable[[Tensor], _compat.Counter] = _compat.Counter

    def __init__(self, tape: Tape) -> None:
        self.region = tape.root
        where = tape.decisions.where
        self.counts = None if where is None else where.counts
        self.settle = None if where is None else where.settle
        self.sequence = 0  # operations recorded so far
        self.numbers = 0  # values numbered so far
        self._lazy_bits = False  # some tensor was lazily conjugated or negated here
        self.table: dict[int, Entry] = self.new_table()
        self.live, self._forget = self.new_count(self.table)

    @staticmethod
    def new_count(table: dict[int, Entry]) -> tuple[list[int], Callable[[Any], None]]:
        """The bytes of storages that were made in this recording and are alive, in a list of one;
        and what an entry calls when its storage is freed."""
        live = [0]

        def forget(entry: Any) -> None:
            if table.pop(entry.key, None) is not None:
                live[0] -= entry.counted

        return live, forget

    def _find(self, storage: Any) -> Entry | None:
        """The entry of a storage, if it is known.

        An interrupt that arrives as `_forget` begins is swallowed by Python, and the entry stays in
        the table. Another storage may get the same identity later.
        """
        entry = self.table.get(_compat.storage_id(storage))
        if entry is not None and entry() is not storage:
            self._forget(entry)
            return None
        return entry

    def entry_of(self, tensor: Tensor) -> Entry | None:
        """What is in the tensor's storage now; None for tensors without one."""
        if type(tensor) not in PLAIN and _compat.has_own_dispatch(type(tensor)):
            return None
        if tensor.is_nested:
            return None  # its geometry is more than a size and strides
        try:
            storage = tensor.untyped_storage()
            version = _compat.version_of(tensor)
        except (NotImplementedError, RuntimeError):
            return None  # opaque, sparse, or an inference tensor
        entry = self._find(storage)
        if entry is None:
            entry = self._enter(storage, None, version)
            self.live[0] -= entry.counted
            entry.counted = 0
        elif entry.version != version and not self._other_counter(entry, tensor):
            if not (entry.loose and version == entry.version - 1):
                # Written by something that the recorder did not see: it cannot be replayed.
                entry.value = self.new_value(None, entry.nbytes, self.region)
                entry.pieces = None
            entry.version = version
            entry.loose = False
        elif not storage.resizable():
            self._given_out(entry, tensor)
        return entry

    def _given_out(self, entry: Entry, tensor: Tensor) -> None:
        """NumPy or another process shares memory that was made here: torch then does not resize it,
        and a write to it moves no version.

        Backward uses whatever it finds there of what autograd has saved, as in the plain step. What
        was made from it so far is replayed from the record of its old content; what is made from it
        from now on is kept (rule 5).
        """
        if self.value_in(entry).op is not None:
            entry.given_out = True
            self._as_external(entry, tensor)

    def _unwritten(self, entry: Entry, tensor: Tensor) -> None:
        """Uninitialized memory is read that the record has not written: something unseen may have
        filled it, so its present content is an external's (rule 5)."""
        entry.pieces = None
        if self.value_in(entry).op is not None:
            self._as_external(entry, tensor)

    def _as_external(self, entry: Entry, tensor: Tensor) -> None:
        """What is in a storage is a value that no replay makes, from now on. Handles mean it."""
        old = self.value_in(entry)
        new = entry.value = self.new_value(None, entry.nbytes, self.region)
        entry.weak = None
        handles = old.handles()
        old.hand_over(new)
        if old.held is not None:
            self.decisions.forgotten(old)
            old.held = None
        if not handles:
            return
        new.scope = old.scope or self.region
        with _compat.disable_dispatch():
            self._hold(entry, new, tensor)
        if self._asks:
            for handle in handles:
                self.decisions.packed(handle, new)

    def know_wholes(self, args: Any, kwargs: Any) -> None:
        """Wrappers are about to be used: a write to one changes the content of its parts."""
        self.wrapper_met()
        for tensor in tensors_in(args, kwargs):
            if _compat.is_wrapper(type(tensor)):
                self._know_whole(tensor, (tensor,))

    def keep_parts(self, tensor: Tensor) -> None:
        """A wrapper is kept whole: to make what it consists of again would take it twice."""
        for part in _compat.inner_tensors(tensor):
            if _compat.is_wrapper(type(part)):
                self.keep_parts(part)
                continue
            entry = self.entry_of(part)
            value = None if entry is None else self.value_in(entry)
            if entry is not None and value is not None and value.op is not None:
                self._as_external(entry, part)

    def _know_whole(self, tensor: Tensor, wholes: tuple[Tensor, ...]) -> None:
        for part in _compat.inner_tensors(tensor):
            if _compat.is_wrapper(type(part)):
                self._know_whole(part, (*wholes, part))
                continue
            entry = self.entry_of(part)
            value = None if entry is None else self.value_in(entry)
            if entry is None or value is None or value.op is not None:
                continue  # it was recorded, and can be replayed
            if value.wholes is None:
                value.wholes = entry.key, []
            for whole in wholes:
                self._count_writes(value.wholes[1], whole)

    @staticmethod
    def _know_counters(entry: Entry, value: Value, tensor: Tensor) -> None:
        """An external that is held is read or saved again, through a tensor that may have another
        version counter: `.data` has one of its own, and so has each piece of a flat buffer that was
        made by `.data = flat[a:b]`. A write that moves only that one changes the value too."""
        held = value.held
        if held is None or _compat.shares_counter(held, tensor):
            return
        if _compat.storage_id(held.untyped_storage()) != entry.key:
            return  # a copy
        if value.wholes is None:
            value.wholes = entry.key, []
        known = value.wholes[1]
        place = int(tensor.storage_offset())
        for kept in known:
            if kept.place == place and _compat.shares_counter(kept.tensor, tensor):
                return
        # Without the memory: what a budget watches counts who has it besides the tape.
        known.append(Kept(_compat.with_counter_of(tensor), place))

    def _count_writes(self, known: list[Kept], whole: Tensor) -> None:
        for kept in known:
            if _compat.shares_counter(kept.tensor, whole):
                return
        counted = _compat.hollow(whole)
        kept = Kept(_compat.detached_alias(whole) if counted is None else counted)
        known.append(kept)
        self._wholes.append(kept)

    def writes_were_seen(self) -> None:
        """All writes that moved versions of wrappers so far were recorded, part by part."""
        for kept in self._wholes:
            kept.renew()

    def _needs_care(self, entry: Entry, tensor: Tensor) -> bool:
        """Whether a tensor is lazily conjugated or negated: a storage does not show that, so it is
        kept. Where the storage was there before, such a view of it may have been there too."""
        if entry.counted and not self._lazy_bits:
            return False
        return is_lazy(tensor)

    def value_in(self, entry: Entry) -> Value:
        """The value in a storage; a fresh external where the old value is gone."""
        value = entry.value
        if value is None:
            value = entry.weak() if entry.weak is not None else None
            if value is None:
                value = entry.value = self.new_value(None, entry.nbytes, self.region)
        return value

    def _enter(self, storage: Any, op: Operation | None, version: int) -> Entry:
        entry = self.new_entry(storage, self._forget)
        entry.key = _compat.storage_id(storage)
        entry.version = version
        entry.loose = entry.given_out = entry.constant = False
        entry.weak = entry.counter = entry.pieces = None
        entry.nbytes = storage.nbytes()
        here = self._is_here(storage.device, op is not None)
        entry.counted = entry.nbytes if here else 0
        self.live[0] += entry.counted
        value = self.new_value(op, entry.nbytes if here or op is None else 0, self.region)
        if op is not None:
            value.number = self.numbers
            self.numbers += 1
        entry.value = value
        self.table[entry.key] = entry
        return entry

    def _is_here(self, device: torch.device, made: bool) -> bool:
        """Whether bytes on a device count towards the limit."""
        if device.type == "meta":
            return not self._asks  # a policy may ask for the bytes that there would be
        if self.counts is None and self.settle is None:
            return True
        if self.settle is not None and made and device.type != "cpu":
            self.settle(device)
            self.counts, self.settle = device, None
        return self.counts is None or self.counts == device

    def _hold(self, entry: Entry, value: Value, tensor: Tensor) -> None:
        hold(value, tensor)
        # A buffer may move again: then it is made once more. What is elsewhere has no bytes.
        if value.keep and (entry.counted or not value.nbytes):
            value.settle()
        entry.weak = weakref.ref(value)
        entry.value = None
        watch(entry.key, value)

    def let_go(self, value: Value) -> None:
        """Drop a recorded value. If the program still has its storage, the table owns the value
        again: else the next operation that reads the storage would take it for an external."""
        held, value.held = value.held, None
        if held is None:
            return
        entry = self.table.get(_compat.storage_id(held.untyped_storage()))
        if entry is None:
            return
        self._keep_counter(entry, held)
        if entry.value is not None:  # written since
            return
        if entry.weak is not None and entry.weak() is value:
            entry.value, entry.weak = value, None

    def _keep_counter(self, entry: Entry, held: Tensor) -> None:
        """What autograd has saved of a storage is about to be dropped: note its version counter."""
        if entry.counter is None and _compat.storage_key(held) == entry.key:
            entry.counter = self.new_counter(held)

    def _overwriting(self, entry: Entry, hidden: bool) -> None:
        """A call is about to write a storage; see `watch.overwriting`."""
        value = entry.value or (entry.weak() if entry.weak is not None else None)
        if value is not None and value.held is not None:
            self._keep_counter(entry, value.held)
        overwriting(entry.key, hidden)

    def adopt(self, value: Value, tensor: Tensor) -> None:
        """A replay inside the forward (for a gradient penalty) gave `value` a new storage."""
        storage = tensor.untyped_storage()
        entry = self._find(storage)
        if entry is None:
            entry = self._enter(storage, None, 0)
            entry.value, entry.weak = None, weakref.ref(value)

    def _rewritten(
        self, op: Operation | None, through: Ref | None, entry: Entry, made: list[Value]
    ) -> None:
        """A storage has new content."""
        storage = entry()
        if storage is not None and storage.nbytes() != entry.nbytes:  # an out= that was resized
            entry.nbytes = storage.nbytes()
            if entry.counted:
                self.live[0] += entry.nbytes - entry.counted
                entry.counted = entry.nbytes
        if entry.pieces is not None:
            known = op is not None and through is not None
            entry.pieces = entry.pieces.after(through) if known else None
        maker = op if through is not None else None
        here = maker is None or self._is_here(self._device(entry), made=False)
        value = self.new_value(maker, entry.nbytes if here else 0, self.region)
        entry.value = value
        entry.version += 1
        entry.loose = True
        if op is not None and through is not None:
            op.writes.append((through, weak_value(value)))
            value.number = self.numbers
            self.numbers += 1
            made.append(value)

    @staticmethod
    def _other_counter(entry: Entry, tensor: Tensor) -> bool:
        """Whether a tensor is known to have another version counter than what autograd saved."""
        if entry.counter is not None:
            return not entry.counter.shares(tensor)
        value = entry.value or (entry.weak() if entry.weak is not None else None)
        held = value.held if value is not None else None
        if held is None or _compat.storage_id(held.untyped_storage()) != entry.key:
            return False
        return not _compat.shares_counter(held, tensor)

    def _know_counter(self, tensor: Tensor) -> None:
        """Note a tensor's counter before it is split into chunks with counters of their own."""
        entry = self.entry_of(tensor)
        if entry is not None and entry.counter is None:
            entry.counter = self.new_counter(tensor)

    @staticmethod
    def _device(entry: Entry) -> torch.device:
        storage = entry()
        assert storage is not None
        device: torch.device = storage.device
        return device

    def _crossing(self, value: Value) -> None:
        """Another region reads `value`: the innermost region around both needs it (rule 9)."""
        common = common_region(value.region, self.region)
        if common is not self.region and (value.scope is None or common.depth < value.scope.depth):
            value.scope = common


def is_lazy(tensor: Tensor) -> bool:
    """Whether it is lazily conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()
