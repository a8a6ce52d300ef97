"""What oneDNN's LSTM layers take on the CPU, while they run and until their backward.

Problem: one operator runs all time steps, and keeps the gates of each for its backward in a result
whose size torch does not give for fake tensors. Invariant: for the sizes that were measured,
figures are at most a fifth too high. Imports `_compat`, results and scratchpad. Rejected: no figure
until a step was measured; the gates may be most of what it takes.
"""

from __future__ import annotations

import functools
import re

import torch

from lowtide import _compat
from lowtide.kernels.results import bytes_of
from lowtide.kernels.scratchpad import of_recurrence


def recurrent_workspace(tensors: list[torch.Tensor], backward: bool) -> int:
    """An LSTM layer on the CPU: the gates of all time steps, and weights in other layouts. Measured
    for 27 sizes; mostly a little too high."""
    source, *weights = tensors[:3]  # (steps, batch, channels), and twice (gates, channels)
    gates = bytes_of(source) // max(1, source.shape[-1]) * weights[0].shape[0]
    # Of the two biases no more is read, though torch gives a layer without any two of zeros that
    # are as large as the weights.
    parameters = sum(bytes_of(w) + w.shape[0] * w.element_size() for w in weights)
    more = gates * 9 // 2 if keeps_all_gates() else 0
    if backward:
        second = sum(bytes_of(w) for w in weights if _copied_again(w.shape[1]))
        return of_recurrence() + (parameters + second) * 21 // 20 + gates * 11 // 8 + more
    return of_recurrence() + parameters * 21 // 20 + gates + bytes_of(source) + more


def kept_for_backward(tensors: list[torch.Tensor]) -> int:
    """The extra output of an LSTM layer on the CPU, of which torch gives no size for fake tensors:
    gates and states of all time steps, padded. For the measured sizes at most a fifth too high."""
    source, weight = tensors[:2]
    steps, batch, channels = source.shape
    hidden = weight.shape[0] // 4
    states = 8 * (steps + 1) * batch * (max(hidden, channels) + 16)
    if keeps_all_gates():
        states += 4 * (steps + 1) * batch * hidden
    return source.element_size() * (steps * batch * (8 * hidden + 16) + states)


@functools.cache
def keeps_all_gates() -> bool:
    """Whether oneDNN's recurrent layers keep more: version 3.7 (torch 2.10) does, 3.12 does not."""
    version = re.search(r"MKL-DNN v(\d+)\.(\d+)", torch.__config__.show())
    return version is not None and (int(version[1]), int(version[2])) < (3, 12)


def _copied_again(channels: int) -> bool:
    """Whether a recurrent layer's backward copies a weight of so many channels a second time. Rows
    that fill cache lines, and no pages, are read where they are; known of what was measured."""
    if _compat.onednn_instructions() != "AVX2" or keeps_all_gates():
        return True
    return channels % 16 != 0 or channels % 256 == 0
