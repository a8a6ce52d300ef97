"""The sizes of inputs that code of symbolic sizes is planned for.

Problem: Dynamo makes a size a symbol once it has seen two, and has the second at hand, which may be
the smaller one (the last batch of an epoch); all later calls run that code. Invariant: code is
planned for the largest call of its function that is known, in bytes of its tensors, and for a
larger one again before it runs. Imports `_compat.symbolic`. Rejected: the largest of each size
apart from the others, which plans for a batch that no call has: many texts are short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lowtide._compat import symbolic

Sizes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors among a call's inputs."""


def sizes_of(inputs: Iterable[Any]) -> Sizes:
    """Of real tensors, or of those that a graph was traced with, at compilation."""
    return tuple(
        tuple(map(symbolic.size_hint, item.shape))
        for item in inputs
        if isinstance(item, torch.Tensor)
    )


def largest(known: Iterable[Sizes], examples: Sequence[Any]) -> Sizes:
    """The largest of the sizes that the code for a graph with these inputs can be called with."""
    tensors = [item for item in examples if isinstance(item, torch.Tensor)]
    fits = [sizes for sizes in known if _can_have(tensors, sizes)]
    return max([sizes_of(examples), *fits], key=lambda sizes: nbytes_of(examples, sizes))


def _can_have(tensors: Sequence[torch.Tensor], sizes: Sizes) -> bool:
    return len(tensors) == len(sizes) and all(
        len(tensor.shape) == len(shape)
        and all(
            symbolic.varies(one) or symbolic.size_hint(one) == other
            for one, other in zip(tensor.shape, shape, strict=True)
        )
        for tensor, shape in zip(tensors, sizes, strict=True)
    )


def nbytes_of(inputs: Iterable[Any], sizes: Sizes) -> int:
    """Bytes of the tensors among the inputs, if they have these sizes."""
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    total = 0
    for tensor, shape in zip(tensors, sizes, strict=True):
        count = tensor.element_size()
        for size in shape:
            count *= size
        total += count
    return total


def expect(examples: Iterable[Any], sizes: Sizes) -> None:
    """Count the symbols among the sizes of what a graph was traced with as these, from now on."""
    tensors = [item for item in examples if isinstance(item, torch.Tensor)]
    for tensor, shape in zip(tensors, sizes, strict=True):
        for size, expected in zip(tensor.shape, shape, strict=True):
            symbolic.expect(size, expected)
