"""Sizes that are symbols while code is compiled, as numbers.

Problem: what a graph takes is counted in bytes, and compiled code has symbols where shapes vary or
are found in data. Invariant: asking adds no guard; a symbol that is found in data counts as the
largest that it can be, and one that inputs have as its value at compilation, or as `expect` was
told. What is known of symbols has no public names as of torch 2.13. Imports torch.
Rejected: sizes of the example alone, which know nothing of what data decides.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

_FAR = 1 << 62  # no size
_UNKNOWN = 4096  # what a size is taken for if nothing is known of it

# By what Dynamo knows of a graph's shapes: what its symbols count as.
_expected: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def varies(size: Any) -> bool:
    """Whether a size of an input may be another one in another call."""
    return not isinstance(size, int) and bool(size.node.expr.is_Symbol)


def expect(size: Any, value: int) -> None:
    """Count a symbol that inputs have as this size. Torch goes on with its value at compilation."""
    if not varies(size):
        return
    from sympy import Integer  # type: ignore[import-untyped]

    _expected.setdefault(size.node.shape_env, {})[size.node.expr] = Integer(value)


def size_hint(size: Any) -> int:
    """A size as an integer, without a guard: for a symbol, its value at compilation, the one that
    is expected or, if it is found in data, the largest that it can have."""
    if isinstance(size, int):
        return size
    return expression_hint(size.node.expr, size.node.shape_env)


def expression_hint(size: Any, shapes: Any) -> int:
    """The same of an expression of symbols, given what is known of these."""
    if (most := _most(size, shapes)) is not None:
        return most
    return max(0, int(shapes.optimization_hint(size, fallback=_UNKNOWN)))


def is_bounded(size: Any) -> bool:
    """Whether a size is a number, or has a value at compilation or a largest one."""
    return isinstance(size, int) or _most(size.node.expr, size.node.shape_env) is not None


def _most(size: Any, shapes: Any) -> int | None:
    """Symbols that stand for what inputs have count with their values at compilation, or those that
    are expected, even if they may be larger."""
    known = {**shapes.backed_var_to_val, **_expected.get(shapes, {})}
    values = {symbol: known[symbol] for symbol in size.free_symbols if symbol in known}
    most = shapes.bound_sympy(size.xreplace(values)).upper
    return max(0, int(most)) if most.is_Integer and most < _FAR else None


def with_hinted_sizes(tensor: Any) -> torch.Tensor:
    """A traced tensor, with its sizes at compilation if they are symbolic. It is of the same mode:
    operators refuse tensors of two."""
    if all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return tensor  # type: ignore[no-any-return]
    sizes, strides = map(size_hint, tensor.shape), map(size_hint, tensor.stride())
    with tensor.fake_mode:
        return torch.empty_strided(
            tuple(sizes), tuple(strides), dtype=tensor.dtype, device=tensor.device
        )


def sizes_from_data(node: Any) -> bool:
    """Whether a node finds sizes in its data (`nonzero`), and so defines their symbols, which are
    defined once."""
    return bool(node.meta.get("unbacked_bindings"))


@contextlib.contextmanager
def without_new_sizes(nodes: list[Any]) -> Iterator[None]:
    """Forget the symbols that are made meanwhile for sizes that are found in data."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("val") for node in nodes])
    shapes = None if mode is None else mode.shape_env
    with contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols():
        yield
