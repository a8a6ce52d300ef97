"""Which tests hold on which CPUs.

Problem: what a convolution takes is known kernel by kernel, of oneDNN's kernels with AVX-512 and
with AVX2; elsewhere the model takes the largest of what is known, which is no figure to test.
Invariant: what is asked is what oneDNN uses, not what the CPU has. May import lowtide.
Rejected: wider tolerances, which would hide a wrong formula where it is known.
"""

from __future__ import annotations

import pytest

from lowtide._compat import onednn_instructions

exact_workspaces = pytest.mark.skipif(
    not onednn_instructions(),
    reason="oneDNN uses neither AVX-512 nor AVX2 here: its workspaces are not known, only bounded",
)
avx2_workspaces = pytest.mark.skipif(
    onednn_instructions() != "AVX2",
    reason="measures kernels of AVX2, and oneDNN uses others here",
)
