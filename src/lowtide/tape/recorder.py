"""The recorder: watches a forward run, below autograd, and writes it down.

Problem: to run an operation again one needs to know exactly which content of which storage it
read. Invariant: the table maps every live storage to the one `Value` that is in it now; whatever
writes a storage, seen or unseen (told by autograd's version counter), gives it a new value, and a
value that nobody can make again is either held or refused, never guessed (rules 4, 5, 6). User
code runs once (rule 2): the recorder calls each operator exactly once and hands back its own
result. Imports values, operators, generators. Rejected: identifying tensors by Python object,
which autograd replaces by fresh aliases.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.policies import OperationInfo, Policy
from lowtide.tape.generators import states_before
from lowtide.tape.operators import _FACTS, Facts, facts_of
from lowtide.tape.values import (
    Handle,
    Kept,
    Operation,
    RareOperation,
    Ref,
    Value,
    common_region,
    flatten,
)
from lowtide.tape.watch import hold, overwriting, watch

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

Tensor = torch.Tensor
_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# mypy cannot see that calling `weakref.ref` on a slotted class is typed
_weak_value: Callable[[Value], weakref.ref[Value]] = weakref.ref

_weak_handle: Callable[[Handle], weakref.ref[Handle]] = weakref.ref


class Entry(weakref.ref):  # type: ignore[type-arg]
    """What is in one live storage now. Dies, and leaves the table, with the storage.

    `value` is the link while nothing else needs the value; once the value holds an alias of this
    very storage the link must be weak (`weak`), or table and alias would keep each other alive.
    """

    __slots__ = ("counted", "key", "loose", "nbytes", "value", "version", "weak")

    key: int
    value: Value | None
    weak: weakref.ref[Value] | None
    version: int
    loose: bool  # autograd may or may not add one to the version after this write
    nbytes: int
    counted: int  # bytes that this recording allocated for it: 0 if it was there before


class Recorder(_compat.Mode):
    """A dispatch mode that records onto one tape. Open on one thread, for one forward."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.region = tape.root
        self.sequence = 0
        self.numbers = 0
        self.decisions = tape.decisions
        self._switches: tuple[object, ...] = ()
        self.before: Callable[[Facts, Any, Any, Any], None] | None = None  # told of each call
        self.drawn: Callable[[], None] | None = None  # told when a random state was read
        self.paused = False  # a backward runs inside the recording
        self._lazy_bits = False  # some tensor is lazily conjugated or negated
        self.table: dict[int, Entry] = {}
        self.timed = tape.timed
        self.cuda = _compat.cuda_in_use()
        self._careful = self.timed or self.cuda
        self._asks = tape.decisions.asks
        self._read: dict[int, Entry] | None = None  # externals read since FSDP2 last freed some
        self._group = 0  # the operation at which it did
        self.live = [0]
        table, live = self.table, self.live

        def forget(entry: Any) -> None:
            if table.pop(entry.key, None) is not None:
                live[0] -= entry.counted

        self._forget = forget

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        facts = _FACTS.get(func) or facts_of(func)
        if kwargs is None:
            kwargs = {}
        if self._read is not None:
            self._look_for_freed(self._read)
        if facts.view or self.paused:
            if facts.lazy_bits:
                self._lazy_bits = True
            return func(*args, **kwargs)
        if facts.opaque or (types and any(map(_compat.has_own_dispatch, types))):
            return self._run_unrecorded(facts, func, args, kwargs)
        if torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        if facts.simple and not self._careful:
            return self._run_simple(facts, func, args, kwargs)
        return self._run_recorded(facts, func, args, kwargs)

    def _run_simple(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `_run_recorded`, for operators that only read and make tensors: most calls."""
        refs: list[Ref] = []
        template = list(args)
        table, region = self.table, self.region
        known = True
        for place, argument in enumerate(args):
            kind = type(argument)
            if kind is Tensor and argument.layout is _STRIDED:
                entry = table.get(argument.untyped_storage()._cdata)
                value = entry.value if entry is not None else None
                ref: Ref | None
                if (
                    entry is not None
                    and value is not None
                    and value.op is not None
                    and not value.keep
                    and value.region is region
                    and entry.version == _compat.version_of(argument)
                    and not self._lazy_bits
                ):
                    ref = Ref(value, argument)
                else:
                    ref = self._reference(argument)
                if ref is None:
                    known = False
                else:
                    template[place] = ref
                    refs.append(ref)
            elif kind is list or isinstance(argument, Tensor):
                known = self._encode(template, (place,), refs, ()) and known
        if kwargs:
            named = dict(kwargs)
            known = self._encode(named, list(named), refs, ()) and known
        else:
            named = kwargs
        if not known:
            result = func(*args, **kwargs)
            self._register(None, result, [])
            return result
        op = Operation(facts, template, named, refs, self.sequence, torch.is_grad_enabled(),
                       self._ambient() if facts.ambient else None)  # fmt: skip
        self.sequence += 1
        if self.before is not None:
            self.before(facts, func, args, kwargs)
        result = func(*args, **kwargs)
        made: list[Value] = []
        self._register(op, result, made)
        if self._asks or region.policy is not None:
            self.decisions.produced(op, made, region, args, kwargs)
        return result

    def _run_recorded(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        refs: list[Ref] = []
        statistics = hidden_statistics(facts, args) if facts.statistics is not None else ()
        written = self._written(facts, args, kwargs, statistics)
        template = list(args)
        if facts.statistics is not None and not statistics:
            self._freeze(template, facts.statistics[:2], refs)
        known = self._encode(template, range(len(template)), refs, statistics)
        named = kwargs
        if kwargs:
            named = dict(kwargs)
            known = self._encode(named, list(named), refs, ()) and known
        through = self._write_refs(facts, written, refs, bool(statistics)) if known else None
        op: RareOperation | None = None
        if through is not None:
            op = RareOperation(facts, template, named, refs, self.sequence,
                               torch.is_grad_enabled(),
                               self._ambient() if facts.ambient else None)  # fmt: skip
            self.sequence += 1
            if facts.random:
                op.draws = states_before(args, kwargs)
                if self.drawn is not None:
                    self.drawn()
            if self.cuda:
                op.stream = _compat.stream_of(args)
        for entry, place in written:
            if place != facts.fills_saved:
                overwriting(entry.key)
        if self.before is not None and not written:
            self.before(facts, func, args, kwargs)
        if self.timed and op is not None:
            start = time.perf_counter()
            result = func(*args, **kwargs)
            op.seconds = time.perf_counter() - start
        else:
            result = func(*args, **kwargs)
        made: list[Value] = []
        for entry, place in written:
            old = self.value_in(entry) if place == facts.fills_saved else None
            self._rewritten(op, through.get(entry.key) if through else None, entry, made)
            if old is not None:
                self._rebind(old, entry)
        self._register(op, result, made)
        if op is not None:
            self.decisions.produced(op, made, self.region, args, kwargs)
        return result

    def _ambient(self) -> tuple[object, ...]:
        """The global switches; equal ones are one object, which a replay compares at no cost."""
        state = _compat.ambient()
        if state != self._switches:
            self._switches = state
        return self._switches

    def _run_unrecorded(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run what is never replayed (rule 5); what it writes and makes has no producer."""
        written = self._written(facts, args, kwargs, ())
        if facts.name.startswith(("c10d::", "_c10d")):  # writes without saying so
            found = (self.entry_of(tensor) for tensor in tensors_in(args, kwargs))
            written = list({e.key: (e, 0) for e in found if e is not None}.values())
        elif facts.writes:
            written += self._written_inside(args, kwargs)
        if self._read is None and facts.name.startswith("fsdp::"):
            self._read = {}
        for entry, _ in written:
            overwriting(entry.key)
        result = func(*args, **kwargs)
        for entry, _ in written:
            self._rewritten(None, None, entry, [])
        self._register(None, result, [])
        return result

    def _written_inside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Entry, int | str]]:
        """Plain tensors inside subclasses (the local part of a DTensor), which may share memory
        with recorded ones: a write to the subclass reaches them without a change of version."""
        found: dict[int, tuple[Entry, int | str]] = {}
        for tensor in tensors_in(args, kwargs):
            for inner in _compat.inner_tensors(tensor):
                entry = self.entry_of(inner)
                if entry is not None:
                    found[entry.key] = (entry, 0)
        return list(found.values())

    def _look_for_freed(self, read: dict[int, Entry]) -> None:
        """Whether FSDP2 has freed parameters that were read: the end of a module it shards.

        They are there again in that module's own backward. What leaves the module is needed before
        that, when it cannot be replayed, so it is kept as soon as something reads it (rule 5).
        """
        for entry in read.values():
            storage = entry()
            if storage is not None and storage.nbytes() < entry.nbytes:
                break
        else:
            return
        read.clear()
        self._group = self.sequence
        for entry in list(self.table.values()):
            value = entry.value or (entry.weak() if entry.weak is not None else None)
            if value is not None:
                value.keep = True  # so that no reader takes a shorter way past the check

    # ------------------------------------------------------------------ inputs

    def _encode(self, into: Any, places: Any, refs: list[Ref], statistics: tuple[int, ...]) -> bool:
        """Replace tensors by refs; False if some tensor cannot be named on this tape."""
        known = True
        for place in places:
            argument = into[place]
            if isinstance(argument, Tensor):
                if place in statistics:
                    into[place] = self._scratch(argument)
                    continue
                ref = self._reference(argument)
                if ref is None:
                    known = False
                else:
                    into[place] = ref
                    refs.append(ref)
            elif isinstance(argument, list | tuple) and any(
                isinstance(a, Tensor) for a in argument
            ):
                items = list(argument)
                known = self._encode(items, range(len(items)), refs, ()) and known
                into[place] = items
        return known

    def _freeze(self, into: list[Any], places: tuple[int, ...], refs: list[Ref]) -> None:
        """Read running statistics from a copy: they move without a change of version (rule 4).

        What autograd itself saves of them stays the live buffer, as in the plain step.
        """
        for place in places:
            if isinstance(into[place], Tensor) and self.entry_of(into[place]) is not None:
                copied = into[place].clone()
                value = Value(None, copied.untyped_storage().nbytes(), self.region)
                value.held, value.version = copied, _compat.version_of(copied)
                into[place] = Ref(value, copied)
                refs.append(into[place])

    def _reference(self, tensor: Tensor) -> Ref | None:
        entry = self.entry_of(tensor)
        if entry is None or (self._lazy_bits and needs_care(tensor)):
            return None
        value = entry.value
        if value is None:
            value = self.value_in(entry)
        if value.op is not None and value.op.sequence < self._group:
            value.op = None  # see `_look_for_freed`
        if value.op is None:
            value.read = True
            if value.held is None:
                self._hold(entry, value, tensor)
            if self._read is not None:
                self._read[entry.key] = entry
            return Ref(value, tensor)
        if value.keep and value.held is None:
            self._hold(entry, value, tensor)
        if value.region is not self.region:
            self._crossing(value)
        return Ref(value, tensor)

    def _hold(self, entry: Entry, value: Value, tensor: Tensor) -> None:
        hold(value, tensor)
        if value.keep:
            value.settle()
        entry.weak = weakref.ref(value)
        entry.value = None
        watch(entry.key, value)

    def value_in(self, entry: Entry) -> Value:
        """The value in a storage; a fresh external where the old record has gone."""
        value = entry.value
        if value is None:
            value = entry.weak() if entry.weak is not None else None
            if value is None:
                value = entry.value = Value(None, entry.nbytes, self.region)
        return value

    def _crossing(self, value: Value) -> None:
        """`value` goes from one region into another: their common region needs it (rule 9)."""
        common = common_region(value.region, self.region)
        if common is not self.region and (value.scope is None or common.depth < value.scope.depth):
            value.scope = common

    def entry_of(self, tensor: Tensor) -> Entry | None:
        """What is in the tensor's storage now; None for tensors without one."""
        if type(tensor) not in _PLAIN and _compat.has_own_dispatch(type(tensor)):
            return None
        try:
            storage = tensor.untyped_storage()
            version = _compat.version_of(tensor)
        except (NotImplementedError, RuntimeError):
            return None  # opaque, sparse, or an inference tensor
        entry = self.table.get(storage._cdata)
        if entry is None:
            entry = self._enter(storage, None, version)
            self.live[0] -= entry.counted
            entry.counted = 0
            self._lazy_bits = self._lazy_bits or needs_care(tensor)
        elif entry.version != version:
            if not (entry.loose and version == entry.version - 1):
                # Written by something the dispatcher did not see: nobody can make it again.
                entry.value = Value(None, entry.nbytes, self.region)
            entry.version = version
            entry.loose = False
        return entry

    # ------------------------------------------------------------------ writes

    def _written(
        self,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statistics: tuple[int, ...],
    ) -> list[tuple[Entry, int | str]]:
        """What the call is about to write, each storage once, and through which argument."""
        places = facts.writes if not statistics else (*facts.writes, *statistics)
        if not places:
            return []
        found: dict[int, tuple[Entry, int | str]] = {}
        for place in places:
            if isinstance(place, str):
                argument = kwargs.get(place)
            else:
                argument = args[place] if place < len(args) else None
            for tensor in flatten(argument):
                if isinstance(tensor, Tensor):
                    entry = self.entry_of(tensor)
                    if entry is not None:
                        found.setdefault(entry.key, (entry, place))
        return list(found.values())

    def _write_refs(
        self,
        facts: Facts,
        written: list[tuple[Entry, int | str]],
        refs: list[Ref],
        statistics: bool,
    ) -> dict[int, Ref] | None:
        """The ref through which each storage is written, by key; None: cannot be replayed.

        Refs of memory that the operation overwrites entirely lose their value: what was there
        does not matter.
        """
        if facts.blank or (facts.constant and not torch.is_grad_enabled()):
            return None
        through: dict[int, Ref] = {}
        if not written or statistics:
            return through
        for entry, place in written:
            value = self.value_in(entry)
            found = [ref for ref in refs if ref.value is value]
            if not found:
                return None
            if place in facts.fills and len(found) == 1 and covers(found[0], entry.nbytes):
                found[0].make_blank(entry.nbytes, self._device(entry))
            elif value.op is None or (_untouched_constant(value) and not facts.placing):
                return None
            through[entry.key] = found[0]
        return through

    # ------------------------------------------------------------------ outputs

    def _register(self, op: Operation | None, result: Any, made: list[Value]) -> None:
        flat = (result,) if isinstance(result, Tensor) else flatten(result)
        table = self.table
        place = 0
        for tensor in flat:
            plain = type(tensor) is Tensor
            if plain or (isinstance(tensor, Tensor) and not _compat.has_own_dispatch(type(tensor))):
                try:
                    storage = tensor.untyped_storage()
                    version = _compat.version_of(tensor)
                except (NotImplementedError, RuntimeError):
                    place += 1
                    continue  # no storage, or an inference tensor: an external if it is ever read
                # What is in the table is an alias of something known: all there is is its geometry.
                if storage._cdata not in table:
                    value = self._enter(storage, op, version).value
                    if op is not None and value is not None:
                        op.outputs.append((place, _weak_value(value)))
                        made.append(value)
            place += 1

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
        value = Value(op if through is not None else None, entry.nbytes, self.region)
        entry.value = value
        entry.version += 1
        entry.loose = True
        if op is not None and through is not None:
            op.writes.append((through, _weak_value(value)))
            value.number = self.numbers
            self.numbers += 1
            made.append(value)

    @staticmethod
    def _device(entry: Entry) -> torch.device:
        storage = entry()
        assert storage is not None
        device: torch.device = storage.device
        return device

    @staticmethod
    def _rebind(old: Value, entry: Entry) -> None:
        """Handles that autograd made before the call mean the content after it."""
        new = entry.value
        assert new is not None
        new.saves = new.saves or []
        for weak in old.saves or ():
            handle = weak()
            if handle is not None:
                handle.ref.value = new
                new.saves.append(weak)
        new.scope = old.scope or new.region
        if new.op is None:
            new.held, new.version = old.held, old.version

    def _enter(self, storage: Any, op: Operation | None, version: int) -> Entry:
        entry = Entry(storage, self._forget)
        entry.key = storage._cdata
        entry.version = version
        entry.loose = False
        entry.weak = None
        entry.nbytes = entry.counted = storage.nbytes()
        self.live[0] += entry.counted
        value = Value(op, entry.nbytes, self.region)
        if op is not None:
            value.number = self.numbers
            self.numbers += 1
        entry.value = value
        self.table[entry.key] = entry
        return entry

    @staticmethod
    def _scratch(statistic: Tensor) -> Ref:
        """Memory in place of running statistics: a replay must not move the real ones."""
        ref = Ref(None, statistic)
        ref.make_blank(statistic.untyped_storage().nbytes(), statistic.device)
        return ref

    def name(self, tensor: Tensor, label: str) -> None:
        """Name the value in a tensor's storage, and ask the policy again."""
        entry = self.entry_of(tensor)
        if entry is None:
            return
        value = self.value_in(entry)
        policy = self.region.policy
        if isinstance(policy, Policy) and value.op is not None and not value.keep:
            facts = value.op.facts
            value.keep = policy(OperationInfo(facts.name, facts.func, value.nbytes, label))
            if value.keep and value.held is None and value.saves:
                with _compat.disable_dispatch():
                    self._hold(entry, value, tensor)

    def pause(self) -> None:
        """A backward begins inside the recording. What is known is forgotten, for a table that
        leads to the loss would keep every value that the loss was made from."""
        self.paused = True
        self.table.clear()

    def close(self) -> None:
        """Forget the table; values live on as long as handles need them.

        `live[0]`: bytes of the storages that were made in this recording and are still there.
        """
        self.table.clear()

    # ------------------------------------------------------------------ autograd

    def adopt(self, value: Value, tensor: Tensor) -> None:
        """A replay inside the forward (a gradient penalty) gave `value` a new storage."""
        storage = tensor.untyped_storage()
        entry = self.table.get(storage._cdata)
        if entry is None:
            entry = self._enter(storage, None, 0)
            entry.value, entry.weak = None, weakref.ref(value)

    def pack(self, tensor: Tensor) -> Any:
        """Saved-tensor hook: a handle in place of the tensor."""
        entry = self.entry_of(tensor)
        if entry is None or (self._lazy_bits and needs_care(tensor)):
            return self._kept(tensor)
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
        handle = Handle(Ref(value, tensor), region, self.tape, self.sequence)
        if value.saves is None:
            value.saves = [_weak_handle(handle)]
        else:
            value.saves.append(_weak_handle(handle))
        if self._asks:
            self.decisions.packed(handle, value)
        return handle

    @staticmethod
    def _kept(tensor: Tensor) -> Kept:
        if _compat.has_own_dispatch(type(tensor)):  # its own detach keeps it what it is
            return Kept(_compat.detached_alias(tensor))
        with _compat.disable_dispatch():
            return Kept(tensor.detach())


def needs_care(tensor: Tensor) -> bool:
    """Lazy conjugation and negation are not in a storage: such a tensor is kept as it is."""
    return (tensor.is_complex() and tensor.is_conj()) or tensor.is_neg()


def covers(ref: Ref, nbytes: int) -> bool:
    """Whether a view is the whole of a storage, each element once."""
    count = 1
    dims = sorted((st, n) for n, st in zip(ref.size, ref.stride, strict=True) if n != 1)
    for stride, n in dims:
        if stride != count:
            return False
        count *= n
    return ref.offset == 0 and count * ref.dtype.itemsize == nbytes


def _untouched_constant(value: Value) -> bool:
    return value.op is not None and value.op.facts.constant


def hidden_statistics(facts: Facts, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of running statistics that this call updates and a replay leaves alone."""
    assert facts.statistics is not None
    mean, var, training = facts.statistics
    always = facts.name.endswith("with_update")
    if not always and (len(args) <= training or not args[training]):
        return ()
    return (mean, var) if isinstance(args[mean], Tensor) else ()


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(t for t in flatten(argument) if isinstance(t, Tensor))
    return found
