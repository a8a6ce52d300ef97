"""How long an operation would take: a model of the device, for steps that have not been run.

Problem: what to recompute depends on times, and a dry run has none. Invariant: an estimate is a
function of shapes and of a few rates of the device, so that equal shapes cost the same; only the
ratios between operations matter to a plan, and a budget replaces all of it by measurements.
Imports tape values and workspace. Rejected: timing every operator with random data, which needs the
memory that a dry run is there to spare, and measuring the device's rates, which gives every rank of
a process group a plan of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import UsageError
from lowtide.tape.values import flatten
from lowtide.unfolding import unfolded

_DRAW = 8.0  # nanoseconds of the CPU's generator for each number that it draws
_UNFOLDING = 8  # how much slower torch's own convolution is on the CPU than oneDNN's
# On the CPU, how many times longer a kernel takes than moving its bytes would.
_HEAVY = {
    "native_batch_norm": 4.0,
    "native_group_norm": 4.0,
    "_softmax": 4.0,
    "_safe_softmax": 4.0,
    "_log_softmax": 4.0,
    "max_pool2d_with_indices": 15.0,
    "max_pool3d_with_indices": 15.0,
    "avg_pool2d": 6.0,
    "avg_pool3d": 6.0,
    "upsample_nearest3d": 6.0,
    "upsample_trilinear3d": 15.0,
    "pow": 2.0,
}
_ATTENTION = "scaled_dot_product"


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Rates of a device.

    Attributes:
        name: for people.
        flops: floating-point operations a second of a large product, in single precision.
        half_flops: the same in half precision (bfloat16, float16).
        bandwidth: bytes a second that a simple kernel reads and writes together.
        launch: seconds that any operation costs.
    """

    name: str
    flops: float
    half_flops: float
    bandwidth: float
    launch: float


# What large kernels reach in practice, not peak figures of data sheets. Products in single
# precision without TF32, as torch does them unless told otherwise.
_KNOWN = {
    "H200": DeviceModel("H200", 45e12, 650e12, 3.8e12, 4e-6),
    "H100": DeviceModel("H100", 45e12, 600e12, 2.6e12, 4e-6),
    "A100": DeviceModel("A100", 18e12, 240e12, 1.5e12, 5e-6),
    "V100": DeviceModel("V100", 14e12, 90e12, 0.75e12, 6e-6),
    "L40": DeviceModel("L40", 60e12, 150e12, 0.7e12, 5e-6),
    "L4": DeviceModel("L4", 20e12, 60e12, 0.25e12, 6e-6),
    "T4": DeviceModel("T4", 6e12, 40e12, 0.25e12, 7e-6),
    "4090": DeviceModel("RTX 4090", 60e12, 150e12, 0.85e12, 5e-6),
    "3090": DeviceModel("RTX 3090", 25e12, 65e12, 0.8e12, 5e-6),
}
_USUAL = "A100"


def device_model(device: torch.device) -> DeviceModel:
    """The model of a device, looked up: the same for every process and rank."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        # One core of a server. What counts is how many operations a byte is worth.
        return DeviceModel(f"CPU, {threads} threads", 9e10 * threads, 9e10 * threads,
                           1e10 * math.sqrt(threads), 3e-6)  # fmt: skip
    name = ""
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    for part, known in _KNOWN.items():
        if part in name:
            return known
    return _KNOWN[_USUAL]


def named_model(name: str) -> DeviceModel:
    """The model of a device that need not be there."""
    known = _KNOWN.get(name.upper())
    if known is None:
        raise UsageError(
            f"no rates are known of a device named {name!r}; known are {', '.join(_KNOWN)}."
        )
    return known


class CostModel:
    """Seconds of operator calls on one device, from their arguments and results."""

    def __init__(self, device: torch.device, name: str | None = None) -> None:
        self.model = device_model(device) if name is None else named_model(name)
        self._cpu = name is None and device.type == "cpu"
        # torch's own table of formulas; importing it at need keeps `import lowtide` light.
        from torch.utils.flop_counter import flop_registry

        self._formulas: dict[Any, Callable[..., int]] = dict(flop_registry)

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """What this call would take."""
        model = self.model
        tensors = [t for a in (*args, *kwargs.values()) for t in flatten(a)
                   if isinstance(t, torch.Tensor)]  # fmt: skip
        made = [t for t in flatten(result) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in (*tensors, *made))
        base = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        seconds = moved / model.bandwidth
        if self._cpu:
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                seconds += _DRAW * 1e-9 * sum(t.numel() for t in made[:1])
            else:
                seconds *= _HEAVY.get(base.removesuffix("_backward"), 1.0)
        flops = self._flops(func, base, args, kwargs, result)
        if flops:
            half = bool(tensors) and tensors[0].element_size() < 4
            rate = model.half_flops if half else model.flops
            if self._cpu and _unfolded(base, tensors):
                rate /= _UNFOLDING
            seconds = max(seconds, flops / rate)
        return seconds + model.launch

    def _flops(self, func: Any, base: str, args: Any, kwargs: Any, result: Any) -> int:
        formula = self._formulas.get(getattr(func, "overloadpacket", None))
        try:
            if formula is not None:
                return int(formula(*args, **kwargs, out_val=result))
            if _ATTENTION in base:
                return _attention(base, args)
        except Exception:  # a formula may not know this form of the call; bytes will do
            return 0
        return 0


def _attention(base: str, args: Any) -> int:
    """Attention kernels that torch's table lacks (the CPU's): two products, five in backward."""
    shift = 1 if "backward" in base else 0
    query, key = args[shift], args[shift + 1]
    batch, heads, length, width = query.shape
    one = 2 * batch * heads * length * key.shape[-2] * width
    return int(one * (5 if shift else 2))


def _unfolded(base: str, tensors: list[torch.Tensor]) -> bool:
    """Whether a convolution runs without oneDNN (see `lowtide.workspace`)."""
    if not base.startswith("convolution"):
        return False
    shift = 1 if "backward" in base else 0
    return len(tensors) >= shift + 2 and unfolded(tensors[shift], tensors[shift + 1])
