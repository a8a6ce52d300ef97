"""How long an operation would take: a model of the device, for steps that have not been run.

Problem: what to recompute depends on times, and a dry run has none. Invariant: an estimate is a
function of shapes and of a few rates of the device, so that equal shapes cost the same; only the
ratios between operations matter to a plan, and a budget replaces the estimates by measurements.
Imports tape values and unfolding. Rejected: timing every operator on random data, which needs the
memory that a dry run avoids; and measuring the device's rates, which would give each rank of a
process group a different plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import UsageError
from lowtide.kernels.unfolding import options_of, unfolded
from lowtide.tape.values import flatten

_DRAW = 6.0  # nanoseconds that the CPU's generator takes for each number it draws
# torch's own convolutions on the CPU unfold each image: how many times longer that takes than
# moving as many bytes, and the size up to which the unfolded image stays in cache.
_UNFOLDING, _CACHED = 16, 4 << 20
# On the CPU, how many times longer a kernel takes than moving its bytes would.
_HEAVY = {
    "native_batch_norm": 5.5,
    "native_batch_norm_backward": 1.7,
    "native_layer_norm": 4.0,
    "native_layer_norm_backward": 3.0,
    "native_group_norm": 1.5,
    "native_group_norm_backward": 1.5,
    "_softmax": 5.5,
    "_softmax_backward_data": 3.0,
    "_safe_softmax": 8.0,
    "_log_softmax": 2.5,
    "max_pool2d_with_indices": 20.0,
    "max_pool3d_with_indices": 20.0,
    "avg_pool2d": 8.0,
    "avg_pool2d_backward": 5.0,
    "avg_pool3d": 8.0,
    "avg_pool3d_backward": 5.0,
    "upsample_nearest2d": 5.0,
    "upsample_nearest2d_backward": 2.5,
    "upsample_nearest3d": 10.0,
    "upsample_nearest3d_backward": 10.0,
    "upsample_bilinear2d_backward": 25.0,
    "upsample_trilinear3d": 28.0,
    "upsample_trilinear3d_backward": 25.0,
    "_prelu_kernel": 2.0,
    "_prelu_kernel_backward": 7.0,
    "gelu": 2.0,
    "gelu_backward": 2.5,
    "tanh": 6.0,
    "tanh_": 6.0,
    "elu_": 3.0,
    "exp": 2.5,
    "masked_fill": 2.7,
    "eq": 2.7,
    "ne": 2.7,
    "index": 5.0,
    "index_put": 9.0,
    "scatter_": 2.5,
    "sum": 1.6,
    "cat": 2.0,
    "_to_copy": 1.2,
}
_IDLE = frozenset(
    ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators that neither read nor write."""
_THIN = 48  # a batched product with a side shorter than this runs below the full rate on the CPU
_ATTENTION = "scaled_dot_product"


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Rates of a device.

    Attributes:
        name: shown to the user.
        flops: floating-point operations per second of a large product, in single precision.
        half_flops: the same in half precision (bfloat16, float16).
        bandwidth: bytes per second that a simple kernel moves, reads and writes together.
        launch: seconds that every operation costs at least.
    """

    name: str
    flops: float
    half_flops: float
    bandwidth: float
    launch: float


# What large kernels reach in practice, not the peak figures of data sheets. Single-precision
# products are without TF32, which is torch's default.
_KNOWN = {
    "H200": DeviceModel("H200", 45e12, 650e12, 3.8e12, 4e-6),
    "H100": DeviceModel("H100", 45e12, 600e12, 2.6e12, 4e-6),
    "A100": DeviceModel("A100", 18e12, 240e12, 1.5e12, 5e-6),
    "V100": DeviceModel("V100", 14e12, 90e12, 0.75e12, 6e-6),
    "L40S": DeviceModel("L40S", 60e12, 180e12, 0.7e12, 5e-6),
    "L40": DeviceModel("L40", 60e12, 150e12, 0.7e12, 5e-6),
    "L4": DeviceModel("L4", 20e12, 60e12, 0.25e12, 6e-6),
    "T4": DeviceModel("T4", 6e12, 40e12, 0.25e12, 7e-6),
    "4090": DeviceModel("RTX 4090", 60e12, 150e12, 0.85e12, 5e-6),
    "3090": DeviceModel("RTX 3090", 25e12, 65e12, 0.8e12, 5e-6),
}
_USUAL = "A100"


def device_model(device: torch.device) -> DeviceModel:
    """The model of a device, from a table: the same in every process and rank."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        # Per core of a server. What matters is the ratio of operations to bytes.
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        return DeviceModel(name, 9e10 * threads, 9e10 * threads,
                           2e10 * math.sqrt(threads), 3e-6)  # fmt: skip
    name = ""
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    return rates_of(name) or _KNOWN[_USUAL]


def rates_of(name: str) -> DeviceModel | None:
    """The rates of a GPU, by its driver's name for it ("NVIDIA A100-SXM4-80GB"); None: unknown."""
    words = set(re.split(r"[^0-9A-Za-z]+", name))
    return next((known for part, known in _KNOWN.items() if part in words), None)


def named_model(name: str) -> DeviceModel:
    """The model of a device by name; the machine need not have one."""
    known = _KNOWN.get(name.upper()) if isinstance(name, str) else None
    if known is None:
        raise UsageError(
            f"no rates are known of a device named {name!r}: name a GPU, one of "
            f"{', '.join(_KNOWN)}."
        )
    return known


class CostModel:
    """Seconds of operator calls on one device, from their arguments and results."""

    def __init__(self, device: torch.device, name: str | None = None) -> None:
        self.model = device_model(device) if name is None else named_model(name)
        self._cpu = name is None and device.type == "cpu"
        # torch's own table of formulas; importing it only here keeps `import lowtide` light.
        from torch.utils.flop_counter import flop_registry

        self._formulas: dict[Any, Callable[..., int]] = dict(flop_registry)

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """How long this call would take."""
        model = self.model
        base = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        if getattr(func, "is_view", False) or base in _IDLE:
            return model.launch
        tensors = [t for a in (*args, *kwargs.values()) for t in flatten(a)
                   if isinstance(t, torch.Tensor)]  # fmt: skip
        made = [t for t in flatten(result) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in (*tensors, *made))
        seconds = moved / model.bandwidth
        if self._cpu:
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                seconds += _DRAW * 1e-9 * sum(t.numel() for t in made[:1])
            else:
                seconds *= _HEAVY.get(base, 1.0)
        flops = self._flops(func, base, args, kwargs, result)
        if flops:
            width = tensors[0].element_size() if tensors else 4
            rate = model.half_flops if width < 4 else model.flops
            if self._cpu and width > 4:
                rate /= 2  # a register holds half as many doubles
            if self._cpu and base in ("bmm", "baddbmm"):
                left, right = tensors[:2] if base == "bmm" else tensors[1:3]
                rate *= min(1.0, min(*left.shape[1:], right.shape[-1]) / _THIN)
            seconds = max(seconds, flops / rate)
            if self._cpu and base.startswith("convolution"):
                seconds += _unfolding(base, args, made[0]) / model.bandwidth
        return seconds + model.launch

    def _flops(self, func: Any, base: str, args: Any, kwargs: Any, result: Any) -> int:
        formula = self._formulas.get(getattr(func, "overloadpacket", None))
        try:
            if formula is not None:
                return int(formula(*args, **kwargs, out_val=result))
            if _ATTENTION in base:
                return _attention(base, args)
            if base.startswith("mkldnn_rnn_layer"):
                return _recurrent(base, args)
            if base == "_grouped_mm":
                return int(2 * result.numel() * args[0].shape[-1])
        except Exception:  # a formula may not handle this form of the call; bytes suffice
            return 0
        return 0


def _attention(base: str, args: Any) -> int:
    """Operations of attention kernels that torch's table lacks (the CPU's): two products, five in
    backward."""
    shift = 1 if "backward" in base else 0
    query, key = args[shift], args[shift + 1]
    batch, heads, length, width = query.shape
    one = 2 * batch * heads * length * key.shape[-2] * width
    return int(one * (5 if shift else 2))


def _recurrent(base: str, args: Any) -> int:
    """Operations of oneDNN's recurrent layers: each weight once for each row of each time step,
    twice in backward."""
    rows = math.prod(args[0].shape[:-1])
    once = 2 * rows * (args[1].numel() + args[2].numel())
    return int(once * (2 if "backward" in base else 1))


def _unfolding(base: str, args: Any, made: torch.Tensor) -> int:
    """Bytes that could be moved in the time that a convolution on the CPU unfolds its images."""
    back = "backward" in base
    out, source, weight = args[:3] if back else (made, *args[:2])
    options = options_of(args, back)
    if not unfolded(source, weight, source.device.type, options):
        return 0
    kernel = math.prod(weight.shape[2:])
    if kernel == 1:  # an image is its own columns
        return 0
    if options.transposed:
        points, rows = math.prod(source.shape[2:]), weight.shape[1] * options.groups * kernel
    else:
        points, rows = math.prod(out.shape[2:]), source.shape[1] * kernel
    image = points * rows * source.element_size()
    slow = _UNFOLDING if image > _CACHED else 1
    return int((2 if back else 1) * source.shape[0] * image * slow)
