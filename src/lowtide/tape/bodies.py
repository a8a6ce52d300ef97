"""Bodies of higher-order operators (`torch.cond`, `scan`, `map`) under a recording.

Problem: torch finds what a body closes over by compiling it, which is off while lowtide records; an
operator whose operands require no grad is then run below autograd, and the gradient of a parameter
that its body reads is silently lost, and so it is in `flex_attention` in any case. Invariant: if a
body whose gradients may be wanted runs below autograd and reads a tensor that requires grad and is
not an operand, it raises; so it does if bodies return what autograd takes for no tensors. Imports
`_compat`, values.
Rejected: refusing these operators altogether, although most calls are right.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide.errors import UnsupportedError
from lowtide.tape.values import tensors_in

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class _Reads(_compat.Mode):
    """Raises at the first operation that reads a tensor that requires grad and is no operand."""

    def __init__(self, name: str, operands: list[torch.Tensor]) -> None:
        super().__init__()
        self.name = name
        self.operands = operands

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(args, kwargs):
            if tensor.requires_grad and not any(tensor is operand for operand in self.operands):
                raise UnsupportedError(
                    f"the body of torch's higher-order operator {self.name} reads a tensor of "
                    f"shape {tuple(tensor.shape)} that requires grad and is not among its "
                    f"operands (in {func}). torch finds such tensors by compiling the body, which "
                    "it does not do inside a lowtide budget or region: their gradients would be "
                    "missing. Call the operator outside of it, or write it as plain Python there."
                )
        return _compat.called(func, args, kwargs)


def watched(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A higher-order operator's arguments, with each body that could lose gradients checked."""
    if not _compat.skips_autograd():
        return args, kwargs
    if not (torch.is_grad_enabled() or _compat.differentiates_flex_attention(name)):
        return args, kwargs
    operands = tensors_in(args, kwargs)

    def watch(body: Any) -> Any:
        if not callable(body) or isinstance(body, torch.Tensor | type):
            return body
        return _watching(name, body, operands)

    return tuple(map(watch, args)), {key: watch(value) for key, value in kwargs.items()}


def refuse_no_tuple(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Raise if bodies did not return a tuple of tensors. Compiling them would have flattened a
    dictionary, or tuples in a tuple: to autograd they are no tensors, and the gradients through
    them would be lost. Of a single tensor torch's autograd makes a tuple, of its rows."""
    if isinstance(result, tuple | list) and all(
        isinstance(item, torch.Tensor | int | float | None) for item in result
    ):
        return
    if not any(isinstance(body, _FUNCTIONS) for body in (*args, *kwargs.values())):
        return
    if any(tensor.requires_grad for tensor in tensors_in(args, kwargs)):
        raise UnsupportedError(
            f"the bodies of torch's higher-order operator {name} return something else than a "
            "tuple of tensors (a single one, a dictionary, tuples in tuples). torch takes that "
            "apart by compiling the bodies, which it does not do inside a lowtide budget or "
            "region: gradients would be missing. Return a tuple of tensors, or call the operator "
            "outside of it."
        )


def _watching(name: str, body: Callable[..., Any], operands: list[torch.Tensor]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Reads(name, operands):
            return body(*args, **kwargs)

    return run
