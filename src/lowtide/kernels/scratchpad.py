"""What oneDNN's convolutions and recurrent layers allocate however small their tensors are.

Problem: most formulas for workspace say what grows with the tensors. Some kernels take some tens of
KiB besides, which is a lot in a small step: counted where it is not taken, it refuses limits that
can be met. Invariant: the largest scratchpad that was measured, unless torch is known to run the
convolution itself, or the formulas for workspace contain it, as those for AVX2 and contiguous
tensors do. Imports `_compat` and unfolding. Rejected: leaving it out, which exceeds limits of small
steps.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from lowtide import _compat
from lowtide.kernels.unfolding import options_of, unfolded

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
    if unfolded(source, weight, "cpu", options_of(args, backward)):
        return 0
    contained = _compat.onednn_instructions() == "AVX2" and source.dtype == torch.float32
    return _ROUNDED if contained and _is_plain(source) and _is_plain(weight) else LARGEST


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous, and not also channels-last because it has one channel."""
    strides = accumulate(reversed(tensor.shape[1:]), operator.mul, initial=1)
    return tensor.stride() == tuple(strides)[::-1]
