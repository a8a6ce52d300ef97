"""Bytes of the results of a call, from shapes alone.

Problem: room has to be made before an operator runs, and only its meta kernel knows what it will
make; many are written in Python, and take a hundred times as long as a small kernel.
Invariant: what is remembered is all that a meta kernel sees: shapes, strides, dtypes, and plain
arguments with their types. Imports shaping, operators and values. Rejected: shape formulas of our
own for all operators, a second truth; remembering by the bytes of the inputs, which do not tell a
sum from a sort.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat.fakes import dynamo_aside
from lowtide.kernels.shaping import on_shapes
from lowtide.tape.functions import Rerun
from lowtide.tape.operators import facts_of
from lowtide.tape.values import tensors_in

_MOST = 10_000
# With a dense argument, these make a dense result of a sparse one, which a dense stand-in has too.
_DENSE_WITH_DENSE = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "mv", "_sparse_addmm", "add", "sub")
)
_TO_DENSE = "aten::_to_dense"
_SPARSE = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)
_PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)
)
_known: dict[Hashable, int] = {}  # calls and what they make


def made_by(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes of the outputs of a call, from shapes alone.

    The operator runs on the meta device; if it has no meta kernel (its output depends on data), the
    size of its largest input is used. So it is for sparse tensors, unless the result is dense: the
    matrix of a graph has a million times as many places as elements.
    """
    tensors = tensors_in(args, kwargs)
    if isinstance(func, Rerun):  # code of the program's
        return max(map(bytes_of, tensors), default=0)
    if any(map(is_sparse, tensors)):
        return _of_sparse(func, args, kwargs, tensors)
    call = _call(func, args, kwargs)
    made = None if call is None else _known.get(call)
    if made is not None:
        return made
    try:
        made = _run(func, args, kwargs)
    except Exception:  # any operator may refuse meta tensors, each in its own way
        made = max(map(bytes_of, tensors), default=0)
    if call is not None:
        if len(_known) >= _MOST:
            _known.clear()
        _known[call] = made
    return made


def _of_sparse(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> int:
    """Bytes of the outputs of a call that reads sparse tensors, for which few operators have meta
    kernels."""
    name = facts_of(func).name
    if name == _TO_DENSE:
        return tensors[0].numel() * tensors[0].element_size()
    if name in _DENSE_WITH_DENSE and any(t.layout is torch.strided and t.dim() for t in tensors):
        with contextlib.suppress(Exception):  # as in `made_by`
            return _run(func, args, kwargs)
    return max(map(bytes_of, tensors))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    dynamo_aside()
    # so that no mode of the program sees or counts it
    with _compat.below_autograd(), _compat.no_overrides():
        named = {name: _meta(a) for name, a in kwargs.items()}
        if facts_of(func).places:  # else a factory would allocate, and draw, on a real device
            named["device"] = torch.device("meta")
        given = tuple([_meta(a) for a in args])
        result = on_shapes(lambda f, a, k: f(*a, **k), func, given, named)
    return sum(map(bytes_of, tensors_in((result,), {})))


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Hashable | None:
    """What tells this call from others that make something else; None if that cannot be told."""
    try:
        described = _described((args, list(kwargs.items())))
    except (TypeError, RuntimeError, NotImplementedError):  # no shape, or strides
        return None
    return func, described, torch.get_default_dtype(), torch.is_grad_enabled()


def _described(argument: Any) -> Hashable:
    if isinstance(argument, torch.Tensor):
        size, stride = tuple(argument.shape), argument.stride()
        if not {*map(type, size), *map(type, stride)} <= {int}:
            raise TypeError("a symbolic shape")
        return size, stride, argument.dtype
    if isinstance(argument, list | tuple):
        return tuple(map(_described, argument))
    if isinstance(argument, torch.device):
        return torch.device
    if type(argument) not in _PLAIN:
        raise TypeError(f"{type(argument)} may be anything")
    return type(argument), argument


def _meta(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        if is_sparse(argument):
            return torch.empty(argument.shape, dtype=argument.dtype, device="meta")
        return torch.empty_strided(
            argument.shape, argument.stride(), dtype=argument.dtype, device="meta"
        )
    if isinstance(argument, list | tuple):
        return [_meta(item) for item in argument]
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether most places of a tensor may have no memory."""
    return tensor.layout in _SPARSE


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, those of the tensors that it consists of."""
    if is_sparse(tensor):
        return sum(t.numel() * t.element_size() for t in _compat.sparse_members(tensor))
    return tensor.numel() * tensor.element_size()
