"""Bytes of tensors, as they are and in whole blocks: what the formulas for all kernels begin with.

Problem: oneDNN stores tensors in blocks of channels, so a copy may be many times as large as the
tensor. Invariant: a tensor's bytes are those of its elements, whatever its layout is and whether it
has memory. Imports torch. Rejected: `Tensor.nbytes`, which raises for sparse tensors.
"""

from __future__ import annotations

import torch

CHANNEL_BLOCK = 16
"""oneDNN pads channels to a multiple of this when it reorders a tensor."""
FLOAT = 4
"""Bytes of a float32, in which sums are accumulated, even those of half-precision tensors."""
PAGE = 4096
"""oneDNN begins some parts of its scratchpads at a multiple of this."""


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def up(number: int, multiple: int) -> int:
    """The least multiple that is not smaller than a number."""
    return -(-number // multiple) * multiple


def padded(nbytes: int, channels: int, block: int = CHANNEL_BLOCK) -> int:
    """Bytes of a tensor of `nbytes` and so many channels, with the channels in whole blocks."""
    return nbytes * up(channels, block) // max(1, channels)
