"""Which kernels torch may take on this CPU.

Problem: what an operator allocates depends on the library that runs it. Invariant: as in
`lowtide._compat`, of which this is a part; what torch cannot tell counts as no. Imports torch.
Rejected: reading the CPU's flags for dtypes, of which torch checks several, and others in other
versions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch


def ctc_losses(*args: Any) -> torch.Tensor:
    """`torch.ctc_loss` of each sequence, with the lengths in lists. Public once there is a
    `reduction="none"` that takes lists, whatever kind of tensor the rest is."""
    losses, _ = torch.ops.aten._ctc_loss.default(*args)
    found: torch.Tensor = losses
    return found


def onednn_is_on() -> bool:
    """Whether torch may use oneDNN at all."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has convolutions for this dtype."""
    return dtype in _types() and onednn_is_on()


# The values of `ONEDNN_MAX_CPU_ISA` below AVX-512, and whether they allow AVX2.
_LESS = {"SSE41": False, "AVX": False, "AVX2": True, "AVX2_VNNI": True, "AVX2_VNNI_2": True}
# The parts of AVX-512 that oneDNN's kernels need, all of them.
_WIDE_PARTS = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_SECOND_CACHE = 2 << 20  # bytes, the most that cores with AVX2 but not AVX-512 have


@functools.cache
def onednn_instructions() -> str:
    """The widest instructions that oneDNN's kernels use: "AVX512", "AVX2", or "" for any others.

    `torch.backends.cpu.get_cpu_capability()` is about torch's own kernels: `ATEN_CPU_CAPABILITY`
    restricts those, and another variable oneDNN's. It is read only if torch does not list what the
    CPU has.
    """
    known = _capabilities()
    wide = all(known.get(part) for part in _WIDE_PARTS)
    narrow = bool(known.get("avx2"))
    if "avx2" not in known:
        said = torch.backends.cpu.get_cpu_capability()
        wide, narrow = said.startswith("AVX512"), said == "AVX2"
    least = _LESS.get(_most_instructions())
    if wide and least is None:
        return "AVX512"
    return "AVX2" if (wide or narrow) and least is not False else ""


def onednn_tiles(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype in AMX's tiles, by kernels of their own."""
    known = _capabilities()
    part = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}.get(dtype, "")
    asked = _most_instructions()
    allowed = "AMX" in asked or asked in ("", "ALL", "DEFAULT")
    return allowed and onednn_is_on() and bool(known.get("amx_tile")) and bool(known.get(part))


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has instructions that multiply this half-precision dtype. If not, it takes it
    all the same, by way of float32."""
    part = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}.get(dtype, "")
    allowed = _most_instructions() not in (*_LESS, "AVX512_CORE", "AVX512_CORE_VNNI")
    return onednn_tiles(dtype) or (allowed and bool(_capabilities().get(part)))


def second_cache() -> int:
    """Bytes of a core's second-level cache, which decides how much oneDNN unfolds at a time."""
    return int(_capabilities().get("l2_cache_size") or _SECOND_CACHE)


def _most_instructions() -> str:
    """What the user allows oneDNN to use at most; "" for anything."""
    asked = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return asked.upper()


@functools.cache
def _capabilities() -> Mapping[str, Any]:
    """What the CPU has, by torch's names; torch 2.10 tells less, and only by private functions."""
    asked = getattr(torch.cpu, "get_capabilities", None)
    if asked is not None:
        known: Mapping[str, Any] = asked()
        return known
    wide = torch.cpu._is_avx512_supported()  # all of these parts, or not
    tiles = dict.fromkeys(("amx_tile", "amx_bf16"), torch.cpu._is_amx_tile_supported())
    return {"avx2": torch.cpu._is_avx2_supported(), **dict.fromkeys(_WIDE_PARTS, wide), **tiles}


@functools.cache
def _types() -> frozenset[torch.dtype]:
    known = {torch.float32}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        if asked is not None and asked():
            known.add(dtype)
    return frozenset(known)
