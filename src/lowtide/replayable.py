"""`lowtide.replayable`: operators that are not torch's, whose results may be dropped.

Problem: an operator of a library may talk to other processes or to state that no record has, so its
results are kept (rule 5); a model whose attention or norm is a kernel of its own then saves little.
Only who wrote the operator knows that it may run twice. Invariant: it is recorded like torch's own
from then on, and nothing is guessed of what it takes inside. Imports `_compat`, errors and
operators. Rejected: running it twice to see whether the results are equal, as one that talks to
others would hang; reading the dispatcher's tags, which nobody sets.
"""

from __future__ import annotations

from typing import Any, TypeVar

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.tape.operators import declare_replayable

_T = TypeVar("_T")

# Their operators talk to other processes.
_COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional",
                         "fsdp", "_dtensor", "symm_mem", "_symm_mem"})  # fmt: skip
_OF_TORCH = frozenset({"aten", "prims", "torchvision", "quantized_decomposed"})


def replayable(operator: _T) -> _T:
    """Let lowtide drop what an operator of a library makes, and run it again in backward.

    What custom operators make is kept otherwise, as one may do what must not happen twice. Say it
    before the first step, once per process; also as the outermost decorator of an operator of your
    own::

        @lowtide.replayable
        @torch.library.custom_op("mylib::swiglu", mutates_args=())
        def swiglu(gate: Tensor, up: Tensor) -> Tensor: ...

        lowtide.replayable("flash_attn::_flash_attn_forward")

    The operator has to be a function of its arguments: the same bits from the same tensors, whether
    they require grad or not (in a replay none does), no state of its own, no other process. It may
    draw from the default generator of its device, whose state is put back for the replay, and write
    to the arguments that its schema says it writes, whose new content is kept. A kernel that adds
    up with atomics, in an order that differs from run to run, is not the same function twice: its
    replay then has other bits, as with `torch.utils.checkpoint`. Under `CompileBudget`, what it
    makes is kept.

    Args:
        operator: what `torch.library.custom_op` returned; an operator or overload of
            ``torch.ops``; or its name, such as ``"mylib::swiglu"``, once the library that defines
            it was imported.

    Returns:
        The same.

    Raises:
        UsageError: it is no operator, or there is none of that name; or it belongs to torch, which
            says itself what may be replayed, or to a collective.

    Examples:
        >>> import torch
        >>> @replayable
        ... @torch.library.custom_op("lowtide_docs::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> twice(torch.ones(1)).item()
        2.0
    """
    declare_replayable(_checked(operator))
    return operator


def _checked(operator: Any) -> str:
    name = _compat.operator_name(operator)
    if name is None or "::" not in name:
        raise UsageError(
            "lowtide.replayable takes an operator: what torch.library.custom_op returned, one of "
            f'torch.ops, or its name, such as "mylib::swiglu"; got {operator!r}. A '
            "torch.autograd.Function or a plain function needs none of this: what it calls is "
            "recorded, and what a kernel without an operator makes is kept."
        )
    name = name.partition(".")[0]  # an overload: its operator
    namespace = name.partition("::")[0]
    if namespace in _OF_TORCH:
        raise UsageError(
            f"{name} is torch's own: lowtide knows whether it may be replayed. Leave it out."
        )
    if namespace in _COLLECTIVE:
        raise UsageError(
            f"{name} talks to other processes, which would wait for each other in a replay. What "
            "it makes is kept."
        )
    if not _compat.is_registered(name):
        raise UsageError(
            f"there is no operator {name}. Import the library that defines it first, and compare "
            "the name: lowtide.saved_tensors(step, batch) lists the operators of a step."
        )
    return name
