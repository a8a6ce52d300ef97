"""`lowtide.measure`: the exact peak and time of a callable.

Problem: "does it fit, and what does it cost" must be answered with the same numbers on the CPU,
where torch has no peak counter, as on an accelerator, whose allocator has one. Invariant: what is
returned was counted allocation by allocation; where that is not possible there is an error, not an
estimate. Imports memory events, marks, limits, step, errors. Rejected: the size of the process,
which changes by pages, keeps freed memory and includes everything else that the process does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.limits import format_bytes
from lowtide.memory import leftover
from lowtide.memory.events import MemoryEvents
from lowtide.memory.marks import DevicePeak
from lowtide.step import check_runs_now


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one call of a step took.

    Attributes:
        peak_bytes: the largest number of bytes allocated at any point, above those allocated at
            entry.
        allocated_bytes: bytes that the step leaves allocated, above those at entry: gradients and
            state that it creates, but not the value it returns. Negative if it frees more than it
            allocates.
        seconds: wall-clock time of the call alone; on an accelerator, up to the end of its kernels.
        device: the device whose bytes were counted.
    """

    peak_bytes: int
    allocated_bytes: int
    seconds: float
    device: torch.device

    def __str__(self) -> str:
        peak, left = format_bytes(self.peak_bytes), format_bytes(self.allocated_bytes)
        return f"peak {peak}, left allocated {left}, {self.seconds:.3f} s on {self.device}"


def measure(
    fn: Callable[..., object],
    /,
    *args: Any,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Measurement:
    """Call ``fn(*args, **kwargs)`` once and count the bytes it allocates and the seconds it takes.

    On the CPU every allocation that torch makes for this thread and for autograd is counted, with
    torch's own profiler. It does not report the release of memory that was allocated before the
    call, so that is not subtracted: clear old gradients before the call, not in it. Threads that
    `fn` starts itself are not seen. On an accelerator its allocator's peak counter is used:
    `torch.accelerator.reset_peak_memory_stats` is called for the device, so peaks that your program
    was collecting start anew.

    Args:
        fn: the step, backward included; what it returns is discarded.
        args: its positional arguments.
        kwargs: its keyword arguments. One of its own named ``device`` needs a lambda around it.
        device: the device whose bytes are counted. Default: the accelerator's current device (CUDA,
            ROCm, XPU, MPS, ...) if the process uses it already, else the CPU.

    Returns:
        The peak, what is left allocated, and the time.

    Raises:
        UsageError: `fn` cannot be called; the device is not there, or torch counts no bytes on it;
            or, on the CPU, a profiler is active, another measurement is running, or either was
            started while `fn` ran.

    Examples:
        >>> import torch
        >>> measure(torch.zeros, 256, device="cpu").peak_bytes
        1024
    """
    if not callable(fn):
        raise UsageError(
            f"lowtide.measure calls a step; got {type(fn).__name__}. Pass the function and then "
            "its arguments, as in lowtide.measure(step, batch)."
        )
    check_runs_now(fn)
    step = functools.partial(fn, *args, **kwargs)
    where = _device(device)
    if where.type != "cpu":
        return _measure_device(step, where)
    events = MemoryEvents(where)
    if not events.start():
        raise UsageError(
            f"lowtide.measure cannot count allocations on the CPU: {events.obstacle}, and torch "
            "has only one memory recorder per process. Call measure outside of it."
        )
    try:
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
    finally:
        timeline = events.stop()
    if timeline is None:
        raise UsageError(
            f"lowtide.measure lost its count of allocations on the CPU: {events.obstacle}. "
            "Do not start a profiler inside the measured step."
        )
    return Measurement(timeline.peak, timeline.final, seconds, where)


def _measure_device(step: Callable[[], object], device: torch.device) -> Measurement:
    leftover.wait()
    _compat.synchronize(device)
    entry = _compat.allocated(device).now
    with DevicePeak(device) as peak:
        began = time.perf_counter()
        step()
        _compat.synchronize(device)
        seconds = time.perf_counter() - began
    left = _compat.allocated(device).now - entry
    return Measurement(peak.nbytes() - entry, left, seconds, device)


def counted_device(device: torch.device | str, caller: str) -> torch.device:
    """The device whose bytes are counted; an accelerator's with its index.

    Raises:
        UsageError: it names no device, or one that does not exist or whose bytes are not counted.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{caller}: device={device!r} names no device. Pass 'cpu', 'cuda' or 'cuda:1'."
        ) from error
    if where.type == "cpu":
        return torch.device("cpu")
    if not (_compat.is_accelerator(where) and _compat.available()):
        if where.type in ("meta", "lazy", "vulkan", "fpga"):
            raise UsageError(
                f"{caller} counts bytes on the CPU and on accelerators, not on {where.type!r}, for "
                "which torch reports no allocations. Pass device='cpu' or an accelerator."
            )
        raise UsageError(
            f"{caller}: device={str(where)!r}, but torch finds no {_named(where)} here. Pass "
            "device='cpu', or leave device out."
        )
    count = torch.accelerator.device_count()
    if where.index is not None and where.index >= count:
        raise UsageError(
            f"{caller}: device={str(where)!r}, but torch finds {count} of these here, numbered "
            "from 0. Pass one of them."
        )
    if not _compat.counts_bytes(where):
        raise UsageError(
            f"{caller}: this version of torch reports no allocations on {_named(where)}, so no "
            "limit can be kept there. Use a newer version, or checkpoint parts of the model by "
            "hand with lowtide.checkpoint_modules, which needs no limit."
        )
    return where if where.index is not None else _compat.current_device()


def _named(device: torch.device) -> str:
    return {"cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}.get(device.type, device.type)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return _compat.current_device() if _compat.accelerator_in_use() else torch.device("cpu")
    return counted_device(device, "lowtide.measure")
