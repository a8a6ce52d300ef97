"""What oneDNN's convolutions and recurrent layers allocate however small their tensors are.

Problem: most formulas for workspace say what grows with the tensors. Some kernels take some tens of
KiB besides, which is a lot in a small step: counted where it is not taken, it refuses limits that
can be met. Invariant: the largest scratchpad that was measured, unless torch is known to run the
convolution itself, or the formulas for workspace contain it, as most of those for float32 and
contiguous tensors do. Imports `_compat`, layouts and unfolding. Rejected: leaving it out, which
exceeds limits of small steps.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from lowtide import _compat
from lowtide.kernels.layouts import has_last, is_last, runs_last
from lowtide.kernels.unfolding import Options, options_of, unfolded

LARGEST = 40 << 10  # bytes on each thread
_ROUNDED = 512  # bytes on each thread: what formulas that contain the rest were measured to miss
_RECURRENT = 18 << 10  # bytes that recurrent layers were measured to take with AVX2
_OPTIONS = 9  # arguments of a call of `convolution`


def scratchpad(name: str, args: Sequence[Any]) -> int:
    """At most the bytes that a call of an operator, or its backward, takes besides what the
    formulas for its workspace give."""
    return _on_each_thread(name, args) * torch.get_num_threads() if "convolution" in name else 0


def of_recurrence() -> int:
    """At most the bytes that a layer of a recurrent net takes besides what grows with its size."""
    return _RECURRENT if _compat.onednn_instructions() == "AVX2" else LARGEST


def _on_each_thread(name: str, args: Sequence[Any]) -> int:
    backward = name == "aten::convolution_backward"
    read = args[1:] if backward else args
    if (name != "aten::convolution" and not backward) or len(read) < _OPTIONS:
        return LARGEST
    source, weight = read[:2]
    if source.device.type != "cpu":
        return LARGEST
    options = options_of(args, backward)
    if unfolded(source, weight, "cpu", options):
        return 0
    by_channel = weight.shape[1] == 1 and not options.transposed
    if runs_last(source, weight):
        contained = _is_contained_last(source, weight, options, backward)
    else:
        plain = source.dtype == torch.float32 and _is_plain(source) and _is_plain(weight)
        contained = plain and _is_contained(options, by_channel, backward)
    return _ROUNDED if contained else LARGEST


def _is_contained_last(
    source: torch.Tensor, weight: torch.Tensor, options: Options, backward: bool
) -> bool:
    """The same of tensors that have their channels last, all of them. It is known of images with
    AVX-512, where it has instructions for their dtype."""
    known = source.dtype == torch.float32 or (
        source.dtype == torch.bfloat16
        and _compat.onednn_multiplies(source.dtype)
        and not _compat.onednn_tiles(source.dtype)
    )
    known = known and _compat.onednn_instructions() == "AVX512" and source.dim() == 4
    plain = options.groups == max(options.dilation) == 1 and not options.transposed
    formats = is_last(source) and (has_last(weight) or max(weight.shape[2:]) == 1)
    return known and plain and formats and (not backward or torch.get_num_threads() == 1)


def _is_contained(options: Options, by_channel: bool, backward: bool) -> bool:
    """Whether the formulas for workspace contain the scratchpad, for contiguous float32 tensors.
    With AVX-512 they lack what threads sum in part, and are not exact for some dilated and grouped
    convolutions."""
    instructions = _compat.onednn_instructions()
    if instructions != "AVX512":
        return instructions == "AVX2"
    exact = max(options.dilation) == 1 and (options.groups == 1 or by_channel)
    return exact and (not backward or torch.get_num_threads() == 1)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous, and not also channels-last because it has one channel."""
    strides = accumulate(reversed(tensor.shape[1:]), operator.mul, initial=1)
    return tensor.stride() == tuple(strides)[::-1]
