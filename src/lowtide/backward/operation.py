"""What the backward of one operation allocates, found by running it on tensors without memory.

Problem: a first step must stay inside its limit before any of its backward has been measured, and
estimates from sizes are too high: a `cat` gives its inputs views of its gradient, a ReLU's backward
makes one tensor and a pooling's three. Invariant: an operation is described by numbers, run once
forward and backward on the meta device, and its cost is remembered for all calls of the same
shapes; if that fails, the caller estimates from sizes. Imports layouts, shaping, counting, filled.
Rejected: factors by operator name, which have to be guessed for every operator; running it during
the recording, which is below autograd and has no backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lowtide import _compat
from lowtide._compat.switches import without_anomalies
from lowtide.kernels.layouts import runs_last
from lowtide.kernels.shaping import on_shapes, shaping, with_shapes
from lowtide.memory.counting import Counting, storage_keys
from lowtide.memory.filled import Filled
from lowtide.tape.operators import Facts, facts_of
from lowtide.tape.values import tensors_in

_REMEMBERED = 1 << 14  # calls


class Like(NamedTuple):
    """A tensor argument as numbers. A tuple, as one is made and hashed for every argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


class Call(NamedTuple):
    """An operation as numbers: equal ones cost the same.

    `used`: for each storage that it makes, in order, whether it gets a gradient; (): not known, so
    all are taken to. `last`: whether that of a convolution is laid out in memory as the result is,
    if this is channels-last.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    device: str
    used: tuple[bool, ...] = ()
    last: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one backward.

    Attributes:
        peak: the most bytes allocated since its start while it runs, including the gradients of
            its inputs.
        left: those that remain when it is over: the gradients of its inputs.
        given: for every tensor argument that requires grad, in order: whether its gradient is a
            view of that of the output (True), memory of its own (False), or None: it gets none.
        fresh: for the same: whether nothing else refers to the gradient's memory, so that another
            may be added to it in place.
        contiguous: for the same: whether the gradient is contiguous.
        astray: for those of them, counted from 0, whose gradient may be laid out in memory in
            another way than the argument: the bytes of the memory that it is in.
        in_order: for the same, where the output is transposed: whether the gradient is contiguous
            if that of the output is, as a sum may have made it.
        saved: for each storage that the operation made, in order, whether autograd saves it as a
            result of this operation.
    """

    peak: int
    left: int
    given: tuple[bool | None, ...]
    fresh: tuple[bool, ...]
    contiguous: tuple[bool, ...]
    saved: tuple[bool, ...]
    astray: tuple[tuple[int, int], ...] = ()
    in_order: tuple[bool, ...] = ()


def describe(facts: Facts, args: Any, kwargs: dict[str, Any], device: str) -> Call | None:
    """A call as numbers; None if it must not be run again or its arguments cannot be compared."""
    if facts.opaque or facts.foreign:
        return None
    call = Call(
        facts.func,
        tuple([_plain(a) for a in args]),
        tuple([(name, _plain(a)) for name, a in kwargs.items()]),
        device,
    )
    try:
        hash(call)
    except TypeError:
        return None
    return call


def _plain(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Like(
            tuple(argument.shape), argument.stride(), argument.dtype, argument.requires_grad
        )
    if isinstance(argument, list | tuple):
        return tuple([_plain(item) for item in argument])
    return None if isinstance(argument, torch.Generator) else argument


_known: dict[Call, Cost | None] = {}


def costs(calls: Iterable[Call]) -> dict[Call, Cost | None]:
    """What the backward of each call costs; None: it could not be run."""
    wanted = dict.fromkeys(calls)
    unknown = [call for call in wanted if call not in _known]
    if unknown:
        # A thread of its own has no dispatch modes, hooks, autocast or inference mode, and is not
        # inside a backward, as the caller may be.
        thread = threading.Thread(target=_run_all, args=(unknown,), name="lowtide-backward-costs")
        with without_anomalies():
            thread.start()
            thread.join()
    found = {call: _known.get(call) for call in wanted}
    while len(_known) > _REMEMBERED:
        _known.pop(next(iter(_known)), None)
    return found


def _run_all(calls: list[Call]) -> None:
    for call in calls:
        try:
            _known[call] = _run(call)
        except Exception:  # an operator may refuse with any error
            _known[call] = None


def _run(call: Call) -> Cost:
    wanted: list[torch.Tensor] = []
    build = functools.partial(_build, wanted, bool(facts_of(call.func).writes))
    args = [build(a) for a in call.args]
    kwargs = {name: build(a) for name, a in call.kwargs}
    if facts_of(call.func).places:  # the default is a real device: memory, and real draws
        kwargs["device"] = torch.device("meta")
    there = {} if facts_of(call.func).writes else storage_keys(tensors_in(tuple(args), kwargs))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(_noting(saved), _same), shaping(call.func):
        result = tensors_in((with_shapes(call.func)(*args, **kwargs),), {})
    packed = storage_keys(saved)
    own = [key for key in storage_keys(result) if key not in there]
    results = tuple(key in packed for key in own)
    known = call.used if len(call.used) == len(own) else (True,) * len(own)
    unused = {key for key, used in zip(own, known, strict=True) if not used}
    made = [t for t in result if t.requires_grad and unused.isdisjoint(storage_keys([t]))]
    if not made:
        none = (False,) * len(wanted)
        return Cost(0, 0, (None,) * len(wanted), none, none, results)
    saved.clear()
    gradients = [_gradient_of(t, call) for t in made]
    del args, kwargs, result
    straight = [g.contiguous() for g in gradients]  # as the mean of a result gives it
    turned = any(one is not g for one, g in zip(straight, gradients, strict=True))
    with _AsReal(call.device) as counting:
        found = torch.autograd.grad(made, wanted, gradients, turned, allow_unused=True)
    outer = storage_keys(gradients)
    given = [None if g is None else not outer.keys().isdisjoint(storage_keys([g])) for g in found]
    # A view refers to its base, even if nothing else does.
    fresh = [
        lent is False and not _compat.is_view(gradient)
        for gradient, lent in zip(found, given, strict=True)
    ]
    contiguous = tuple([g is not None and g.is_contiguous() for g in found])
    astray, in_order = _astray(found, wanted), tuple[bool, ...]()
    if turned:
        again = torch.autograd.grad(made, wanted, straight, allow_unused=True)
        astray |= _astray(again, wanted)
        in_order = tuple([g is not None and g.is_contiguous() for g in again])
    return Cost(
        counting.peak,
        counting.level,
        tuple(given),
        tuple(fresh),
        contiguous,
        results,
        tuple(astray.items()),
        in_order,
    )


def _gradient_of(result: torch.Tensor, call: Call) -> torch.Tensor:
    """What the result is given. Without memory torch says that those of convolutions are contiguous
    in any format, and kernels copy gradients in another one than they run in."""
    if call.last and runs_last(
        *(torch.empty_strided(*each[:2], device="meta") for each in call.args[:2])
    ):
        last = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
        return torch.empty_like(result, memory_format=last)
    return torch.empty_like(result)


def _astray(gradients: Iterable[torch.Tensor | None], wanted: list[torch.Tensor]) -> dict[int, int]:
    """Where a gradient is not laid out as its argument, the bytes of the memory that it is in."""
    found = {}
    for place, (gradient, argument) in enumerate(zip(gradients, wanted, strict=True)):
        if gradient is not None:
            pairs = zip(gradient.shape, gradient.stride(), argument.stride(), strict=True)
            if any(size != 1 and one != other for size, one, other in pairs):
                found[place] = gradient.untyped_storage().nbytes()
    return found


class _AsReal(Counting):
    """Writes in place where the backward of real tensors does."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._filled = Filled()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return on_shapes(super().call, func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = self._filled.as_real(func, args)
        self.beside = self._filled.beside
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._filled.ran(func, result)
        return result


def _noting(saved: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    return pack


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _build(wanted: list[torch.Tensor], written: bool, argument: Any) -> Any:
    """The argument on the meta device; tensors that require grad are added to `wanted`."""
    if isinstance(argument, Like):
        tensor = torch.empty_strided(
            argument.shape, argument.stride, dtype=argument.dtype, device="meta"
        )
        if not argument.grad:
            return tensor
        wanted.append(tensor.requires_grad_())
        return tensor.clone() if written else tensor  # a leaf must not be written in place
    if isinstance(argument, tuple):
        return [_build(wanted, written, item) for item in argument]
    return torch.device("meta") if isinstance(argument, torch.device) else argument
