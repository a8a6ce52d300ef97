"""Results of norms on the CPU whose dtype torch's shape functions get wrong.

Problem: with autocast, a norm reads half-precision activations and float32 weights. Its kernel then
keeps the statistics in float32, and shapes alone say half precision: from its first norm on, a real
step was another one than the planned one. Invariant: as the kernels do on real tensors. Imports
torch. Rejected: running the kernel on a small example, as only torch knows which sizes go together.
"""

from __future__ import annotations

from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)
_NORMS = frozenset(
    f"aten::{name}"
    for name in (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
    )
)


def dtypes_of_results(name: str, args: Any) -> dict[int, torch.dtype]:
    """The dtypes of the results, by position, that may be others than shapes alone say."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not tensors or tensors[0].device.type != "cpu" or tensors[0].dtype not in _HALF:
        return {}
    if name in _NORMS:
        mixed = any(t.dtype == torch.float32 for t in tensors[1:])
        return dict.fromkeys((1, 2), torch.float32 if mixed else tensors[0].dtype)
    if name == "aten::native_group_norm_backward":
        return {0: tensors[1].dtype}
    return {}
