"""Workspace of an operator that has not been measured yet.

Problem: a convolution may allocate many times its output as workspace, which only the allocator
sees; a limit must be kept even before a step has been measured. Invariant: estimates err to the
high side, and are used only until there is a measurement. Imports operators and other kernels.
Rejected: ignoring it: in a 3D U-Net, one such buffer is 182 MiB of a peak of 383 MiB.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from lowtide.kernels import cuda
from lowtide.kernels.blocks import padded
from lowtide.kernels.convolution import convolution_workspace
from lowtide.kernels.cuda import cuda_workspace
from lowtide.kernels.formulas import formula_workspace, upsamples
from lowtide.kernels.pointwise import pointwise_workspace
from lowtide.kernels.products import product_workspace
from lowtide.kernels.promotion import converted, out_of_place
from lowtide.kernels.recurrent import kept_for_backward
from lowtide.kernels.results import bytes_of, is_sparse, made_by
from lowtide.kernels.scratchpad import scratchpad
from lowtide.kernels.unfolding import (
    Convolved,
    Options,
    channels_made,
    options_of,
    unfolded,
    unfolded_workspace,
)
from lowtide.tape.operators import facts_of
from lowtide.tape.values import tensors_in

_MOST = 1 << 14  # calls that are remembered
_NARROW = 8  # fewer channels than this are read as they are; only their gradient is reordered
_FORMULA = 4  # times its arguments and results: what a backward that is a formula may have at once
# Their backward is one kernel for each gradient, or two.
_SIMPLE = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "add", "add_", "sub", "mul", "neg", "clone",
        "copy_", "_to_copy", "cat", "stack", "sum", "mean", "where", "tanh", "sigmoid", "relu",
        "relu_", "leaky_relu", "gelu", "silu", "_softmax", "_log_softmax", "native_dropout",
        "native_layer_norm", "native_batch_norm", "max_pool2d_with_indices", "avg_pool2d",
        "upsample_nearest2d", "upsample_bilinear2d", "nll_loss_forward",
    )
)  # fmt: skip
# The backward of these is a formula of several operators, with temporaries.
_SEVERAL_STEPS = frozenset(
    f"aten::{name}"
    for name in ("pow", "cos", "tan", "div", "reciprocal", "std", "var", "linalg_vector_norm")
)

# Workspace of kernels on the CPU, as a share of the bytes of their results.
_SCRATCH = {
    "aten::nll_loss_forward": 0.0,
    "aten::nll_loss2d_forward": 0.0,
    "aten::_safe_softmax": 0.25,  # a mask, to find rows that are masked out entirely
}


def unfolds(name: str) -> bool:
    """Whether an operator's workspace may be many times its output."""
    return "convolution" in name


def read_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensor arguments of a call, without those that it only writes its result to (`out`)."""
    written = facts_of(func).writes
    return tensors_in(args, {name: a for name, a in kwargs.items() if name not in written})


def workspace_of(
    name: str, tensors: list[torch.Tensor], args: Any, made: int, device: str | None = None
) -> int:
    """At most the bytes that a kernel allocates and frees while it runs, forward or backward.

    `tensors` are the tensors that are read (`read_by`), `args` the arguments, `made` the bytes of
    the outputs, also of those that are written into memory there was. `device` is the type of
    device to assume if the tensors have no memory.
    """
    name = out_of_place(name)
    if any(map(is_sparse, tensors)):  # not known, and no copy has a byte for each place
        return 0
    device = device or (tensors[0].device.type if tensors else "")
    if "convolution" in name and len(tensors) >= 2:
        return _of_a_convolution(name, tensors, args, made, device)
    known = cuda_workspace(name, tensors, args, made) if device == "cuda" else None
    if known is None:
        known = product_workspace(name, tensors, device)
    if known is None and tensors:
        known = formula_workspace(name, tensors, args, made)
    if known is not None:
        return known
    return converted(name, tensors, args) if tensors and tensors[0].device.type == "cpu" else 0


def _of_a_convolution(
    name: str, tensors: list[torch.Tensor], args: Any, made: int, device: str
) -> int:
    if name == "aten::convolution_backward" and len(tensors) >= 3:
        given, source, weight = tensors[:3]
        options = options_of(args, True)
        most = _convolution(source, weight, options, bytes_of(given), device, True)
    else:
        source, weight = tensors[:2]
        most = _convolution(source, weight, options_of(args, False), made, device, False)
    return most + (0 if device == "cuda" else scratchpad(name, args))


def _convolution(
    source: torch.Tensor,
    weight: torch.Tensor,
    options: Options,
    made: int,
    device: str,
    backward: bool,
) -> int:
    """On CUDA, what cuDNN takes. Else as on the CPU: the unfolded input (im2col), or oneDNN's
    reordered copies."""
    if device == "cuda":
        return cuda.convolution(source, weight, options, made, backward=backward)
    if unfolded(source, weight, source.device.type, options):
        copied = 0 if source.is_contiguous() else bytes_of(source) + bytes_of(weight)
        return copied + unfolded_workspace(Convolved(source, weight, made, options))
    channels_out = channels_made(weight, options)
    blocked = padded(made, channels_out)
    if source.shape[1] >= _NARROW or source.requires_grad:
        blocked += padded(bytes_of(source), source.shape[1])
    again = made if options.transposed else 0
    return blocked + again + 2 * bytes_of(weight)


def kernel_workspace(
    name: str, tensors: list[torch.Tensor], args: Any, made: int, device: str | None = None
) -> int:
    """As `workspace_of`, but as exact as possible, and for backward operators too.

    This is for predicting a peak; `workspace_of` is for staying under one. The formulas are for
    torch's CPU kernels as measured, kernel by kernel; for other devices nothing better is known.
    `device` is the type of device to assume if the tensors have no memory.
    """
    name = out_of_place(name)
    if name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
        return _flash(tensors, name.endswith("_backward"))
    device = device or (tensors[0].device.type if tensors else "")
    cpu = bool(tensors) and device == "cpu"
    if not cpu and upsamples(name):
        return 0
    if cpu and name in _SCRATCH:
        return int(_SCRATCH[name] * made)
    if cpu and name == "aten::native_batch_norm_backward":
        # A second gradient of its input: none for a batch that gets none, only sums over channels.
        if len(args) > 9 and not args[9][0]:
            return 3 * tensors[1].shape[1] * max(4, tensors[1].element_size())
        return bytes_of(tensors[1]) if 0 not in tensors[0].stride() else 0
    backward = name == "aten::convolution_backward"
    if not backward and name != "aten::convolution":
        # Tensors without memory do not tell their device, so `workspace_of` has not converted them.
        known = workspace_of(name, tensors, args, made, device)
        if known or not cpu or any(map(is_sparse, tensors)):
            return known
        return converted(name, tensors, args) or pointwise_workspace(name, tensors)
    shift = 1 if backward else 0
    if len(tensors) < shift + 2 or len(args) < 7:
        return 0
    source, weight = tensors[shift], tensors[shift + 1]
    options = options_of(args, backward)
    given = bytes_of(tensors[0]) if backward else made
    if not cpu:
        return _convolution(source, weight, options, given, device, backward)
    passes, _, bias = args[10] if backward and len(args) > 10 else (False, True, False)
    return convolution_workspace(
        Convolved(
            source,
            weight,
            given,
            options,
            tensors[0] if backward else None,
            bool(passes),
            bool(bias) if backward else len(tensors) > 2,
        )
    )


_known: dict[Hashable, tuple[int, int]] = {}  # calls, their workspace, and the scratchpad in it


def remembered_workspace(
    call: Hashable, name: str, func: Any, args: Any, kwargs: dict[str, Any], made: int
) -> tuple[int, int]:
    """`kernel_workspace` of a call, with the scratchpad, and the scratchpad; worked out once for
    all that equal `call`, which says what there is to know of the tensors and where they are. If it
    is None, nothing is remembered."""
    types = (*map(type, args), *map(type, kwargs.values()))  # as 1 == 1.0 == True
    key = call, types, made, torch.get_num_threads(), torch.get_default_dtype()
    found = None if call is None else _known.get(key)
    if found is None:
        pad = scratchpad(name, args)
        found = kernel_workspace(name, read_by(func, args, kwargs), args, made) + pad, pad
        if call is not None:
            if len(_known) >= _MOST:
                _known.clear()
            _known[key] = found
    return found


def _flash(tensors: list[torch.Tensor], backward: bool) -> int:
    """Flash attention on the CPU: a block of scores per thread, two in backward."""
    query, key = tensors[1:3] if backward else tensors[:2]
    length, width = query.shape[-2:]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    scores = rows * min(512, key.shape[-2])
    each = 2 * scores if backward else scores + rows * (2 + width)
    given = tensors[0].transpose(1, 2) if backward else None
    copied = 0 if given is None or given.is_contiguous() else bytes_of(given)
    return 4 * each * torch.get_num_threads() + copied


def room_for(
    name: str, func: Any, args: Any, kwargs: dict[str, Any], *, nearest: bool = False
) -> int:
    """Bytes that a call is about to allocate, outputs and workspace, from shapes alone.

    This is an upper estimate; with `nearest`, the likeliest figure, without a scratchpad.
    """
    tensors = tensors_in(args, kwargs)
    made = made_by(func, args, kwargs)
    if name == "aten::mkldnn_rnn_layer":
        made += kept_for_backward(tensors)
    near = kernel_workspace(name, tensors, args, made)
    if nearest:
        return made + near
    return made + max(near, workspace_of(name, tensors, args, made))


def backward_temporaries(name: str, grads: int, made: int, workspace: int) -> int:
    """Bytes that the backward of an operation allocates, including the gradients of its inputs."""
    if "convolution" in name:
        return grads + workspace
    if name in _SEVERAL_STEPS:
        return grads + 2 * made
    if "norm" in name or "mm" in name:
        return grads
    if "attention" in name or "softmax" in name:
        return grads + made
    return grads + made


def most_in_backward(name: str, grads: int, made: int, workspace: int) -> int:
    """Bytes that the backward of an operation allocates at most, counted as in
    `backward_temporaries`: with copies of what it reads, and with the temporaries of a formula for
    what is not known to be simple."""
    if name in _SIMPLE:
        return grads + 2 * made + 2 * workspace
    return _FORMULA * (grads + made) + 2 * workspace
