"""A forward as numbers, kept with the plan that was made from it.

Problem: its operations show whether a step is the planned one, but not whether its backward is:
freezing a parameter, or running a part under `no_grad`, changes what autograd saves and which
gradients come, and no operation shows it. Invariant: no tensor is held; leaves are known by weak
references. Imports leafstates, logs, gradients, modelled. Rejected: `requires_grad` in the
signature of each operation, for which every planned step would have to look at every argument.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lowtide.backward.gradients import lifetimes
from lowtide.backward.modelled import look_closer
from lowtide.observing.logs import OpLog
from lowtide.tape.leafstates import GONE, HAS_GRADIENT, REQUIRES, states

_KNOWN = 8  # states of the leaves for which the conclusion is remembered


@dataclass(frozen=True)
class Seen:
    """What an observer knows of a forward, as numbers; kept with the plan that was made from it."""

    ops: tuple[OpLog, ...]
    carries_grad: frozenset[int]
    parameters: dict[int, tuple[int, int]]
    leaves: dict[int, tuple[int, weakref.ref[torch.Tensor]]]
    """Every leaf that may get a gradient; `parameters` has those that had none yet."""
    forward: int
    """Operations before backward began."""
    handles: tuple[int, ...] | None = None
    """Values that autograd had saved when backward began, sorted, each as often as it was saved;
    None: not known."""
    frozen: tuple[weakref.ref[torch.Tensor], ...] = ()
    """Parameters that were read and get no gradient."""
    place: int = 0
    """Its place among the steps of its context, see `lowtide.learning.known_plans`."""
    before: int = 0
    """Bytes that the steps before it had left in memory."""
    retains: bool = False
    """Whether its backward released nothing that was saved (`retain_graph=True`)."""
    calls: tuple[tuple[int, str], ...] = ()
    """Calls that are not recorded (rule 5): the operation before which each came, and its name."""
    behind: int = 0
    """What its backward could take again in the graphs of earlier steps, which it went through."""
    withheld: int = 0
    """What those of them in its context would have left more under a larger limit."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: without leaves and operators, which cannot be sent, but with what
        the operators' backwards cost."""
        look_closer(self.ops, self.carries_grad)
        ops = tuple(
            [replace(log, kind=None, hidden=None, node=False, function=False) for log in self.ops]
        )
        parameters = {-1 - place: pair for place, pair in enumerate(self.parameters.values())}
        return Seen, (
            ops, self.carries_grad, parameters, {}, self.forward, self.handles, (), self.place,
            self.before, self.retains, self.calls, self.behind,
            self.withheld,
        )  # fmt: skip

    def of_leaves(self, originals: Mapping[int, torch.Tensor]) -> Seen:
        """A forward on fake tensors, with the real leaves that these stand for: it is their
        gradients that come and go. `originals`: by the ids of the fake ones."""
        leaves, parameters = dict(self.leaves), dict(self.parameters)
        for key, (reader, _) in self.leaves.items():
            leaf = originals.get(key)
            if leaf is not None:
                del leaves[key]
                leaves[id(leaf)] = (reader, weakref.ref(leaf))
                if key in parameters:
                    parameters[id(leaf)] = parameters.pop(key)
        return replace(self, leaves=leaves, parameters=parameters)

    def __deepcopy__(self, _: Any) -> Seen:
        return self

    def current(self) -> bool:
        """Whether the leaves that get gradients are still those of this step.

        Freezing or unfreezing changes what autograd saves and which gradients come, and no
        operation shows it.
        """
        return self._judged().current

    def same_gradients(self) -> bool:
        """Whether exactly the gradients that this step allocated are to be allocated now."""
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

    def leaves_there(self) -> list[torch.Tensor]:
        """The leaves that get gradients, as far as they are still there."""
        return [leaf for _, weak in self.leaves.values() if (leaf := weak()) is not None]

    def is_there(self, leaf: int) -> bool:
        """Whether a leaf of this step is still there."""
        _, weak = self.leaves.get(leaf, (0, None))
        return weak is not None and weak() is not None

    def in_backward(self, sizes: Sequence[int]) -> list[int]:
        """For each operation, the bytes of gradients of activations that are there while its
        backward runs, and of what that takes itself. `sizes`: of each value, in bytes."""
        change, sums, copies = lifetimes(self.ops, sizes, self.carries_grad)
        parts = zip(itertools.accumulate(change), sums, copies, self.ops, strict=False)
        return [there + added + copied + log.temporaries for there, added, copied, log in parts]

    def gradients_of_others(self) -> int | None:
        """Bytes of the gradients of leaves that are not there any more; None: not known."""
        gone = [key for key, (_, weak) in self.leaves.items() if weak() is None]
        if any(key not in self.parameters for key in gone):
            return None
        others = [*gone, *(key for key in self.parameters if key not in self.leaves)]
        return sum(self.parameters[key][1] for key in others)

    def _judged(self) -> _Judged:
        """What the present states of the leaves mean; remembered, as they rarely change."""
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
    def saved(self) -> frozenset[int] | None:
        """The values among `handles`."""
        return None if self.handles is None else frozenset(self.handles)

    @cached_property
    def _refs(self) -> tuple[weakref.ref[torch.Tensor], ...]:
        return (*(weak for _, weak in self.leaves.values()), *self.frozen)

    @cached_property
    def _known(self) -> dict[bytes, _Judged]:
        return {}


class _Judged(NamedTuple):
    """What the states of the leaves mean for a plan."""

    current: bool
    appeared: tuple[int, ...]
    """The leaves that had a gradient and have none now."""
    there: bool
    """Whether one has a gradient now that had none."""
