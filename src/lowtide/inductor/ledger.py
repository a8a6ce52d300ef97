"""Several compiled graphs under one limit.

Problem: a graph break, a model compiled block by block, or a model that is called twice makes a
step call several graphs, and what each call saves stays until its own backward. Invariant: a call
is open from its forward until its backward has run or its autograd graph is dropped, whichever
comes first; the peak of a step is that of its calls in order, with their backwards in reverse.
Imports `_compat`, schedule. Rejected: a share of the limit for each graph, as torch's budget has
it: how many there are is not known before the end of the first step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import _compat
from lowtide.errors import CompiledWarning
from lowtide.inductor.schedule import Outcome

_NODE = "CompiledFunctionBackward"
_TAKEN_APART = (
    "the backward of compiled code was run by compiled autograd, which takes it apart and makes it "
    "part of a larger graph: the limit is kept for the forward alone. Call backward without it "
    "(torch._dynamo.config.compiled_autograd = False)."
)


@dataclass(eq=False, slots=True)
class Call:
    """One forward of a compiled graph: which graph, and the outcome of its choice."""

    graph: Any
    outcome: Outcome


def peak_of(calls: Sequence[tuple[Any, Outcome]]) -> int:
    """Peak bytes of these calls, backwards included; (graph, outcome) in order of their forwards.

    A graph's parameter gradients stay while the backwards of earlier calls run; further calls of
    the same graph accumulate into the same ones.
    """
    before = [0]
    for _, outcome in calls:
        before.append(before[-1] + outcome.saved)
    peak = after = 0
    done: set[int] = set()
    for place in range(len(calls) - 1, -1, -1):
        graph, outcome = calls[place]
        held = before[place]
        peak = max(peak, held + outcome.forward, held + after + outcome.backward)
        if id(graph) not in done:
            done.add(id(graph))
            after += outcome.gradients
    return peak


class Ledger:
    """The calls whose backward has not run yet, in order, and those of this and the last step."""

    def __init__(self) -> None:
        self.open: list[Call] = []
        self.step: list[Any] = []
        """Graphs of this step's calls, in order. A step begins when no call is open."""
        self.last_step: list[Any] = []
        self._said = False  # that compiled autograd runs the backwards

    def begin(self) -> bool:
        """Note that a call is about to be made; returns whether it begins a step."""
        if self.open:
            return False
        if self.step:
            self.last_step = self.step
        self.step = []
        return True

    def peak_with(self, graph: Any, outcome: Outcome) -> int:
        """Peak of the open calls together with one more."""
        return peak_of([*((call.graph, call.outcome) for call in self.open), (graph, outcome)])

    @property
    def held(self) -> int:
        """Bytes that the open calls have saved."""
        return sum(call.outcome.saved for call in self.open)

    def enter(self, graph: Any, outcome: Outcome, results: Any) -> None:
        """Note that a call has returned; it is open if a backward can reach it."""
        node = next(_nodes_of(results), None)
        if node is None:
            return
        self.step.append(graph)
        call = Call(graph, outcome)
        self.open.append(call)
        close = _Closing(weakref.ref(self), call)
        node.register_hook(close)
        weakref.finalize(node, close)

    def close(self, call: Call) -> None:
        if call in self.open:
            self.open.remove(call)
            if _compat.in_compiled_autograd():
                self._say_that_it_was_taken_apart()

    def _say_that_it_was_taken_apart(self) -> None:
        if not self._said:
            self._said = True
            warnings.warn(_TAKEN_APART, CompiledWarning, stacklevel=2)


class _Closing:
    """Closes a call: when the hook on its autograd node runs, or when the node is freed."""

    __slots__ = ("call", "ledger")

    def __init__(self, ledger: weakref.ref[Ledger], call: Call) -> None:
        self.ledger = ledger
        self.call = call

    def __call__(self, *_: object) -> None:
        ledger = self.ledger()
        if ledger is not None:
            ledger.close(self.call)


# Compiled autograd has hooks traced.
_compat.never_compiled(_Closing.__call__)


def _nodes_of(results: Any) -> Iterator[Any]:
    """The autograd node of the compiled call that made these results."""
    for result in results if isinstance(results, list | tuple) else [results]:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        for _ in range(3):  # a result that is a view of another has one or two nodes before it
            if node is None:
                break
            if node.name() == _NODE:
                yield node
                break
            following = node.next_functions
            node = following[0][0] if following else None
