"""The recorder for fake tensors.

Problem: the recorder copies what it holds and compares versions, but a fake tensor has neither
bytes nor a version counter that matters; and some programs read the content of a tensor. Invariant:
the tape is the one that a real step would write; a question about content is answered from the real
tensors behind the fake ones, or the dry run is given up, never guessed. Imports the tape, replay,
standins, provenance. Rejected: a flag in the recorder, which would be tested at every operation.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import ChainMap
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from lowtide import _compat, engine
from lowtide._compat import fakes
from lowtide.dryrun.lengths import ctc_loss
from lowtide.dryrun.onehot import one_hot, only_checks
from lowtide.dryrun.products import matmul
from lowtide.dryrun.provenance import UnansweredError, copied, evaluate
from lowtide.dryrun.standins import StandIns
from lowtide.memory.filled import Filled
from lowtide.replay import as_dtype
from lowtide.step import Recording, current_recorder
from lowtide.tape.known import Entry
from lowtide.tape.operators import facts_of
from lowtide.tape.recorder import Recorder
from lowtide.tape.tape import Tape
from lowtide.tape.values import Handle, Kept, Value
from lowtide.tape.writes import Behind

# What these keep for their backward has no size on fake tensors.
_SHAPELESS = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})
# What this makes has another dtype there, so that `dequantize` makes nothing.
_SHAPELESS |= {"aten::quantize_per_tensor"}


# Makes a tensor of Python's numbers part of the program.
_LIFTS = torch.ops.aten.lift_fresh.default

_COUNTER = 4096
"""Bytes of what is followed when the program writes it, to tell what is in it then."""

# These add something at their end (a mask to scores, a bias to a non-contiguous result) in place,
# but out of place under a dispatch mode and on fake tensors.
_ADDING = ("scaled_dot_product_attention", "linear")
# These call the second of them without its name. They also add other things, out of place.
_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
# These read what is in the tensors of a list, past all modes and without an operator.
_FROM_LISTS = ("tensor", "as_tensor")
# Of a fake tensor; what is written `@` is the second.
_PRODUCTS = ("matmul", "__matmul__")


class Adding:
    """Context manager: tracks, per thread, whether one of these functions is running.

    The compiled recorder is not a mode: a step that it records adds in place, so the dry run must
    too. `one_hot`, `matmul` and `ctc_loss` are replaced as well (`lowtide.dryrun.onehot`,
    `.products`, `.lengths`), and what makes a tensor of a list (`_of_contents`). Not a
    `TorchFunctionMode`, which misses the calls that multi-head attention makes inside.
    """

    _lock = threading.Lock()
    # By owner and name: the usual function (None: that of a base class), and ours.
    _usual: ClassVar[dict[tuple[Any, str], tuple[Any, Any]]] = {}
    _open = 0
    _inside = threading.local()

    def __enter__(self) -> Adding:
        with Adding._lock:
            if not Adding._open:
                for name in _ADDING:
                    usual = getattr(functional, name)
                    Adding._usual[functional, name] = usual, Adding._told(usual, "all")
                for kind in _RECURRENT:
                    Adding._usual[kind, "forward"] = (
                        kind.forward,
                        Adding._told(kind.forward, "biases"),
                    )
                usual = functional.one_hot
                Adding._usual[functional, "one_hot"] = usual, one_hot(usual)
                Adding._usual[torch, "matmul"] = torch.matmul, matmul(torch.matmul)
                fake = fakes.fake_type()
                for name in _PRODUCTS:
                    Adding._usual[fake, name] = None, matmul(getattr(fake, name))
                Adding._usual[torch, "ctc_loss"] = torch.ctc_loss, ctc_loss(torch.ctc_loss, _known)
                fakes.constructors_known()
                for name in _FROM_LISTS:
                    usual = getattr(torch, name)
                    Adding._usual[torch, name] = usual, _of_contents(usual)
                for (owner, name), (_, ours) in Adding._usual.items():
                    setattr(owner, name, ours)
            Adding._open += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with Adding._lock:
            Adding._open -= 1
            if not Adding._open:
                for (owner, name), (usual, ours) in Adding._usual.items():
                    if getattr(owner, name) is not ours:  # the step has put its own there
                        continue
                    if usual is None:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, usual)

    @staticmethod
    def _told(usual: Any, what: str) -> Any:
        @functools.wraps(usual)
        def call(*args: Any, **kwargs: Any) -> Any:
            # One may call another: a tensor subclass whose `linear` is several of them. What
            # `vmap` and the like make of an operator adds to a third tensor; so do derivatives.
            around = getattr(Adding._inside, "now", "")
            derived = _compat.in_functorch() or _compat.in_forward_mode()
            Adding._inside.now = "" if derived else what
            try:
                return usual(*args, **kwargs)
            finally:
                Adding._inside.now = around

        return call

    @property
    def in_place(self) -> bool:
        """Whether any addition seen now will be in place in the recorded step."""
        return getattr(Adding._inside, "now", "") == "all" and engine.name() == "compiled"

    def adds_bias(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether this addition, if it is seen now, adds a bias inside a recurrent layer, which
        will be in place in the recorded step."""
        inside = getattr(Adding._inside, "now", "") == "biases" and engine.name() == "compiled"
        return inside and other.dim() == 1 < one.dim()


class FakeRecorder(Recorder):
    """Records fake tensors: holds them by aliases made under the modes, and never copies."""

    stand: StandIns
    adding: Adding

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._real: dict[Value, torch.Tensor] = {}
        # Of what was overwritten since, as long as anything may be made of it.
        self._before = weakref.WeakKeyDictionary[Value, torch.Tensor]()
        self._showing: list[bool] = []  # for each number being formatted: whether it is known
        self._gradients = Filled()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if fakes.asks_for_device(func):
            return args[0].fake_device
        if self._inside:
            return _compat.called(func, args, kwargs or {})
        if _compat.schema_of(func).name in _SHAPELESS:
            raise NotImplementedError(f"torch does not know the memory of {func} from shapes")
        if func is torch.ops.aten.add.Tensor and (
            self.adding.in_place or self.adding.adds_bias(*args[:2])
        ):
            func = torch.ops.aten.add_.Tensor
        # A gradient step inside the forward: the compiled recorder is not a mode.
        filling = _compat.node_in_backward() is not None and engine.name() == "compiled"
        if filling:
            func, args = self._gradients.as_recorded(func, args)
        moved = self._moved(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if filling:
            self._gradients.ran(func, result)
        if moved is not None:
            entry = self.entry_of(args[0])
            if entry is not None:
                self._real[self.value_in(entry)] = moved
        if func is _LIFTS and fakes.is_fake(result) and not fakes.is_fake(args[0]):
            self.stand.stands_for(result, args[0])
        return result

    def _is_here(self, device: torch.device, made: bool) -> bool:
        return True  # each stands for one with memory

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor | None:
        """What was made outside (a counter) and is about to be written, as it is afterwards: a copy
        of its whole storage. None: nothing is, or its new content is not known. Larger ones are not
        followed, as it counts as a read, for which a step would copy what is then written."""
        facts = facts_of(func)
        if facts.writes != (0,) or facts.random or kwargs or not isinstance(args[0], torch.Tensor):
            return None
        entry = self.entry_of(args[0])
        if entry is None or entry.pieces is not None or entry.nbytes > _COUNTER:
            return None
        value = self.value_in(entry)
        if value.op is not None or value not in self._real or self._real[value].requires_grad:
            return None
        try:
            others = [self._real_argument(a) for a in args[1:]]
        except UnansweredError:
            return None
        ref = self._reference(args[0])
        if ref is None or ref.value is not value:
            return None
        before = self._real[value]
        with _compat.below_autograd(), _compat.no_overrides(), torch.no_grad():
            copy = copied(before)
            func(ref.of(copy), *others)
        return copy

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator that needs the content of fake tensors on the real ones behind them."""
        if kwargs:
            raise UnansweredError(f"{func} asks for what is in a tensor")
        try:
            real = [self._real_argument(a) for a in args]
        except UnansweredError:
            if self._showing:
                self._showing[-1] = False
            elif not only_checks():
                raise
            return 0
        with _compat.below_autograd(), _compat.no_overrides(), torch.no_grad():
            result = func(*real)
        return self.stand.made(result)

    def _real_argument(self, argument: Any) -> Any:
        """An argument with real tensors in place of fake ones, whose data a kernel must not read:
        it has none. Indices come in a list."""
        if isinstance(argument, torch.Tensor):
            return self.real(argument)
        if isinstance(argument, tuple | list):
            return [self._real_argument(item) for item in argument]
        return argument

    def text(self, fake: torch.Tensor, how: str) -> str:
        """A fake tensor in an f-string (often the message of a check that holds). A real one reads
        the number in it, which is an operation of the step; of one that is not known, the tensor
        is shown."""
        if fake.dim() or isinstance(fake, nn.Parameter):
            return object.__format__(fake, how)
        self._showing.append(True)
        try:
            number = fake.detach().item()
        finally:
            known = self._showing.pop()
        return format(number, how) if known else repr(fake)

    def contents(self, data: Any) -> Any:
        """Nested lists with the contents of the fake tensors in them."""
        if isinstance(data, list | tuple):
            return [self.contents(item) for item in data]
        return self.real(data) if fakes.is_fake(data) else data

    def real(self, fake: torch.Tensor) -> torch.Tensor:
        """The content of a fake tensor as a real one, see `lowtide.dryrun.provenance`."""
        ref = self._reference(fake)
        if ref is None or ref.value is None:
            raise UnansweredError("it asks for the content of a tensor that nobody recorded")
        base = evaluate(ref.value, ChainMap(self._real, self._before))
        with _compat.below_autograd(), _compat.no_overrides():
            return ref.of(base)

    def _enter(self, storage: Any, op: Any, version: int) -> Entry:
        entry = super()._enter(storage, op, version)
        if op is None:  # what `answer` made with an operator that is not recorded can be asked too
            real = self.stand.behind(storage)
            if real is not None and entry.value is not None:
                self._real[entry.value] = real
        return entry

    def _uncounted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # nothing reads the counters of fake tensors

    def _overwriting(self, entry: Entry, hidden: bool) -> None:
        """An external that a replay may read is copied before it is written, as in a step."""
        super()._overwriting(entry, hidden)
        value = entry.value or (entry.weak() if entry.weak is not None else None)
        held = None if value is None or hidden or value.op is not None else value.held
        if value is None or held is None or not (value.read and value.intact()):
            return
        with _compat.under_modes(), torch.no_grad():
            whole = held.new_empty(entry.nbytes // held.element_size())
            value.held = whole.as_strided(held.shape, held.stride(), held.storage_offset())
        value.version = _compat.version_of(value.held)
        if value in self._real:
            self._before[value] = self._real.pop(value)

    def _follow_live(self, unnoticed: Behind, entry: Entry, before: tuple[int, bool]) -> None:
        """As nothing is watched here, what can be replayed is still held. In a step its memory was
        about to be written and it is not (`watch.overwriting`), so that autograd goes on with the
        new content alone: with both, the gates of a recurrent cell would not let go of it."""
        if unnoticed.handles and unnoticed.saved is not None and unnoticed.saved.op is not None:
            unnoticed.saved.held = None
        super()._follow_live(unnoticed, entry, before)

    def _kept(self, tensor: torch.Tensor) -> Any:
        if _compat.has_own_dispatch(type(tensor)):
            return super()._kept(tensor)
        with _compat.under_modes():  # below them, an alias is a tensor of the device "meta"
            return Kept(tensor.detach())

    def _hold(self, entry: Entry, value: Value, tensor: torch.Tensor) -> None:
        with _compat.under_modes():
            value.held = tensor.detach()
        value.version = _compat.version_of(value.held)
        if value.keep:
            value.settle()
        entry.weak = weakref.ref(value)
        entry.value = None


def _of_contents(usual: Any) -> Any:
    """This function, which makes a tensor of nested lists, for fake tensors in them."""

    @functools.wraps(usual)
    def call(data: Any, *args: Any, **kwargs: Any) -> Any:
        data = _known(data) if isinstance(data, list | tuple) else data
        return usual(data, *args, **kwargs)

    return call


def _known(fake: Any) -> Any:
    """What is in a fake tensor."""
    recorder = current_recorder()
    return recorder.contents(fake) if isinstance(recorder, FakeRecorder) else fake


def _given(packed: Any) -> Any:
    """The unpack hook of a dry run, in which everything saved is held."""
    if not isinstance(packed, Handle):
        return packed.tensor
    value, ref = packed.value, packed.ref
    packed.tape.decisions.requested(packed)
    base = value.held
    if base is None:
        raise RuntimeError("backward needs a tensor that was overwritten in place")
    packed.tape.decisions.answered(value, base)
    base = as_dtype(base, ref)
    if base.shape == ref.size and ref.fits(base):
        return base
    return torch.as_strided(base, ref.size, ref.stride, ref.offset)


FakeRecorder.unpack = staticmethod(_given)


class FakeRecording(Recording):
    __slots__ = ()
    new_recorder = FakeRecorder
