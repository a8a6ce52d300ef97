"""What torch's convolutions on the CPU allocate while they run.

Problem: a convolution copies its tensors into layouts of its own, and these copies are most of the
peak of many steps. Invariant: formulas as measured, kernel by kernel, on one to sixteen threads,
for channels that are and are not multiples of oneDNN's block, in both memory formats, forward and
backward; `benchmarks/workspace.py` measures them again. Imports `_compat`, layouts, wide,
`wide_products`, avx2, tiles and unfolding. Rejected: running each convolution once to find out,
which needs the memory that has to be kept free.
"""

from __future__ import annotations

from lowtide import _compat
from lowtide.kernels.avx2 import narrow_workspace
from lowtide.kernels.layouts import copied, ordered, runs_last
from lowtide.kernels.tiles import tiles_workspace
from lowtide.kernels.unfolding import Convolved, unfolded
from lowtide.kernels.wide import is_depthwise, wide_workspace
from lowtide.kernels.wide_products import shared_width, shared_workspace


def convolution_workspace(call: Convolved) -> int:
    """Bytes that a convolution on the CPU allocates besides its results."""
    source, weight, _, options, given, *_ = call
    if not source.numel():  # torch runs no kernel
        return 0
    instructions = _compat.onednn_instructions()
    itself, last = unfolded(source, weight, "cpu", options), runs_last(source, weight)
    half = source.element_size() == 2
    by_channel = options.groups > 1 and is_depthwise(source, weight)
    if _compat.onednn_tiles(source.dtype) and not itself and not by_channel:
        copies = copied(source, last) + (0 if given is None else copied(given, last))
        copies += ordered(weight, last)
        return copies + tiles_workspace(call, last)
    if half or itself:
        return wide_workspace(call)
    copies = copied(source, last) + (0 if given is None else copied(given, last))
    copies += ordered(weight, last)
    width, certain = shared_width(source, weight, options, given is not None, last)
    wide = copies + shared_workspace(call, last, width) if width else 0
    wide = wide if certain else max(wide, wide_workspace(call))
    if instructions == "AVX512":
        return wide
    narrow = copies + narrow_workspace(call, last)
    if instructions == "AVX2":
        return narrow
    # Kernels of other CPUs were not measured. Where they lack one, images are unfolded instead. The
    # largest known figure is taken.
    return max(narrow, copies + narrow_workspace(call, last, unfolds=True), wide)
