"""Answering a dry run's questions about data: does this mask hide anything, how many labels?

Problem: much code looks at its labels or masks before it computes (a check, an early return), and
a fake tensor has no content. Invariant: an answer is computed only from tensors that really exist
(arguments, buffers, constants made of Python's numbers), and only if no parameter and no random
number contributes to it; what is written in place is written to copies. Any other question stays
unanswered, and the caller falls back to a real step. Imports tape. Rejected: guessing a branch,
which plans a step that will not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide import _compat
from lowtide.tape.values import Operation, Ref, Value

_MOST_BYTES = 64 << 20  # the most that may be allocated to find one answer


class UnansweredError(Exception):
    """The answer does not depend on data alone, or takes too much memory."""


def evaluate(value: Value, real: Mapping[Value, torch.Tensor]) -> torch.Tensor:
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
            written = [ref.value for ref, _ in op.writes]
            copies = {
                v: copied(known[v] if v in known else real[v]) for v in written if v is not None
            }
            about = {**known, **copies} if copies else known
            args = [_real_argument(a, about, real) for a in op.args]
            kwargs = {k: _real_argument(a, about, real) for k, a in op.kwargs.items()}
            result = op.facts.func(*args, **kwargs)
            for old, (_, weak) in zip(written, op.writes, strict=True):
                made = weak()
                if made is not None and old is not None:
                    known[made] = copies[old]
            flat = list(result) if isinstance(result, list | tuple) else [result]
            for place, weak in op.outputs:
                made = weak()
                if made is not None:
                    known[made] = flat[place]
        return known[value] if value in known else real[value]


def _makers(value: Value, real: Mapping[Value, torch.Tensor]) -> list[Operation]:
    found: set[Operation] = set()
    stack = [value]
    nbytes = 0
    while stack:
        value = stack.pop()
        if value in real:
            if real[value].requires_grad:
                raise UnansweredError(
                    "it asks for the content of a tensor that depends on a parameter"
                )
            continue
        op = value.op
        if op is None or op.draws or op.facts.random or _moves_more(op):
            raise UnansweredError(
                "it asks for the content of a tensor that only a real step can make"
            )
        if op in found:
            continue
        found.add(op)
        nbytes += sum(made.nbytes for made in op.made())
        if nbytes > _MOST_BYTES:
            raise UnansweredError("it takes much memory to find out what is in a tensor")
        stack.extend(op.values())
    return sorted(found, key=lambda op: op.sequence)


def _moves_more(op: Operation) -> bool:
    """Whether it writes to what the record does not show: statistics, or memory nobody recorded."""
    if op.facts.statistics is not None:
        return True
    return bool(op.facts.writes) and (
        not op.writes or any(ref.value is None for ref, _ in op.writes)
    )


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over a copy of this one's whole storage: other views of that are written too."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return copy.set_(tensor.detach().untyped_storage().clone(), *place)


def _real_argument(
    argument: Any, known: dict[Value, torch.Tensor], real: Mapping[Value, torch.Tensor]
) -> Any:
    if isinstance(argument, Ref):
        if argument.value is None:
            raise UnansweredError("it asks for the content of a tensor that is written in place")
        base = known[argument.value] if argument.value in known else real[argument.value]
        return argument.of(base.detach())
    if isinstance(argument, list):
        return [_real_argument(item, known, real) for item in argument]
    return argument
