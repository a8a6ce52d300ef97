"""What normalizations and interpolations make, without torch's shape functions for them.

Problem: torch computes these shapes by running a decomposition in Python, 1 to 12 ms a call; a
DenseNet has a hundred normalizations of as many sizes, and its first step took three times as long.
Invariant: the sizes, strides and dtypes of what the real kernels make, for plain layouts of one
dtype; any other call is left to torch. Imports `_compat`. Rejected: remembering shapes on disk,
which helps the second run only; scaling those of another call, as nothing says how they grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat

Tensor = torch.Tensor
Shapes = Callable[..., "tuple[Tensor | None, ...] | Tensor | None"]
_DTYPES = frozenset((torch.float32, torch.float64))  # halves have statistics of another type


def made_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call on tensors without memory returns; None if that is not known here."""
    shapes = KNOWN.get(_compat.schema_of(func).name)
    if shapes is None or kwargs or not _plain(args):
        return None
    try:
        return shapes(*args)
    except TypeError:  # another overload
        return None


def _plain(args: tuple[Any, ...]) -> bool:
    """Whether all tensors are of one dtype and dense, in one of the usual layouts."""
    dtypes = set()
    for argument in args:
        if isinstance(argument, Tensor):
            if argument.layout is not torch.strided or not _usual(argument):
                return False
            if argument.dim() > 1 and not argument.numel():
                return False
            dtypes.add(argument.dtype)
    return len(dtypes) == 1 and dtypes <= _DTYPES


def _usual(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=_format(tensor))


def _format(tensor: Tensor) -> torch.memory_format:
    """The format other than the contiguous one that a tensor of so many dimensions may have."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(
        tensor.dim(), torch.contiguous_format
    )


def _wanted(mask: list[bool], *makes: Callable[[], Tensor]) -> tuple[Tensor | None, ...]:
    return tuple([make() if asked else None for asked, make in zip(mask, makes, strict=True)])


# ------------------------------------------------------------------------ normalizations


def _batch_norm(
    x: Tensor, _weight: Any, _bias: Any, _mean: Any, _var: Any, training: bool, *_: Any
) -> tuple[Tensor, ...]:
    count = x.shape[1] if training else 0
    return torch.empty_like(x), x.new_empty(count), x.new_empty(count)


def _batch_norm_backward(
    grad: Tensor, x: Tensor, _weight: Any, _mean: Any, _var: Any, _saved: Any, _inv: Any,
    _training: bool, _eps: float, mask: list[bool],
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    if grad.stride() != x.stride():
        return None
    channels = (lambda: x.new_empty(x.shape[1]),) * 2
    return _wanted(mask, lambda: torch.empty_like(x), *channels)


def _layer_norm(
    x: Tensor, shape: list[int], _weight: Any, _bias: Any, _eps: float
) -> tuple[Tensor, ...] | None:
    if not x.is_contiguous():
        return None
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows), x.new_empty(rows)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], _mean: Any, _inv: Any, weight: Any, bias: Any,
    mask: list[bool],
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    if not (grad.is_contiguous() and x.is_contiguous()) or (mask[1] and weight is None):
        return None
    if mask[2] and bias is None:
        return None
    scales = (lambda: x.new_empty(shape),) * 2
    return _wanted(mask, lambda: torch.empty_like(x), *scales)


def _group_norm(
    x: Tensor, _weight: Any, _bias: Any, count: int, _channels: int, _size: int, groups: int,
    _eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.empty_like(x), x.new_empty((count, groups)), x.new_empty((count, groups))


def _group_norm_backward(
    grad: Tensor, x: Tensor, _mean: Any, _inv: Any, weight: Any, _count: int, channels: int,
    _size: int, _groups: int, mask: list[bool],
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    if grad.stride() != x.stride() or (mask[1] and weight is None):
        return None
    scales = (lambda: x.new_empty(channels),) * 2
    return _wanted(mask, lambda: torch.empty_like(x), *scales)


# ------------------------------------------------------------------------ interpolations


def _upsampled(x: Tensor, size: list[int], *_: Any) -> Tensor:
    form = torch.contiguous_format if x.is_contiguous() else _format(x)
    return torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=form)


def _sampled(x: Tensor, grid: Tensor, *_: Any) -> Tensor | None:
    if not x.is_contiguous():
        return None
    return x.new_empty((*x.shape[:2], *grid.shape[1:-1]))


KNOWN: dict[str, Shapes] = {
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::upsample_linear1d": _upsampled,
    "aten::upsample_bilinear2d": _upsampled,
    "aten::upsample_bicubic2d": _upsampled,
    "aten::upsample_trilinear3d": _upsampled,
    "aten::grid_sampler_2d": _sampled,
    "aten::grid_sampler_3d": _sampled,
}
