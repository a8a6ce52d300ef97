"""How the arguments and results of an operation are written down.

Problem: a replay must find exactly what an operation read, which may be a view, running statistics
or something that no tape can represent. Invariant: each tensor among the arguments becomes a `Ref`
to one content of one storage, or the call is not recorded; each new storage among the results
becomes a value. Imports saves, operators and values. Rejected: doing this in the recorder, which
decides what to do with each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import switches
from lowtide.tape.generators import states_before
from lowtide.tape.known import Entry, is_lazy, weak_value
from lowtide.tape.operators import Facts
from lowtide.tape.regions import Region
from lowtide.tape.saves import Saves
from lowtide.tape.values import Operation, RareOperation, Ref, Value, flatten
from lowtide.tape.writes import FILLED, reads_moved

Tensor = torch.Tensor

_MUCH = 16  # times what a call changes, at least, is what it reads, see `_moves_state`
_NO_REGION = Region(None, None)


class Encoding(Saves):
    """The part of a recorder that writes arguments and results down."""

    _filled: tuple[Tensor, ...] = ()  # arguments that the call overwrites, whatever was in them
    _beyond = False  # the call may read all of the memory that an argument is a part of
    _switches: tuple[object, ...] = ()
    draws: Callable[[], None] | None = None  # called before a random state is read
    drawn: Callable[[], None] | None = None  # called when it was read

    # ------------------------------------------------------------------ operations

    def _operation(
        self,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[tuple[Entry, int | str]],
        statistics: tuple[int, ...],
    ) -> tuple[RareOperation | None, dict[int, Ref] | None]:
        """The record of a call, and the references through which it writes; None of one that cannot
        be replayed."""
        moved = self._moves_state(facts, written, args)
        if not (moved or self._can_be_made(facts, written, args, bool(statistics))):
            return None, None
        if statistics and reads_moved(args, statistics):
            return None, None  # a replay moves scratch memory instead, and would read it unmoved
        refs: list[Ref] = []
        template = list(args)
        read = self._read_of(written) if written else []
        if facts.statistics is not None and not statistics:
            self._freeze(template, facts.statistics[:2])
        self._freeze(template, moved)
        named = self._encode_around(args, kwargs, facts, template, refs, statistics, written)
        through = None
        if named is not None:
            through = {} if moved else self._write_refs(facts, written, refs, bool(statistics))
        if named is None or through is None:
            if refs:
                self._not_read(written, read)
            return None, None
        draws: Any = ()
        if facts.random:
            if self.draws is not None:
                self.draws()
            draws = states_before(args, kwargs, any_of_them=facts.handed)
            if draws is None:
                return None, None
        ambient = self._ambient() if facts.ambient else None
        op = RareOperation(
            facts, template, named, refs, self.sequence, torch.is_grad_enabled(), ambient
        )
        op.draws = draws or ()
        op.casting = _compat.casting_now()
        op.writes.extend((template[place], nowhere()) for place in moved)
        if draws and self.drawn is not None:
            self.drawn()
        return op, through

    def _ambient(self) -> tuple[object, ...]:
        """The global switches; one object while they stay the same, which is fast to compare."""
        state = switches.ambient()
        if state != self._switches:
            self._switches = state
        return self._switches

    # ------------------------------------------------------------------ arguments

    def _encode(self, into: Any, places: Any, refs: list[Ref], statistics: tuple[int, ...]) -> bool:
        """Replace tensors by refs; False if the tape cannot represent one of them."""
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
            elif isinstance(argument, Ref):  # see `_freeze`
                refs.append(argument)
            elif isinstance(argument, list | tuple) and any(
                isinstance(a, Tensor) for a in argument
            ):
                items = list(argument)
                known = self._encode(items, range(len(items)), refs, ()) and known
                into[place] = items
        return known

    def _encode_around(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        facts: Facts,
        template: list[Any],
        refs: list[Ref],
        statistics: tuple[int, ...],
        written: list[tuple[Entry, int | str]],
    ) -> dict[str, Any] | None:
        """The same for a call that writes: its keyword arguments with refs, None if it cannot be
        represented. What it overwrites entirely it need not have written before; if it reads
        uninitialized memory that it also writes, it is not recorded."""
        before = [(entry, self.value_in(entry)) for entry, _ in written if entry.pieces is not None]
        named = dict(kwargs) if kwargs else kwargs
        if before:
            self._filled = _filled_by(facts, args, kwargs)
        self._beyond = facts.handed  # kernels get addresses
        try:
            known = self._encode(template, range(len(template)), refs, statistics)
            if kwargs and known:
                known = self._encode(named, list(named), refs, ())
        finally:
            self._filled, self._beyond = (), False
        known = known and all(self.value_in(entry) is value for entry, value in before)
        return named if known else None

    def _freeze(self, into: list[Any], places: tuple[int, ...]) -> None:
        """Read running statistics from a copy: they are written without a new version (rule 4).
        So is a state that the call itself is about to change.

        What autograd itself saves of them stays the live buffer, as in the plain step.
        """
        for place in places:
            if isinstance(into[place], Tensor) and self.entry_of(into[place]) is not None:
                copied = into[place].clone()
                value = self.new_value(None, copied.untyped_storage().nbytes(), self.region)
                value.held, value.version = copied, _compat.version_of(copied)
                into[place] = Ref(value, copied)

    def _moves_state(
        self, facts: Facts, written: list[tuple[Entry, int | str]], args: tuple[Any, ...]
    ) -> tuple[int, ...]:
        """The arguments that a call with results of its own changes on the way, if these are small
        beside what it reads: the range that a fake quantizer observes. A replay works on copies of
        what was in them. Empty: there are none, or they are no such arguments."""
        if not written or not facts.makes or facts.fills or facts.statistics is not None:
            return ()
        places = tuple([place for _, place in written if isinstance(place, int)])
        if len(places) < len(facts.writes):  # two in one storage, or given by keyword
            return ()
        moved = {entry.key: entry for entry, _ in written}
        if any(self.value_in(entry).op is not None for entry in moved.values()):
            return ()
        read = 0
        for place, argument in enumerate(args):
            if isinstance(argument, Tensor) and place not in places:
                entry = self.entry_of(argument)
                if entry is None or entry.key in moved:
                    return ()
                read += entry.nbytes
        small = _MUCH * sum(entry.nbytes for entry in moved.values()) <= read
        return places if small else ()

    @staticmethod
    def _scratch(statistic: Tensor) -> Ref:
        """Scratch memory for running statistics: a replay must not move the real ones."""
        ref = Ref(None, statistic)
        ref.make_blank(statistic.untyped_storage().nbytes(), statistic.device)
        return ref

    def _reference(self, tensor: Tensor) -> Ref | None:
        entry = self.entry_of(tensor)
        if entry is None or entry.given_out or self._needs_care(entry, tensor):
            return None
        if entry.pieces is not None:
            filled = any(tensor is each for each in self._filled)
            if filled and entry.pieces.untouched:
                return Ref(self.value_in(entry), tensor)  # see `_write_refs`
            if not filled and (self._beyond or not entry.pieces.cover(tensor)):
                self._unwritten(entry, tensor)
        value = entry.value
        if value is None:
            value = self.value_in(entry)
        if value.op is not None and value.op.sequence < self._group:
            value.op = None  # see `_look_for_freed`
        if value.op is None:
            value.read = True
            if value.held is None:
                self._hold(entry, value, tensor)
            else:
                self._know_counters(entry, value, tensor)
            self._may_be_freed(entry)
            return Ref(value, tensor)
        if not entry.counted:  # a parameter that was filled in the recording
            self._may_be_freed(entry)
        if value.keep and value.held is None:
            self._hold(entry, value, tensor)
        if value.region is not self.region:
            self._crossing(value)
        return Ref(value, tensor)

    # ------------------------------------------------------------------ outputs

    def _register(self, op: Operation | None, result: Any, made: list[Value]) -> None:
        flat = (result,) if isinstance(result, Tensor) else flatten(result)
        place = 0
        for tensor in flat:
            plain = type(tensor) is Tensor and not tensor.is_nested
            if plain or (isinstance(tensor, Tensor) and _has_storage(tensor)):
                try:
                    storage = tensor.untyped_storage()
                    version = _compat.version_of(tensor)
                except (NotImplementedError, RuntimeError):
                    place += 1
                    continue  # no storage, or an inference tensor: an external if it is ever read
                # A storage that is in the table already: the result is an alias, and no value.
                if self._find(storage) is None:
                    value = self._enter(storage, op, version).value
                    if op is None:  # such as a custom operator
                        self._lazy_bits = self._lazy_bits or is_lazy(tensor)
                    elif value is not None:
                        op.outputs.append((place, weak_value(value)))
                        made.append(value)
            place += 1


def nowhere() -> weakref.ref[Value]:
    """In place of a value that an operation makes: nothing needs what a replay writes there."""
    return weak_value(Value(None, 0, _NO_REGION))


def _has_storage(tensor: Tensor) -> bool:
    return not _compat.has_own_dispatch(type(tensor)) and not tensor.is_nested


def _filled_by(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The arguments that a call overwrites entirely and does not read."""
    if facts.handed:  # each is given once
        return tuple([args[place] for place in facts.fills if isinstance(place, int)])
    place = next((place for place in FILLED if place in facts.fills), None)
    if place is None:
        return ()
    filled = args[0] if place == 0 else kwargs.get("out")
    others = args[1:] if place == 0 else args
    if not isinstance(filled, Tensor) or any(a is filled for a in others):
        return ()
    return (filled,)
