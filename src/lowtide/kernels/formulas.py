"""Workspace of operators that are known by their names, from formulas.

Problem: a few dozen kernels copy what they cannot read in place, or run in several steps with
temporaries between them; which ones do follows from nothing but their source. Invariant: as
measured on the CPU, kernel by kernel, or more; None for an operator that is not known. Imports
bags, fourier, recurrent and results. Rejected: a factor for each operator, as what most of them
take depends on formats, modes and sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from lowtide.kernels.bags import bags_backward_workspace, bags_workspace
from lowtide.kernels.fourier import fourier_workspace
from lowtide.kernels.recurrent import recurrent_workspace
from lowtide.kernels.results import bytes_of

# How many of their leading tensor arguments these kernels copy if they are not contiguous.
_COPIED = {
    "aten::native_layer_norm": 1,
    "aten::native_layer_norm_backward": 2,
    "aten::_softmax": 1,
    "aten::_log_softmax": 1,
    "aten::_softmax_backward_data": 2,
    "aten::_log_softmax_backward_data": 2,
    "aten::upsample_bicubic2d_backward": 1,
    "aten::avg_pool3d": 1,
    "aten::avg_pool3d_backward": 1,
    "aten::grid_sampler_2d_backward": 1,
    "aten::log_sigmoid_forward": 1,
    "aten::fractional_max_pool2d": 1,
    "aten::index_select": 1,
}
# Kernels of several steps, with a temporary as large as their first tensor.
_COMPOSED = frozenset(
    f"aten::{name}"
    for name in (
        "native_dropout", "native_dropout_backward", "logsumexp", "_fused_rms_norm", "dist",
        "median", "nanmedian", "ldexp", "masked_scatter_backward", "linalg_inv_ex", "_linalg_svd",
    )
)  # fmt: skip
# Losses: the position of the argument `reduction`; what they allocate with and without a reduction,
# in multiples of their first tensor, result included. (A scalar result may keep a temporary as its
# storage.)
_LOSSES = {
    "aten::binary_cross_entropy": (3, 1, 1),
    "aten::huber_loss": (2, 1, 1),
    "aten::mse_loss": (2, 2, 1),
    "aten::smooth_l1_loss": (2, 2, 1),
    "aten::binary_cross_entropy_with_logits": (4, 2, 2),
    "aten::soft_margin_loss": (2, 1, 1),
}
# Kernels that copy their first tensor if it is neither contiguous nor channels-last.
_COPIED_FIRST = re.compile(r"aten::(_?upsample_\w+_backward|max_pool[23]d\w*|avg_pool2d\w*)")
# Kernels that follow the format of the gradient: what else they read, and the result, is copied if
# it has the other one of these two.
_POOLED = re.compile(r"aten::(max_pool[23]d_with_indices|avg_pool2d|_adaptive_avg_pool2d)_backward")
# Small results are computed in channels-last format, from a copy and into a copy.
_UPSAMPLED = re.compile(r"aten::_?upsample_(bilinear|nearest|nearest_exact)2d")
_SMALL = 128  # height plus width of the result
_FEW_ROWS = 25  # of which Euclidean distances are taken one by one, not as a product


def formula_workspace(name: str, tensors: list[torch.Tensor], args: Any, made: int) -> int | None:
    """As `workspace.workspace_of`, for operators with at least one tensor. None: not known."""
    if name in _COPIED:
        return sum(bytes_of(t) for t in tensors[: _COPIED[name]] if not t.is_contiguous())
    if name in _FORMULAS:
        return _FORMULAS[name](tensors, args, made)
    if name in _LOSSES:
        place, reduced, unreduced = _LOSSES[name]
        several = unreduced if len(args) > place and args[place] == 0 else reduced
        return max(0, several * bytes_of(tensors[0]) - made)
    return _of_a_family(name, tensors, args, made)


def upsamples(name: str) -> bool:
    """Whether an operator enlarges images, and so makes small ones in channels-last format."""
    return _UPSAMPLED.fullmatch(name) is not None


def _of_a_family(name: str, tensors: list[torch.Tensor], args: Any, made: int) -> int | None:
    """Of operators with similar names, which are as many as there are dimensions or modes."""
    if name.startswith("aten::_fft_"):
        return fourier_workspace(name, tensors, args, made)
    if len(tensors) >= 2 and _POOLED.fullmatch(name):
        return _in_one_format(*tensors)
    if _COPIED_FIRST.fullmatch(name):
        return _copy_of(tensors[0])
    if upsamples(name):
        small = sum(args[1] or ()) <= _SMALL
        return made + bytes_of(tensors[0]) if small and not _channels_last(tensors[0]) else 0
    if "attention" in name and "flash" not in name:
        return made
    if name.startswith("aten::mkldnn_rnn_layer") and len(tensors) >= 5:
        return recurrent_workspace(tensors, name.endswith("_backward"))
    return None


def _first(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    return bytes_of(tensors[0])


def _unfolded(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    return bytes_of(tensors[0]) * (1 if tensors[0].is_contiguous() else 2)


def _folded(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """The result keeps a storage as large as the first tensor."""
    return max(0, bytes_of(tensors[0]) - made)


def _rolled(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Dimensions are rolled one after another; each intermediate result stays until the end."""
    dimensions = args[2] if len(args) > 2 else ()
    return made * max(0, len(dimensions) - 1)


def _selected(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Counts and their running sums where the source and the mask can be walked together; else the
    indices of true elements, twice. How many are true is not known; half is assumed."""
    source, mask = tensors[:2]
    together = torch.broadcast_shapes(source.shape, mask.shape)
    if source.shape == mask.shape and source.is_contiguous() and mask.is_contiguous():
        return max(0, 8 * mask.numel() - made)
    return int(16 * math.prod(together))


def _places(masks: list[torch.Tensor]) -> int:
    """The places of all elements of masks, in each of their dimensions: any may be true."""
    return sum(8 * m.dim() * m.numel() for m in masks if m.dtype in (torch.bool, torch.uint8))


def _indexed(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    return _places(tensors[1:])


def _written_at(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    return _places(tensors[1:-1])  # the last one is what is written


def _soft_margins(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    return 2 * made


def _base_grid(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """The coordinates of all points, with a one after them, for each transformation."""
    dimensions = tensors[0].shape[-2]
    return made * (dimensions + 1) // max(1, dimensions)


def _distances(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Euclidean distances of many rows are a product of copies that have two more columns."""
    one, two = tensors[:2]
    mode = args[3] if len(args) > 3 else None
    many = max(one.shape[-2], two.shape[-2]) > _FEW_ROWS
    if args[2] != 2 or mode == 2 or not (many or mode == 1):
        return 0
    return sum(bytes_of(t) + 2 * t.element_size() * math.prod(t.shape[:-1]) for t in (one, two))


def _table(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Its backward makes another table like that of its forward, which is the last it reads."""
    return bytes_of(tensors[-1])


def _antialiased(tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """The width is resized before the height, if both change."""
    (height, width), (tall, wide) = tensors[0].shape[-2:], args[1]
    return 0 if height == tall or width == wide else made // max(1, int(tall)) * height


_FORMULAS: dict[str, Callable[[list[torch.Tensor], Any, int], int]] = {
    **dict.fromkeys(_COMPOSED, _first),
    "aten::nll_loss_forward": _first,
    "aten::nll_loss2d_forward": _first,
    "aten::im2col": _unfolded,
    "aten::col2im": _folded,
    "aten::roll": _rolled,
    "aten::_ctc_loss_backward": _table,
    "aten::_embedding_bag": bags_workspace,
    "aten::_embedding_bag_backward": bags_backward_workspace,
    "aten::masked_select": _selected,
    "aten::index": _indexed,
    "aten::index_put": _written_at,
    "aten::_index_put_impl": _written_at,
    "aten::soft_margin_loss_backward": _soft_margins,
    "aten::_cdist_forward": _distances,
    "aten::affine_grid_generator": _base_grid,
    "aten::_upsample_bilinear2d_aa": _antialiased,
    "aten::_upsample_bicubic2d_aa": _antialiased,
}


def _channels_last(tensor: torch.Tensor) -> bool:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return form is not None and tensor.is_contiguous(memory_format=form)


def _copy_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() or _channels_last(tensor) else bytes_of(tensor)


def _in_one_format(gradient: torch.Tensor, *others: torch.Tensor) -> int:
    """The copies of what is not in the format of the gradient."""
    last = [_channels_last(t) and not t.is_contiguous() for t in (gradient, others[0])]
    return _copy_of(gradient) + (sum(map(bytes_of, others)) if last[0] != last[1] else 0)
