"""Values, operations and handles: the immutable-by-convention records of a tape.

Problem: storage is the unit of memory, yet one storage has different contents over time, and one
content is seen through many views. Invariant: a `Value` is one content of one storage; references
run handle -> value -> operation -> input values, never back, so reference counts alone decide how
long anything lives: when autograd drops its last handle, what only that handle needed is freed
(rule 8). Imports torch, regions and `_compat`. Rejected: a list of all operations, which keeps
everything until the step ends and leaks when a backward never comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from lowtide import _compat
from lowtide._compat.casting import Casting
from lowtide._compat.switches import flushes_denormals
from lowtide.tape.regions import Region

R = TypeVar("R", "Value", "Handle")


class Value:
    """One content of one storage.

    Attributes:
        op: the operation that makes it; None: an external, or held for good.
        nbytes: size of the storage in bytes.
        held: a tensor over a storage with this content, or None: the tape does not hold it.
        keep: hold it as soon as something needs it (decided when it was made).
        version: the version counter of `held` when its content was this value; set with `held`.
        read: an external that a recorded operation reads, so that a replay may need it.
        saved: whether autograd has saved it.
        region: where it was made; scope: the outermost region that needs it.
        home: the stream of an accelerator on which `held` was made, if `op` does not say.
        number: its place in the order of recording, -1 for externals.
        retain_from: the plan's decision, see `lowtide.planner`.
        wholes: for a part of wrapper subclasses: its storage's key, and the wrappers with their
            versions. A write to a wrapper moves only the wrapper's version. For an external that
            was read through tensors with versions of their own (`.data`, the pieces of a flat
            buffer): those tensors.
    """

    version: int

    __slots__ = (
        "__weakref__",
        "_handles",
        "held",
        "home",
        "keep",
        "nbytes",
        "number",
        "op",
        "read",
        "region",
        "retain_from",
        "scope",
        "version",
        "wholes",
    )

    def __init__(self, op: Operation | None, nbytes: int, region: Region) -> None:
        self.op = op
        self.nbytes = nbytes
        self.held: torch.Tensor | None = None
        self.home: torch.Stream | None = None
        self.keep = False
        self.read = False
        self._handles: list[weakref.ref[Handle]] | None = None
        self.region = region
        self.scope: Region | None = None
        self.number = -1
        self.retain_from = 0
        self.wholes: tuple[int, list[Kept]] | None = None

    def settle(self) -> None:
        """It stays held for good, so what it was made from need not be kept for it."""
        if self.op is not None:
            self.home = self.op.stream
        self.op = None
        self.read = True  # copied, not lost, should a recorded write reach it

    def intact(self) -> bool:
        """Whether `held` still has this content, as far as autograd's version counter tells.

        A storage that shrank was freed by something else (FSDP2 does that with parameters).
        """
        held = self.held
        assert held is not None
        now, then = versions(self)
        return now == then and held.untyped_storage().nbytes() >= self.nbytes

    @property
    def saved(self) -> bool:
        return self._handles is not None

    def handles(self) -> list[Handle]:
        """The handles on it that autograd still has."""
        return [handle for weak in self._handles or () if (handle := weak()) is not None]

    def pending(self) -> bool:
        """Whether autograd still has a handle on this value."""
        handles = self._handles
        if handles is None:
            return False
        if len(handles) == 1:
            return handles[0]() is not None
        return any(weak() is not None for weak in handles)

    def hand_over(self, to: Value, handles: list[Handle] | None = None) -> None:
        """Make autograd's handles on this value, or some of them, mean another one."""
        moved = self.handles() if handles is None else handles
        left = [] if handles is None else [one for one in self.handles() if one not in handles]
        self._handles = [_weak_handle(handle) for handle in left] or None  # none: never requested
        to._handles = to._handles or []
        for handle in moved:
            handle.ref.value = to
            to._handles.append(_weak_handle(handle))

    def add_handle(self, handle: Handle) -> None:
        if self._handles is None:
            self._handles = [_weak_handle(handle)]
        else:
            self._handles.append(_weak_handle(handle))


class Ref:
    """A tensor as (value, dtype, size, stride, offset): a view costs nothing.

    `value` None: memory that the operation overwrites entirely; `blank` is its (bytes, device).
    """

    __slots__ = ("blank", "dtype", "offset", "size", "stride", "value")

    def __init__(self, value: Value | None, tensor: torch.Tensor) -> None:
        self.value = value
        self.dtype = tensor.dtype
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.blank: tuple[int, torch.device] | None = None

    def make_blank(self, nbytes: int, device: torch.device) -> None:
        """Forget the value: a replay puts fresh memory of `nbytes` here."""
        self.value = None
        self.blank = (nbytes, device)

    def fits(self, base: torch.Tensor) -> bool:
        """Whether `base`, of the same size and dtype, is this very view."""
        return base.stride() == self.stride and base.storage_offset() == self.offset

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """This view of a tensor over the value's storage. Runs below autograd."""
        if (
            base.dtype == self.dtype
            and base.shape == self.size
            and base.stride() == self.stride
            and base.storage_offset() == self.offset
        ):
            return base
        if base.dtype == self.dtype:
            return torch.as_strided(base, self.size, self.stride, self.offset)
        fresh = torch.empty(0, dtype=self.dtype, device=base.device)
        return fresh.set_(base.untyped_storage(), self.offset, self.size, self.stride)


def versions(value: Value) -> tuple[int, int]:
    """The version of what is held, now and when its content was this value. If they are equal and
    it is part of a wrapper that was written (and no copy), those of the wrapper; if a piece of it
    was written, those of the piece."""
    held = value.held
    assert held is not None
    now: int = _compat.version_of(held)
    wholes = value.wholes
    if wholes is not None and now == value.version and wholes[0] == _compat.storage_key(held):
        version_of = _compat.version_of
        for whole in wholes[1]:  # not `intact`, as a flat buffer has thousands of pieces
            if whole.version >= 0 and version_of(whole.tensor) != whole.version:
                return version_of(whole.tensor), whole.version
    return now, value.version


class Operation:
    """One operator call, as it can be run again.

    Attributes:
        facts: of the operator.
        args, kwargs: its arguments, with a `Ref` in place of each tensor.
        refs: the same `Ref`s in a flat list.
        writes: (the ref written through, the value it becomes).
        outputs: (place in the flattened result, the value made).
        draws: (generator, the state it drew from) (rule 3).
        grad_mode: whether gradients were enabled; some kernels then compute what only backward
            needs.
        ambient: the global switches that it ran under, or None: it consults none (rule 5).
        default_dtype: when it ran; what operators make of integers depends on it.
        threads: how many it could use; where threads divide a tensor decides some bits.
        flushes: whether its thread flushed denormal numbers to zero.
        sequence: its place in the order of recording.
        seconds: how long it took, 0.0 where not measured.
        casting: what autocast did inside of it, or None (rule 5).
        stream: the stream of an accelerator on which it ran, or None.
    """

    __slots__ = (
        "ambient",
        "args",
        "default_dtype",
        "facts",
        "flushes",
        "grad_mode",
        "kwargs",
        "outputs",
        "refs",
        "sequence",
        "threads",
    )

    # Most operations have none of these; `RareOperation` has slots for them.
    writes: Any = ()
    draws: Any = ()
    casting: Any = None
    stream: Any = None
    seconds: float = 0.0

    def __init__(
        self,
        facts: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        refs: list[Ref],
        sequence: int,
        grad_mode: bool,
        ambient: tuple[object, ...] | None,
    ) -> None:
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.refs = refs
        self.sequence = sequence
        self.grad_mode = grad_mode
        self.ambient = ambient
        self.default_dtype = torch.get_default_dtype()
        self.threads = torch.get_num_threads()
        self.flushes = flushes_denormals()
        self.outputs: list[tuple[int, weakref.ref[Value]]] = []

    def values(self) -> list[Value]:
        """The values that a replay reads."""
        return [ref.value for ref in self.refs if ref.value is not None]

    def made(self) -> list[Value]:
        """The values still in use that a replay makes."""
        found = []
        for _, weak in (*self.outputs, *self.writes):
            value = weak()
            if value is not None:
                found.append(value)
        return found


class RareOperation(Operation):
    """An operation that writes or draws, runs on a stream or under autocast, or was timed."""

    __slots__ = ("casting", "draws", "seconds", "stream", "writes")

    writes: list[tuple[Ref, weakref.ref[Value]]]
    draws: Sequence[tuple[torch.Generator, torch.Generator | torch.Tensor]]
    casting: Casting | None
    stream: Any
    seconds: float

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.writes = []
        self.draws = ()
        self.casting = None
        self.stream = None
        self.seconds = 0.0


class Handle:
    """What autograd holds in place of a saved tensor.

    Attributes:
        counter: the tensor's version counter, if it is not the one that is known of its storage.
        asked_in: the last backward that retains its graph and has asked for it; see
            `tape/retained.py`.
    """

    __slots__ = ("__weakref__", "asked_in", "counter", "ref", "region", "sequence", "tape")

    def __init__(self, ref: Ref, region: Region, tape: Any, sequence: int) -> None:
        assert ref.value is not None
        self.ref = ref
        self.sequence = sequence
        self.region = region
        self.tape = tape
        self.counter: _compat.Counter | None = None
        self.asked_in = -1
        ref.value.add_handle(self)

    def __del__(self) -> None:
        recorder = self.tape.recorder
        if recorder is not None:  # a graph dies while the forward runs
            recorder.forgotten(self)

    @property
    def value(self) -> Value:
        value = self.ref.value
        assert value is not None
        return value


# mypy cannot see that calling `weakref.ref` on a slotted class is typed
_weak_handle: Callable[[Handle], weakref.ref[Handle]] = weakref.ref


class WeakList(Generic[R]):
    """Weak references to values, or to handles, in the order in which they were added."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: list[weakref.ref[R]] = []

    def append(self, record: R) -> None:
        self._links.append(weakref.ref(record))

    def alive(self) -> list[R]:
        return [record for link in self._links if (record := link()) is not None]

    def any(self) -> bool:
        """Whether one of them is alive."""
        return any(link() is not None for link in self._links)

    def beyond(self: WeakList[Handle], planned: frozenset[int]) -> bool:
        """Whether one of the handles is for a numbered value that is not in `planned`."""
        numbers = (handle.value.number for handle in self.alive())
        return any(number >= 0 and number not in planned for number in numbers)

    def numbered(self: WeakList[Handle]) -> int:
        """How many of the handles are for numbered values."""
        return sum(handle.value.number >= 0 for handle in self.alive())

    def settle(self) -> None:
        """Settle those of the values that are held."""
        for value in self.alive():
            assert isinstance(value, Value)
            if value.held is not None and value.op is not None:
                value.settle()

    def clear(self) -> None:
        self._links.clear()


class Kept:
    """What autograd holds of a tensor that the tape cannot represent: itself, and its version.

    Sparse and opaque tensors, lazily conjugated ones, and subclasses that do not say what they
    consist of.

    Attributes:
        place: where the tensor begins in its storage, if it has only the counter of a piece of one.
    """

    __slots__ = ("place", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, place: int = -1) -> None:
        self.tensor = tensor
        self.place = place
        self.renew()

    def renew(self) -> None:
        """Take its present content as the one that was saved."""
        tensor = self.tensor
        self.version: int = -1 if tensor.is_inference() else _compat.version_of(tensor)

    def intact(self) -> bool:
        return self.version < 0 or _compat.version_of(self.tensor) == self.version

    @property
    def counted(self) -> torch.Tensor:
        return self.tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


def flatten(result: Any) -> list[Any]:
    """The tensors of an operator's result, and what else is among them, in a stable order."""
    if isinstance(result, torch.Tensor):
        return [result]
    flat: list[Any] = []
    if isinstance(result, tuple | list):
        for item in result:
            if isinstance(item, tuple | list):
                flat.extend(item)
            else:
                flat.append(item)
    return flat


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments, including those in lists."""
    found: list[torch.Tensor] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(t for t in flatten(argument) if isinstance(t, torch.Tensor))
    return found


def tensors_at(
    place: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors of the argument at a position or with a keyword, if the call has that."""
    if isinstance(place, str):
        argument = kwargs.get(place)
    else:
        argument = args[place] if place < len(args) else None
    return [item for item in flatten(argument) if isinstance(item, torch.Tensor)]
