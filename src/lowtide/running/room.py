"""Room under the limit for the operations of a forward that no plan covers.

Problem: the first step, and every step that changed, allocates what no plan foresees (rule 13).
Invariant: before an operation allocates, what it needs is free under the target, or everything that
may be dropped was and the budget was told. Imports observer, online, results, workspace. Rejected:
making room after the operation has run, when the limit has been passed already; asking for the size
of every result, which takes as long as a small kernel where the limit is far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from lowtide.kernels.results import bytes_of, made_by
from lowtide.kernels.workspace import room_for, unfolds
from lowtide.observing.observer import Observer
from lowtide.observing.rebuild import before_requests
from lowtide.running.online import Evictor
from lowtide.tape.operators import Facts
from lowtide.tape.values import Value, tensors_in

if TYPE_CHECKING:
    from lowtide.loop import Loop

# Times its input: a distillation has the logits of another model and several tensors like them.
_LOSS = 12
_INSIDE = 6  # times its largest input: what a custom operator or its backward may hold at once
_PLENTY = 8  # a call is not looked at closely while 8 of the largest storages still fit
_LEAST = 2  # bytes of an element: of masks and bytes, int64 is made, and another copy to compute in


class Room:
    """Keeps the live bytes of one forward under its owner's target by dropping held values."""

    def __init__(
        self,
        owner: Loop,
        observer: Observer,
        live: list[int],
        drop: Callable[[Value], None],
    ) -> None:
        self._owner = owner
        self._observer = observer
        self._live = live
        self._drop = drop
        self._evictor = Evictor(live)

    def take_over(self) -> None:
        """Start with what was recorded up to here under a plan, held or dropped."""
        alive = list(self._observer.alive())
        self._evictor.add(alive)
        self._observer.look_for_missing()

    def before(self, facts: Facts, func: Any, args: Any, kwargs: Any) -> None:
        """An operation is about to allocate: make room for it."""
        if self._owner.where.makes_elsewhere(facts, args, kwargs):
            return
        evictor = self._evictor
        self._observer.anew()  # values dropped earlier may have been freed just now
        live = self._live[0]
        most = max(evictor.largest, _together(args))
        target = self._owner.allowance.target(live, self._observer.missing)
        if live + _PLENTY * most <= target and not _makes_more(facts, func, args, kwargs, most):
            return
        need = room_for(facts.name, func, args, kwargs)
        if facts.foreign:
            need = max(need, _guessed(facts, args, kwargs))
        target = self.target(need)
        if not self.shrink(target - need):
            nearest = room_for(facts.name, func, args, kwargs, nearest=True)
            self.lacks(facts.name, min(need, nearest))

    def kept(self, facts: Facts, args: Any, kwargs: Any, over: bool) -> None:
        """A call that is not recorded is about to run, or is `over`: what it makes is kept.

        To know its size, code of the program might have to run. Most operators make no more than
        the largest of their inputs; if one makes more, that is seen afterwards. The body of one
        with a gradient is mostly a formula, which holds four such tensors, and its backward another
        one with the gradients of its input and result: what is dropped now makes room for both, as
        that backward is modelled by nothing. This is a guess, so it drops but refuses nothing.
        """
        if self._owner.where.makes_elsewhere(facts, args, kwargs):
            return
        if over:
            self._fits(facts.name)
            return
        need = _guessed(facts, args, kwargs)
        self.shrink(self.target(need) - need)

    def before_backward(self) -> None:
        """The forward is over: make room for what backward allocates before it asks for anything,
        and for a loss that is still to come.

        When it asks, the rest is planned; what was held until then was in memory with the first
        gradients.
        """
        loss = self._loss()
        if self._live[0] + _PLENTY * self._evictor.largest + loss <= self.target(loss):
            return
        need = before_requests(self._observer) + loss
        self.shrink(self.target(need) - need)

    def _loss(self) -> int:
        """Bytes for a loss that is still to come, which is a guess. One that runs another model (a
        teacher, features of an image) is taken to need twice what this forward does, kept and
        dropped. Only the first step recomputes more for it."""
        output = self._observer.names.output()
        if self._owner.allowance.outside or not output:  # it was measured; or was in the forward
            return 0
        return max(_LOSS * output, 2 * (self._live[0] + self._observer.missing))

    def target(self, need: int) -> int:
        """Bytes that may be live, with those that are about to be allocated."""
        return self._owner.allowance.target(self._live[0] + need, self._observer.missing)

    def produced(self, name: str, made: list[Value]) -> None:
        """An operation has run: if it made more than foreseen, make room now."""
        self._evictor.add(made)
        self._fits(name)

    def held(self, value: Value) -> None:
        """Autograd has saved a value, which may be held for it."""
        self._evictor.held(value)

    def _fits(self, name: str) -> None:
        live = self._live[0]
        target = self.target(0)
        if live > target and not self.shrink(target):
            self.lacks(name, 0)

    def shrink(self, target: int) -> bool:
        """Drop values until at most `target` bytes are live; whether that was possible."""
        before = self._evictor.drops
        enough = self._evictor.shrink(max(0, target), self._drop)
        if self._evictor.drops > before:
            self._observer.anew()
        return enough and target >= 0  # else not even with nothing left

    def give(self, nbytes: int) -> bool:
        """Free this many bytes, or as many as possible; whether any were freed."""
        before = self._live[0]
        self.shrink(before - nbytes)
        return self._live[0] < before

    @property
    def largest(self) -> int:
        """Bytes of the largest value so far."""
        return self._evictor.largest

    def lacks(self, name: str, need: int) -> None:
        """Everything that may be dropped was, and an operation still allocates `need` bytes."""
        self._owner.cannot_fit(self._observer, name, self._live[0], need)


def _makes_more(facts: Facts, func: Any, args: Any, kwargs: Any, than: int) -> bool:
    """Whether a call may take many times as many bytes as its arguments have, or the largest value
    so far."""
    return unfolds(facts.name) or (facts.grows and made_by(func, args, kwargs) > than)


def _guessed(facts: Facts, args: Any, kwargs: Any) -> int:
    """What a call, or its backward, takes of which only the inputs are known."""
    tensors = tensors_in(args, kwargs)
    need = max(map(_made_like, tensors), default=0)
    has_backward = any(tensor.requires_grad for tensor in tensors)
    return need * _INSIDE if has_backward and (facts.opaque or facts.foreign) else need


def _made_like(tensor: torch.Tensor) -> int:
    """Bytes of a result of this input's size; 0 for a parameter, which may be a large table, and
    where a trace has a symbol for its size: torch ends the process if asked for such bytes."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _together(args: Any) -> int:
    """Bytes of one tensor of the shape that all arguments broadcast to, which may be large, or of
    all that are in a list."""
    sizes: tuple[int, ...] = ()
    each = listed = 0
    for argument in args:
        if isinstance(argument, torch.Tensor) and not argument.is_nested:  # which has no shape
            shape = argument.shape
            if sizes != shape:
                longer = zip_longest(reversed(sizes), reversed(shape), fillvalue=1)
                sizes = tuple(map(max, longer))[::-1]
            each = max(each, _LEAST, argument.element_size())
        elif type(argument) is list and argument and isinstance(argument[0], torch.Tensor):
            given = [item for item in argument if isinstance(item, torch.Tensor)]
            listed += sum([t.nbytes if t.layout is torch.strided else bytes_of(t) for t in given])
    return max(listed, each * math.prod(sizes))
