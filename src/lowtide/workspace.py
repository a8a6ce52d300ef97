"""Memory inside an operator, where it has not been measured yet.

Problem: a convolution may allocate many times its output as workspace, unseen by anything but the
allocator; before a step has been measured a limit must be kept all the same. Invariant: estimates
err to the high side, and are used only until there is a measurement. Imports torch. Rejected:
ignoring it: 182 MiB of a 383 MiB peak of a 3D U-Net is one such buffer.
"""

from __future__ import annotations

from typing import Any

import torch


def workspace_of(name: str, tensors: list[torch.Tensor], args: Any, made: int) -> int:
    """Bytes that the forward kernel allocates and frees while it runs, at most.

    Convolutions on the CPU reorder input, weight and output for oneDNN, or unfold the input
    (im2col): kernel volume times channels times output points (transposed: input points).
    """
    if "convolution" in name and len(tensors) >= 2:
        source, weight = tensors[0], tensors[1]
        reordered = _bytes(source) + _bytes(weight) + made
        transposed = len(args) > 6 and bool(args[6])
        if transposed and source.device.type == "cpu":
            points = source.numel() // max(1, source.shape[0] * source.shape[1])
            unfolded = weight[0].numel() * points * source.element_size()
            return max(reordered, unfolded)
        return reordered
    if "attention" in name and "flash" not in name:
        return made
    return 0


def backward_temporaries(name: str, grads: int, made: int, workspace: int) -> int:
    """Bytes that the backward of an operation allocates, gradients of its inputs included."""
    if "convolution" in name:
        return 2 * grads + made + workspace
    if "attention" in name or "norm" in name or "softmax" in name:
        return 2 * grads + made
    return grads + made


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
