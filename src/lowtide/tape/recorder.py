"""The recorder: writes down the operations of a forward, below autograd, as they run.

Problem: to run an operation again one needs to know exactly which content of which storage it
read. Invariant: a value that cannot be replayed is held or refused, never guessed (rule 5). User
code runs once (rule 2): the recorder calls each operator exactly once and returns that call's
result. Imports handed, operators, generators. Rejected: recording above autograd, where one call
may be many operations, and autograd saves results of the inner ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide._compat import switches
from lowtide.policies import OperationInfo, keeps
from lowtide.tape import bodies, trials
from lowtide.tape.generators import alone, copy_to_draw_from, given, put
from lowtide.tape.handed import Handed
from lowtide.tape.known import Entry
from lowtide.tape.operators import FACTS, Facts, facts_of, hidden_statistics
from lowtide.tape.pieces import Pieces
from lowtide.tape.retry import called_with_room
from lowtide.tape.sharded import is_freed
from lowtide.tape.streams import put_on, read_unrecorded
from lowtide.tape.values import Operation, RareOperation, Ref, Value, tensors_in
from lowtide.tape.writes import Behind

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

Tensor = torch.Tensor
_STRIDED = torch.strided


class Recorder(Handed, _compat.Mode):
    """A dispatch mode that records onto one tape. Open on one thread, for one forward."""

    _among_others = False  # a mode around this one may change what every operator returns

    def __init__(self, tape: Tape) -> None:
        _compat.Mode.__init__(self)
        self._wholes = []
        self.begin(tape)

    def __enter__(self) -> Recorder:
        self._thread = threading.get_ident()
        self._among_others = _compat.modes_of_users()
        self.takes_apart = not self._among_others  # those modes would not see the wrapper's call
        _compat.put_on_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop, though modes may have been entered since that are not left yet: by a forked
        process, or by a program that leaves contexts in another order."""
        _compat.take_off_mode(self)

    def begin(self, tape: Tape) -> None:
        """Record onto this tape, as if nothing had been recorded before."""
        Handed.__init__(self, tape)
        self.timed = tape.timed
        self.accelerated = _compat.accelerator_in_use()
        self.before: Callable[[Facts, Any, Any, Any], None] | None = None  # called before each call
        # Called before each call that is not recorded, and after it.
        self.kept: Callable[[Facts, Any, Any, bool], None] | None = None
        self.draws = self.drawn = None
        self._switches = ()

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        if kwargs is None:
            kwargs = {}
        if self._inside and not facts.handed:
            return _compat.called(func, args, kwargs)
        if self._elsewhere():  # what it makes is known to nobody, and kept
            return _compat.called(func, args, kwargs)
        if types and self.takes_apart and any(map(_compat.is_wrapper, types)):
            # The operations that the wrapper runs on its parts are dispatched here in turn.
            self.know_wholes(args, kwargs)
            return NotImplemented
        if self._newest is not None and is_freed(self._newest):
            self._look_for_freed()
        if facts.view or self.paused:
            if facts.lazy_bits:
                self._lazy_bits = True
            if facts.statistics is not None:
                self._statistics_move(facts, args)
            if self.paused and facts.writes:
                self._written_in_backward(facts, args, kwargs)
            result = _compat.called(func, args, kwargs)
            if self.paused and not facts.view and not facts.writes:
                self._register(None, result, [])  # only its bytes are counted
            return result
        if (
            facts.opaque
            or self._gathering
            or self.next_step is not None
            or self._among_others
            or (types and any(map(_compat.has_own_dispatch, types)))
            or torch.is_inference_mode_enabled()
        ):
            return self._run_unrecorded(facts, func, args, kwargs)
        if facts.simple and not self.accelerated:
            return self._run_simple(facts, func, args, kwargs)
        return self._run_recorded(facts, func, args, kwargs)

    def _tries_out(self, args: tuple[Any, ...]) -> bool:
        """Whether cuDNN tries kernels out for this convolution, or has done so before, so that it
        is not replayed."""
        if not (trials.seen or switches.tries_kernels_out()):
            return False
        if not (args and switches.may_run_cudnn(args[0])):
            return False
        if not trials.seen:
            trials.begin()
        return True

    def _run_simple(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`_run_recorded` for operators that only read and make tensors, which most calls are."""
        refs: list[Ref] = []
        template, named = list(args), dict(kwargs) if kwargs else kwargs
        region = self.region
        if not self._encode_simple(template, named, refs):
            if self.timed and self.before is not None:
                self.before(facts, func, args, kwargs)
            result = _compat.called(func, args, kwargs)
            self._register(None, result, [])
            return result
        kind = RareOperation if self.timed else Operation
        op = kind(facts, template, named, refs, self.sequence, torch.is_grad_enabled(),
                  self._ambient() if facts.ambient else None)  # fmt: skip
        if self.before is not None:
            self.before(facts, func, args, kwargs)
        if isinstance(op, RareOperation):
            op.casting = _compat.casting_now()
            start = time.perf_counter()
            result = _compat.called(func, args, kwargs)
            op.seconds = time.perf_counter() - start
        else:
            result = _compat.called(func, args, kwargs)
        self.sequence += 1  # only now: a call that raises is not an operation of the step
        made: list[Value] = []
        self._register(op, result, made)
        if self._asks or region.policy is not None:
            self.decisions.produced(op, made, region, args, kwargs)
        return result

    def _encode_simple(self, template: list[Any], named: dict[str, Any], refs: list[Ref]) -> bool:
        """`_encode` for all arguments of a call, with a short way for what the tape has made."""
        table, region = self.table, self.region
        known = True
        for place, argument in enumerate(template):
            kind = type(argument)
            if kind is Tensor and argument.layout is _STRIDED and not argument.is_nested:
                storage = argument.untyped_storage()
                entry = table.get(_compat.storage_id(storage))
                value = None
                if entry is not None and entry() is storage:  # see `_find`
                    value = entry.value
                    if value is None and entry.weak is not None:
                        value = entry.weak()
                ref: Ref | None
                if (
                    entry is not None
                    and value is not None
                    and value.op is not None
                    and not value.keep
                    and value.region is region
                    and entry.version == _compat.version_of(argument)
                    and storage.resizable()  # see `_given_out`
                    and entry.pieces is None
                    and entry.counted  # not there before, see `_needs_care`
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
        return (not named or self._encode(named, list(named), refs, ())) and known

    def _run_recorded(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        statistics = hidden_statistics(facts, args) if facts.statistics is not None else ()
        written = self._written(facts, args, kwargs, statistics)
        op, through = self._operation(facts, args, kwargs, written, statistics)
        if self.accelerated and op is not None:
            put_on(op, args, kwargs)
        elif self.accelerated:
            read_unrecorded(self, args, kwargs)
        if facts.chunks:
            self._know_counter(args[0])
        behind = self._behind(facts, written, args, kwargs, statistics)
        for entry, place in written:
            if place != facts.fills_saved:
                hidden = place in statistics and place not in facts.writes
                hidden = hidden or facts.unversioned or _of_external(behind.get(entry.key))
                self._overwriting(entry, hidden)
        if self.before is not None and (facts.makes or not written):
            self.before(facts, func, args, kwargs)
        try:
            if op is None or not self.accelerated:
                result = self.call(op, func, args, kwargs)
            else:
                result = called_with_room(self, op, func, args, kwargs, written, statistics)
        except BaseException:
            self._raised(written)
            raise
        if op is not None:
            self.sequence += 1
        made: list[Value] = []
        filled = self._wrote(op, through, facts, kwargs, written, behind, made)
        self._register(op, result, made)
        if facts.tried_out and self._tries_out(args):
            for value in made:
                value.op = None  # for decisions it was recorded, for replays it was not
        if facts.blank or facts.constant:
            self._know_blank(result, facts.constant)
        if op is not None:
            self.decisions.produced(op, made, self.region, args, kwargs)
            if filled is not None and facts.fills_saved is not None:
                self._saved_before(filled, args[facts.fills_saved])
        return result

    def _wrote(
        self,
        op: RareOperation | None,
        through: dict[int, Ref] | None,
        facts: Facts,
        kwargs: dict[str, Any],
        written: list[tuple[Entry, int | str]],
        behind: dict[int, Behind],
        made: list[Value],
    ) -> Entry | None:
        """Give each storage that a call wrote its new value; and the one, if any, whose memory it
        filled for a result that autograd had saved before."""
        filled: Entry | None = None
        for entry, place in written:
            old = self.value_in(entry) if place == facts.fills_saved else None
            version = entry.version, entry.loose
            self._rewritten(op, self._through(through, entry, place, kwargs), entry, made)
            unnoticed = behind.get(entry.key)
            if unnoticed is not None:
                self._follow_live(unnoticed, entry, version)
            elif old is not None:
                self._rebind(old, self.value_in(entry))
                filled = entry
        return filled

    def _know_blank(self, result: Any, constant: bool) -> None:
        """Memory was allocated and not initialized, or with a constant that is not recorded."""
        entry = self.entry_of(result) if isinstance(result, Tensor) else None
        if entry is not None and self.value_in(entry).op is None:
            entry.pieces, entry.constant = Pieces.of(result), constant

    def call(self, op: RareOperation | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and time it if the tape is timed."""
        own = None
        if op is not None and op.draws and not alone():
            own = copy_to_draw_from(op)
        if op is None or own is None:
            return self._call(op, func, args, kwargs)
        args, kwargs = given(op, own, args, kwargs)
        try:
            return self._call(op, op.facts.with_generator, args, kwargs)
        finally:  # a call that raises may have drawn before
            put(op.draws[0][0], own)

    def _call(self, op: RareOperation | None, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.timed or op is None:
            return _compat.called(func, args, kwargs)
        stream = op.stream
        if stream is not None:
            stream.synchronize()
        start = time.perf_counter()
        result = _compat.called(func, args, kwargs)
        if stream is not None:
            stream.synchronize()
        op.seconds = time.perf_counter() - start
        return result

    def _raised(self, written: Iterable[tuple[Entry, int | str]]) -> None:
        """A call that raises may have written a part already, which cannot be replayed."""
        for entry, _ in written:
            self._rewritten(None, None, entry, [])

    def _run_unrecorded(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run what is never replayed (rule 5): the values it writes and makes have no operation."""
        written = self._written(facts, args, kwargs, ())
        if facts.name.startswith(("c10d::", "_c10d")):  # their schemas do not declare all writes
            found = (self.entry_of(tensor) for tensor in tensors_in(args, kwargs))
            written = list({e.key: (e, 0) for e in found if e is not None}.values())
        elif facts.writes:
            written += self._written_inside(args, kwargs)
        if facts.statistics is not None:
            self._statistics_move(facts, args)
        self._fsdp_may_begin(facts.name, args)
        fills = self._fsdp_fills(facts.name)
        behind = self._behind(facts, written, args, kwargs, ()) if written and not fills else {}
        for entry, _ in () if fills else written:
            hidden = facts.unversioned or _of_external(behind.get(entry.key))
            self._overwriting(entry, hidden)
        if self.accelerated:
            read_unrecorded(self, args, kwargs)
        if self.kept is not None:
            self.kept(facts, args, kwargs, False)
        if facts.has_bodies:
            args, kwargs = bodies.watched(facts.name, args, kwargs)
        try:
            result = _compat.called(func, args, kwargs)
        except BaseException:
            self._raised(written)
            raise
        if facts.has_bodies:
            bodies.refuse_no_tuple(facts.name, args, kwargs, result)
        for entry, _ in written:
            version = entry.version, entry.loose
            self._rewritten(None, None, entry, [])
            unnoticed = behind.get(entry.key)
            if unnoticed is not None:
                self._follow_live(unnoticed, entry, version)
        self._fsdp_may_end(facts.name, args, written)
        self._register(None, result, [])
        if self.kept is not None:
            self.kept(facts, args, kwargs, True)
        return result

    def name(self, tensor: Tensor, label: str) -> None:
        """Name the value in a tensor's storage, and ask the policy again."""
        entry = self.entry_of(tensor)
        if entry is None:
            return
        value = self.value_in(entry)
        policy = self.region.policy
        # Not a policy of torch's, which is asked at the call and knows no names.
        if callable(policy) and value.op is not None and not value.keep:
            facts = value.op.facts
            value.keep = keeps(policy, OperationInfo(facts.name, facts.func, value.nbytes, label))
            if value.keep and value.held is None and value.saved:
                with _compat.disable_dispatch():
                    self._hold(entry, value, tensor)

    def sees_calls(self) -> bool:
        """Whether operators that are called here and now would come to this recorder: not inside
        of one, nor of what is handed to it."""
        return not self._inside and _compat.is_on(self)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that was not dispatched here."""
        types = {type(tensor) for tensor in tensors_in(args, kwargs)}
        return Recorder.__torch_dispatch__(self, func, types, args, kwargs)

    def pause(self, failed: Callable[[], None] | None = None) -> None:
        """A backward begins inside the recording. The table forgets its values, as through that of
        the loss it would keep every value that the loss was made from. It keeps the entries, which
        count the bytes of storages while they live."""
        self.paused, self.failed = True, failed
        for entry in list(self.table.values()):  # a copy: freed storages leave the table meanwhile
            entry.value = entry.pieces = None

    def over(self, next_step: Callable[[], None]) -> None:
        """That backward has ended. Nothing is recorded until the next step begins."""
        self.paused, self.failed = False, None
        self.next_step = next_step

    def close(self) -> None:
        """Forget the table; values live on as long as handles need them."""
        self.writes_were_seen()
        self._wholes = []
        self.table.clear()


def _of_external(unnoticed: Behind | None) -> bool:
    """Whether autograd goes on with the new content of what the tape did not make."""
    saved = None if unnoticed is None or not unnoticed.handles else unnoticed.saved
    return saved is not None and saved.op is None
