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
from lowtide.tape.values import Handle, Operation, Ref, Value, common_region, flatten
from lowtide.tape.watch import hold, overwriting, watch

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# mypy cannot see that calling `weakref.ref` on a slotted class is typed
_weak_value: Callable[[Value], weakref.ref[Value]] = weakref.ref


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
        self.paused = False  # a backward runs inside the recording
        self._lazy_bits = False  # some tensor is lazily conjugated or negated
        self.table: dict[int, Entry] = {}
        self.timed = tape.timed
        self.cuda = _compat.cuda_in_use()
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
        if facts.view or self.paused:
            if facts.lazy_bits:
                self._lazy_bits = True
            return func(*args, **kwargs)
        if facts.opaque or (types and any(map(_compat.has_own_dispatch, types))):
            return self._run_unrecorded(facts, func, args, kwargs)
        if torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        return self._run_recorded(facts, func, args, kwargs)

    def _run_recorded(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        refs: list[Ref] = []
        statistics = hidden_statistics(facts, args) if facts.statistics is not None else ()
        written = self._written(facts, args, kwargs, statistics)
        template = list(args)
        known = self._encode(template, range(len(template)), refs, statistics)
        named = kwargs
        if kwargs:
            named = dict(kwargs)
            known = self._encode(named, list(named), refs, ()) and known
        through = self._write_refs(facts, written, refs, bool(statistics)) if known else None
        op: Operation | None = None
        if through is not None:
            op = Operation(facts, template, named, refs, self.sequence)
            self.sequence += 1
            op.grad_mode = torch.is_grad_enabled()
            if facts.random:
                op.draws = states_before(args, kwargs)
            if facts.ambient:
                op.ambient = self._ambient()
            if self.cuda:
                op.stream = _compat.stream_of(args)
        for entry, _ in written:
            overwriting(entry.key)
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
        for entry, _ in written:
            overwriting(entry.key)
        result = func(*args, **kwargs)
        for entry, _ in written:
            self._rewritten(None, None, entry, [])
        self._register(None, result, [])
        return result

    # ------------------------------------------------------------------ inputs

    def _encode(
        self, into: Any, places: Any, refs: list[Ref], statistics: tuple[int, ...]
    ) -> bool:
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

    def _reference(self, tensor: Tensor) -> Ref | None:
        entry = self.entry_of(tensor)
        if entry is None or (self._lazy_bits and needs_care(tensor)):
            return None
        value = entry.value
        if value is None:
            value = self.value_in(entry)
        value.read = True
        if value.held is None and (value.op is None or value.keep):
            self._hold(entry, value, tensor)
        if value.op is not None and value.region is not self.region:
            self._crossing(value)
        return Ref(value, tensor)

    def _hold(self, entry: Entry, value: Value, tensor: Tensor) -> None:
        hold(value, tensor)
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
        if common is not self.region and (
            value.scope is None or common.depth < value.scope.depth
        ):
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
        for place, tensor in enumerate(flat):
            if not isinstance(tensor, Tensor):
                continue
            if type(tensor) not in _PLAIN and _compat.has_own_dispatch(type(tensor)):
                continue
            try:
                storage = tensor.untyped_storage()
                version = _compat.version_of(tensor)
            except (NotImplementedError, RuntimeError):
                continue  # no storage, or an inference tensor: an external if it is ever read
            if storage._cdata in self.table:
                continue  # an alias of something known: its geometry is all there is to it
            value = self._value_of(self._enter(storage, op, version))
            if op is not None:
                op.outputs.append((place, _weak_value(value)))
                made.append(value)

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
        for weak in old.saves:
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
    def _value_of(entry: Entry) -> Value:
        assert entry.value is not None
        return entry.value

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
        value.name = label
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
        with _compat.disable_dispatch():
            entry = self.entry_of(tensor)
            if entry is None or (self._lazy_bits and needs_care(tensor)):
                return tensor.detach()
            value = self.value_in(entry)
            if value.op is not None:
                if _untouched_constant(value):
                    value.op = None  # a foreign kernel may have filled it
                elif value.scope is None or self.region.depth < value.scope.depth:
                    value.scope = self.region
            if value.held is None and (
                value.op is None or value.keep or self.decisions.saved(value, self.region)
            ):
                self._hold(entry, value, tensor)
            handle = Handle(Ref(value, tensor), self.region, self.tape, self.sequence)
            value.saves.append(weakref.ref(handle))
            self.decisions.packed(handle, value)
            return handle


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
    if not facts.name.endswith("with_update"):
        if len(args) <= training or not args[training]:
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
