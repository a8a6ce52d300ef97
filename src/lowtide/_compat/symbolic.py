"""Sizes that are symbols while code is compiled, as numbers.

Problem: what a graph takes is counted in bytes, and compiled code has symbols where shapes vary or
are found in data. Invariant: asking adds no guard; a symbol that is found in data counts as the
largest that it can be. `optimization_hint` and the sets of new symbols have no public names as of
torch 2.13. Imports fakes and torch. Rejected: sizes of the example alone, which know nothing of
what data decides.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide._compat.fakes import fake_mode

_FAR = 1 << 62  # no size
_UNKNOWN = 4096  # what a size is taken for if nothing is known of it


def largest_hint(hint: Callable[[int], int]) -> int:
    """What `hint` says of a size, given a fallback for the symbols in it whose values are found in
    data, as by `nonzero`: for these the largest that they can have, where that is known."""
    most = hint(_FAR)
    return most if most < _FAR else hint(_UNKNOWN)


def size_hint(size: Any) -> int:
    """A size as an integer, without a guard: for a symbol, its value at compilation or, if it is
    found in data, the largest that it can have."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return largest_hint(lambda fallback: int(optimization_hint(size, fallback=fallback)))


def is_bounded(size: Any) -> bool:
    """Whether a size is a number, or has a value at compilation or a largest one."""
    if isinstance(size, int):
        return True
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return int(optimization_hint(size, fallback=_FAR)) < _FAR


_fake_mode_of_hints = functools.cache(lambda: fake_mode())


def with_hinted_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, with the sizes of `tensor` at compilation if they are symbolic."""
    if all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return tensor
    sizes, strides = map(size_hint, tensor.shape), map(size_hint, tensor.stride())
    with _fake_mode_of_hints():
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
