"""What kernels on a GPU of NVIDIA allocate besides their results, as far as it is more than little.

Problem: dry runs and first steps need it before anything was measured, and there it differs from
what the CPU's kernels take: dropout and losses take nothing, but cuDNN copies what it convolves
into another layout, sums over rows go through a buffer of up to 132 MiB, and attention adds up the
gradient of the queries in float32. Invariant: a function of shapes, types and layouts, fitted to
what an H100 took (torch 2.11, cuDNN 9.19): 996 random convolutions, 313 programs of other operators
and 150 of attention; the number of multiprocessors is the H100's on any card. Imports blocks,
results, unfolding. Rejected: asking cuDNN, which needs the card and the memory.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from lowtide.kernels.blocks import FLOAT
from lowtide.kernels.results import bytes_of
from lowtide.kernels.unfolding import Options, channels_made

_PROCESSORS = 132
_SPLIT = 33 << 19  # bytes of partial gradients of a convolution's parameter, at most

# ---------------------------------------------------------------------------- reductions

_THREADS = 128  # of a block, each of which reduces `_BESIDE` neighbouring results at once
_BESIDE = 4
_WARP = 32
_RESIDENT = 2048  # threads of one multiprocessor
_FEWEST, _MOST = 16, 256  # values for each thread, before and when blocks share a result
_STATE = {"var": 4, "std": 4, "var_mean": 4, "std_mean": 4}  # floats that a result is made of
_REDUCTION = re.compile(
    r"aten::(sum|mean|amax|amin|prod|norm|linalg_vector_norm|logsumexp|any|all|nansum"
    r"|(?:var|std)(?:_mean)?)"
)


def _shared(source: torch.Tensor, results: int, state: int) -> int:
    """Bytes through which blocks combine their parts of `results` values of `state` bytes, if the
    innermost dimension of `source` is kept (`setReduceConfig` in ATen's `Reduce.cuh`)."""
    beside = max(1, results // _BESIDE)
    width = min(_WARP, 1 << (beside.bit_length() - 1))
    each = source.numel() // max(1, results) // (_THREADS // width)
    grid, most = -(-beside // width), _PROCESSORS * (_RESIDENT // _THREADS)
    if each < _MOST or grid > most:
        return 0
    blocks = max(min(-(-most // grid), -(-each // _FEWEST)), -(-each // _MOST))
    return state * results * blocks * width * _BESIDE if blocks > 1 else 0


def _keeps_innermost(source: torch.Tensor, dims: Any) -> bool:
    """Whether the dimension along which neighbours in memory lie is among the results'."""
    if isinstance(dims, int):
        dims = (dims,)
    if not isinstance(dims, list | tuple) or not dims or not source.dim():
        return False
    wide = [at for at, size in enumerate(source.shape) if size > 1]
    if not wide:
        return False
    innermost = min(wide, key=lambda at: source.stride(at))
    return innermost not in {int(at) % source.dim() for at in dims}


def _dims_of(name: str, args: Any) -> Any:
    at = 2 if name in ("aten::norm", "aten::linalg_vector_norm") else 1
    dims = args[at] if len(args) > at else None
    return None if isinstance(dims, bool) else dims  # `var(x, unbiased)`


def _reduced(name: str, kind: str, tensors: list[torch.Tensor], args: Any, made: int) -> int:
    source, dims = tensors[0], _dims_of(name, args)
    copied = bytes_of(source) if kind == "logsumexp" else 0
    if not _keeps_innermost(source, dims):
        return copied
    shape = [dims] if isinstance(dims, int) else dims
    results = source.numel() // max(1, math.prod(source.shape[int(at)] for at in shape))
    state = max(FLOAT, source.element_size()) * _STATE.get(kind, 1)
    if not source.is_floating_point():
        state = 2 * FLOAT
    elif kind in ("amax", "amin"):
        state = source.element_size()
    return copied + _shared(source, results, state)


# ---------------------------------------------------------------------------- convolutions


def convolution(
    source: torch.Tensor, weight: torch.Tensor, options: Options, given: int, *, backward: bool
) -> int:
    """cuDNN's copies of input, output and parameter with their channels last and a multiple of 8 of
    them (4 in float32), and parts of the parameter's gradient, which it adds up.

    `given` are the bytes of the output, or of its gradient.
    """
    size = source.element_size()
    multiple = 8 if size == 2 else 4
    parameter, each = bytes_of(weight), weight.shape[1] if weight.dim() > 1 else 1
    channels, others = source.shape[1], channels_made(weight, options)
    copied = _aligned(parameter, each, multiple)
    last = _channels_last(source)
    for nbytes, count in ((bytes_of(source), channels), (given, others)):
        padded = _aligned(nbytes, count, multiple)
        copied += padded if not last or padded > nbytes else 0
    if options.groups > 1 and options.groups == channels:  # torch has kernels of its own
        copied = 0
    pointwise = math.prod(weight.shape[2:]) * options.groups * max(options.stride) == 1
    fits = last or math.prod(source.shape[2:]) % multiple == 0
    if not backward:
        return 0 if pointwise and fits else copied
    if pointwise and fits and not last and source.dim() < 5:
        copied = 0  # a product of matrices
    floats = parameter // size * FLOAT
    return copied + min(_SPLIT, _PROCESSORS * floats) + 2 * floats


def _aligned(nbytes: int, channels: int, multiple: int) -> int:
    return nbytes // max(1, channels) * (-(-channels // multiple) * multiple)


# ---------------------------------------------------------------------------- the others

_NOTHING = re.compile(
    r"aten::(native_dropout(_backward)?|nll_loss(2d)?_forward|_fused_rms_norm|median|nanmedian"
    r"|_?upsample_\w+2d)"
)
# Kernels without a channels-last form: they copy their first tensor, and some their result too.
_COPIED = re.compile(r"aten::(_adaptive_avg_pool3d|reflection_pad2d)")
_COPIED_BOTH = re.compile(r"aten::(upsample_nearest3d|adaptive_max_pool[23]d(_backward)?)")
_COPIED_GRADIENT = re.compile(r"aten::(max_pool[23]d\w*|avg_pool2d)_backward")
_SORTED = 48  # bytes that sorting takes for each index, so that equal ones are added up in order
_FEW_INDICES = 3072  # of an embedding, which need not be sorted
_GATES = {
    "aten::_thnn_fused_lstm_cell_backward_impl": 2.0,
    "aten::_thnn_fused_gru_cell_backward": 1.2,
}  # multiples of the last tensor
_MASKS = (torch.bool, torch.uint8)
_WIDE_HEAD = 128  # wider rows are accumulated in float32


def cuda_workspace(name: str, tensors: list[torch.Tensor], args: Any, made: int) -> int | None:
    """Bytes that an operator other than a convolution allocates and frees on CUDA; None if nothing
    is known that differs from other devices."""
    if not tensors or any(t.is_nested or t.layout is not torch.strided for t in tensors):
        return None
    first = tensors[0]
    reduction = _REDUCTION.fullmatch(name)
    if _NOTHING.fullmatch(name):
        return 0
    if reduction is not None:
        return _reduced(name, reduction[1], tensors, args, made)
    if "attention" in name:
        return _attention(name, tensors)
    if name in _GATES:
        return int(_GATES[name] * bytes_of(tensors[-1]))
    if name == "aten::_softmax_backward_data":  # the product of its two arguments
        return bytes_of(first)
    if name == "aten::_safe_softmax":  # a mask, to find rows that are masked out entirely
        return made // 4
    if name.startswith("aten::_fft_"):
        return made if name.endswith("c2c") else bytes_of(first)
    if name == "aten::embedding_dense_backward" and len(tensors) > 1:
        return _embedding(first, tensors[1].numel(), args)
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return _indexed(name, tensors)
    return _of_layout(name, tensors, made)


def _of_layout(name: str, tensors: list[torch.Tensor], made: int) -> int | None:
    first = tensors[0]
    if _COPIED.fullmatch(name):
        return 0 if first.is_contiguous() else bytes_of(first)
    if _COPIED_BOTH.fullmatch(name):
        last = any(map(_channels_last, tensors[:2]))
        return bytes_of(first) + made if last else 0
    if _COPIED_GRADIENT.fullmatch(name) and len(tensors) > 1:
        return bytes_of(first) if _channels_last(first) != _channels_last(tensors[1]) else 0
    return None


def _embedding(given: torch.Tensor, count: int, args: Any) -> int:
    """Sums in float32 of at most ten rows each, and the sorted indices."""
    if count <= _FEW_INDICES:
        return 0
    rows = count // 10 + min(count, int(args[2]) if len(args) > 2 else count)
    return rows * (given.numel() // count) * FLOAT + _SORTED * count


def _indexed(name: str, tensors: list[torch.Tensor]) -> int:
    """The indices of a mask's true elements, of which half are assumed to be true; and where values
    are added, sorted indices and a dense copy of the values."""
    masks = [t for t in tensors[1:] if t.dtype in _MASKS]
    found = sum(8 * t.dim() * t.numel() // 2 for t in masks)
    if name == "aten::index":
        return found
    indices = [t for t in tensors[1:] if not t.is_floating_point() and not t.is_complex()]
    count = max((t.numel() // (2 if t.dtype in _MASKS else 1) for t in indices), default=0)
    values = tensors[-1]
    return _SORTED * count + (0 if values.is_contiguous() else bytes_of(values))


def _attention(name: str, tensors: list[torch.Tensor]) -> int:
    """In backward the gradient of the queries in float32, a number for each row, and a copy of the
    gradient that is given, if it has gaps."""
    if "backward" not in name:
        query = tensors[0]
        wide = "efficient" in name and query.shape[-1] > _WIDE_HEAD and query.element_size() == 2
        return FLOAT * query.numel() if wide else 0
    given, query = tensors[:2]
    copied = 0 if _dense(given) else bytes_of(given)
    rows = query.numel() // max(1, query.shape[-1])
    return copied + FLOAT * (query.numel() + rows)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether it has neither gaps nor elements that stand for several, in whatever order."""
    order = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    )  # fmt: skip
    step = 1
    for stride, size in order:
        if stride != step:
            return False
        step *= size
    return True


def _channels_last(tensor: torch.Tensor) -> bool:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return (
        form is not None and tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()
    )
