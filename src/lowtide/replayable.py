"""`lowtide.replayable`: operators and Functions that are not torch's, whose results may be dropped.

Problem: an operator of a library may talk to other processes or to state that no record has, and
nobody sees what the kernel in a custom Function does, so their results are kept (rule 5); a model
whose attention or norm is a kernel of its own then saves little. Only who wrote it knows that it
may run twice. Invariant: it is recorded like an operator of torch's from then on, and nothing is
assumed of what it takes inside. Imports `_compat`, errors, step, functions and operators. Rejected:
running it twice to see whether the results are equal, as one that talks to others would hang;
reading the dispatcher's tags, which nobody sets.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.step import current_recorder
from lowtide.tape import functions
from lowtide.tape.operators import PURE_NAMESPACES, declare_replayable

_T = TypeVar("_T")

# Their operators talk to other processes.
_COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional",
                         "fsdp", "_dtensor", "symm_mem", "_symm_mem"})  # fmt: skip


def replayable(operator: _T) -> _T:
    """Let lowtide drop what an operator or Function of a library makes, and run it again.

    What custom operators make is kept otherwise, as one may do what must not happen twice; and so
    is what a kernel of an extension fills in a `torch.autograd.Function`. (A kernel of Triton's
    there is replayed without this, unless it uses atomics: lowtide reads off its code whether it
    is a function of its arguments.) Say it before the first step, once per process; also as the
    outermost decorator of one of your own::

        @lowtide.replayable
        @torch.library.custom_op("mylib::swiglu", mutates_args=())
        def swiglu(gate: Tensor, up: Tensor) -> Tensor: ...

        lowtide.replayable("flash_attn::_flash_attn_forward")
        lowtide.replayable(SelectiveScanFn)  # around a kernel in C++

    Of a Function, the forward becomes one operation, which makes what it returns and what else it
    saves by ``ctx.save_for_backward``. It is called again with a context of its own. Arguments may
    be tensors, lists of them, generators, numbers, strings, functions without a closure, and plain
    containers of these without tensors. A call with anything else among them (an object that
    may hold tensors, a module, a tuple of tensors) is as without this.

    Either has to be a function of its arguments: the same bits from the same tensors, whether they
    require grad or not (in a replay none does; ``ctx.needs_input_grad`` is as it was), no state of
    its own, no other process. It may draw from the default generator of its device, whose state is
    put back for the replay. An operator may write to the arguments that its schema says it writes,
    whose new content is kept. A kernel that adds up with atomics, in an order that differs from run
    to run, is not the same function twice: its replay then has other bits, as with
    `torch.utils.checkpoint`. Under `CompileBudget`, what they make is kept.

    Args:
        operator: what `torch.library.custom_op` returned; an operator or overload of
            ``torch.ops``; its name, such as ``"mylib::swiglu"``, once the library that defines it
            was imported; or a subclass of `torch.autograd.Function`.

    Returns:
        The same.

    Raises:
        UsageError: it is neither, or there is no operator of that name; or it belongs to torch,
            of which lowtide knows what may be replayed, or to a collective. A Function whose
            forward writes to its arguments raises `UnsupportedError` when it is called in a
            recording; of what kernels write there, the first call of each kind is looked at.

    Examples:
        >>> import torch
        >>> @replayable
        ... @torch.library.custom_op("lowtide_docs::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> twice(torch.ones(1)).item()
        2.0
    """
    if isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
        functions.declare(operator, current_recorder)
    else:
        declare_replayable(_checked(operator))
    return operator


def _checked(operator: Any) -> str:
    name = _compat.operator_name(operator)
    if name is None or "::" not in name:
        raise UsageError(
            "lowtide.replayable takes an operator (what torch.library.custom_op returned, one of "
            'torch.ops, or its name, such as "mylib::swiglu") or a subclass of '
            f"torch.autograd.Function; got {operator!r}. A plain function needs none of this: what "
            "it calls is recorded. Put a kernel that is called there into one of these."
        )
    name = name.partition(".")[0]  # an overload: its operator
    namespace = name.partition("::")[0]
    if namespace in PURE_NAMESPACES:
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
