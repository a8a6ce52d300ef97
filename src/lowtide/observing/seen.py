"""A forward as numbers, kept with the plan that was made from it.

Problem: whether a step is the planned one is told by its operations, but not whether its backward
is: to freeze a parameter, or to run a part under `no_grad`, changes what autograd saves and the
gradients to come, and no operation shows it. Invariant: no tensor is held, leaves are known by weak
references. Imports leafstates, rebuild, modelled. Rejected: what requires grad in the signature of
each operation, which costs every planned step a look at every argument.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lowtide.backward.modelled import look_closer
from lowtide.observing.rebuild import OpLog
from lowtide.tape.leafstates import GONE, HAS_GRADIENT, REQUIRES, states

_KNOWN = 8  # of what leaves were like, the cases that are remembered


@dataclass(frozen=True)
class Seen:
    """What an observer knows of a forward, as numbers; kept with the plan that was made from it."""

    ops: tuple[OpLog, ...]
    carries_grad: frozenset[int]
    parameters: dict[int, tuple[int, int]]
    leaves: dict[int, tuple[int, weakref.ref[torch.Tensor]]]
    """Every leaf that may collect a gradient; `parameters` are those that had none yet."""
    forward: int
    """Operations before backward began."""
    saved: frozenset[int] | None = None
    """Values that autograd had saved when backward began; None: not known."""
    frozen: tuple[weakref.ref[torch.Tensor], ...] = ()
    """Parameters that were read and collect no gradient."""
    place: int = 0
    """Among the steps of its context, see `lowtide.learning.known_plans`."""
    before: int = 0
    """Bytes that those before it had left in memory."""
    retains: bool = False
    """Whether its backward gave nothing back of what was saved, as `retain_graph` asks."""

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process its tensors are not there, nor can operators be sent to one: what
        they cost can."""
        look_closer(self.ops, self.carries_grad)
        ops = tuple(
            [replace(log, kind=None, hidden=None, node=False, function=False) for log in self.ops]
        )
        parameters = {-1 - place: pair for place, pair in enumerate(self.parameters.values())}
        return Seen, (
            ops, self.carries_grad, parameters, {}, self.forward, self.saved, (), self.place,
            self.before, self.retains,
        )  # fmt: skip

    def __deepcopy__(self, _: Any) -> Seen:
        return self

    def current(self) -> bool:
        """Whether the leaves that collect gradients are still those of this step.

        What a user freezes or unfreezes changes what autograd saves and the gradients to come, and
        no operation shows it.
        """
        return self._judged().current

    def same_gradients(self) -> bool:
        """Whether exactly those gradients are to be allocated now that were in this step."""
        judged = self._judged()
        return not (judged.appeared or judged.there)

    def appeared(self) -> dict[int, tuple[int, int]]:
        """Leaves that had a gradient in this step and have none now: it will be allocated."""
        readers = {}
        for key in self._judged().appeared:
            reader, weak = self.leaves[key]
            leaf = weak()
            if leaf is not None:
                readers[key] = (reader, leaf.numel() * leaf.element_size())
        return readers

    def _judged(self) -> _Judged:
        """The leaves as they are now. They are mostly as they were the last time."""
        now = states(self._refs)
        judged = self._known.get(now)
        if judged is None:
            if len(self._known) == _KNOWN:
                self._known.clear()
            judged = self._known[now] = self._judge(now)
        return judged

    def _judge(self, now: bytes) -> _Judged:
        count = len(self.leaves)
        current = not any(state & REQUIRES for state in now[count:]) and all(
            state & REQUIRES for state in now[:count] if state != GONE
        )
        appeared, there = [], False
        for key, state in zip(self.leaves, now, strict=False):
            if state == GONE:
                continue
            has, had = bool(state & HAS_GRADIENT), key not in self.parameters
            if had and not has:
                appeared.append(key)
            there = there or (has and not had)
        return _Judged(current, tuple(appeared), there)

    @cached_property
    def _refs(self) -> tuple[weakref.ref[torch.Tensor], ...]:
        return (*(weak for _, weak in self.leaves.values()), *self.frozen)

    @cached_property
    def _known(self) -> dict[bytes, _Judged]:
        return {}


class _Judged(NamedTuple):
    """What states of the leaves mean for a plan."""

    current: bool
    appeared: tuple[int, ...]
    """The leaves that had a gradient and have none now."""
    there: bool
    """Whether one has a gradient now that had none."""
