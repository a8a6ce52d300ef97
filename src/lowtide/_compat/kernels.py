"""Which kernels torch may take on this CPU.

Problem: what an operator allocates depends on the library that runs it. Invariant: as in
`lowtide._compat`, of which this is a part; what torch cannot say is taken for no. Imports torch.
Rejected: reading the CPU's flags, of which torch asks for several, other ones in other versions.
"""

from __future__ import annotations

import functools

import torch


def onednn_is_on() -> bool:
    """Whether torch may use oneDNN at all."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has convolutions for this type."""
    return dtype in _types() and onednn_is_on()


@functools.cache
def _types() -> frozenset[torch.dtype]:
    known = {torch.float32}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        if asked is not None and asked():
            known.add(dtype)
    return frozenset(known)
