"""`matmul` of fake tensors, by the operators that real ones get.

Problem: of a batch and a batch of one matrix, torch makes a single product if the matrix needs a
gradient, is a fake tensor or meets a dispatch mode, and one per item else: a plan for the first is
left at this operation by the step that it is for. Invariant: where a real tensor gets the second,
so does a fake one. Imports `_compat`, engine. Rejected: a rule in the recorder, which never sees
this operator, only what it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat, engine
from lowtide._compat import fakes

Product = Callable[..., Tensor]


def matmul(usual: Product) -> Product:
    """This function or method, for fake tensors as for real ones."""

    @functools.wraps(usual)
    def call(one: Any, other: Any, **kwargs: Any) -> Any:
        if kwargs or not _made_per_item(one, other):
            return usual(one, other, **kwargs)
        # As `matmul` of torch does it (aten/src/ATen/native/LinearAlgebra.cpp).
        pair = [_cast(tensor).expand(len(one), *tensor.shape[1:]) for tensor in (one, other)]
        product = torch.bmm(*(tensor.reshape(tensor.shape) for tensor in pair))
        return _compat.unsafe_view(product, product.shape)

    return call


def _made_per_item(one: Any, other: Any) -> bool:
    """Whether real tensors like these would be multiplied item by item, and these would not."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    if not one.dim() == other.dim() == 3 or not len(one) != len(other) == 1 or other.requires_grad:
        return False
    # The Python recorder is a mode itself.
    return fakes.is_fake(one) and engine.name() == "compiled" and not _compat.in_functorch()


def _cast(tensor: Tensor) -> Tensor:
    """As autocast does before the function begins."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(kind))
