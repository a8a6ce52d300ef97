"""Which tests apply on which CPUs.

Problem: the workspace of convolutions is known kernel by kernel, for oneDNN with AVX-512, with
AVX2 and with AMX; on other CPUs the model uses the largest known figure, which cannot be tested
exactly. Invariant: what counts is the instruction set that oneDNN uses, not what the CPU has. May
import lowtide. Rejected: wider tolerances, which would hide wrong formulas on CPUs where they are
known.
"""

from __future__ import annotations

import pytest
import torch

from lowtide._compat import onednn_instructions, onednn_tiles

exact_workspaces = pytest.mark.skipif(
    not onednn_instructions(),
    reason="oneDNN uses neither AVX-512 nor AVX2 here: its workspaces are not known, only bounded",
)
avx512_workspaces = pytest.mark.skipif(
    onednn_instructions() != "AVX512",
    reason="measures kernels of AVX-512, and oneDNN uses others here",
)
avx2_workspaces = pytest.mark.skipif(
    onednn_instructions() != "AVX2",
    reason="measures kernels of AVX2, and oneDNN uses others here",
)
untiled_workspaces = pytest.mark.skipif(
    onednn_tiles(torch.bfloat16),
    reason="measures kernels without AMX, and oneDNN uses it here",
)
tile_workspaces = pytest.mark.skipif(
    not onednn_tiles(torch.bfloat16),
    reason="measures kernels of AMX, and oneDNN uses others here",
)
