"""Answering a dry run's questions about data: does this mask hide anything, how many labels?

Problem: much code looks at its labels or masks before it computes (a check, an early return), and
a fake tensor has no content. Invariant: an answer is computed only from tensors that really exist
(arguments, buffers), and only if no parameter, random number or write contributes to it; any other
question stays unanswered, and the caller falls back to a real step. Imports tape. Rejected:
guessing a branch, which plans a step that will not run.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide import _compat
from lowtide.tape.values import Operation, Ref, Value

_MOST_BYTES = 64 << 20  # the most that may be allocated to find one answer


class UnansweredError(Exception):
    """The answer does not depend on data alone, or takes too much memory."""


def evaluate(value: Value, real: dict[Value, torch.Tensor]) -> torch.Tensor:
    """The content of a value, as a tensor over its whole storage.

    Args:
        value: recorded on fake tensors.
        real: the real tensors behind externals.

    Raises:
        UnansweredError: it depends on something other than data, or takes too much memory.
    """
    known: dict[Value, torch.Tensor] = {}
    with _compat.below_autograd(), _compat.no_overrides(), torch.no_grad():
        for op in _makers(value, real):
            args = [_real_argument(a, known, real) for a in op.args]
            kwargs = {k: _real_argument(a, known, real) for k, a in op.kwargs.items()}
            result = op.facts.func(*args, **kwargs)
            flat = list(result) if isinstance(result, list | tuple) else [result]
            for place, weak in op.outputs:
                made = weak()
                if made is not None:
                    known[made] = flat[place]
        return known[value] if value in known else real[value]


def _makers(value: Value, real: dict[Value, torch.Tensor]) -> list[Operation]:
    found: set[Operation] = set()
    stack = [value]
    nbytes = 0
    while stack:
        value = stack.pop()
        if value in real:
            if real[value].requires_grad:
                raise UnansweredError("it depends on a parameter")
            continue
        op = value.op
        if op is None or op.draws or op.writes or op.facts.random or op.facts.writes:
            raise UnansweredError("it depends on what only a real step can make")
        if op in found:
            continue
        found.add(op)
        nbytes += sum(made.nbytes for made in op.made())
        if nbytes > _MOST_BYTES:
            raise UnansweredError("it takes much memory to find out")
        stack.extend(op.values())
    return sorted(found, key=lambda op: op.sequence)


def _real_argument(
    argument: Any, known: dict[Value, torch.Tensor], real: dict[Value, torch.Tensor]
) -> Any:
    if isinstance(argument, Ref):
        if argument.value is None:
            raise UnansweredError("it is written in place")
        base = known[argument.value] if argument.value in known else real[argument.value]
        return argument.of(base.detach())
    if isinstance(argument, list):
        return [_real_argument(item, known, real) for item in argument]
    return argument
