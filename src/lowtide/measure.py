"""Exact peak bytes and seconds of a callable.

Problem: "does it fit, and what does it cost" must be answered with the same numbers on the CPU,
where torch has no peak counter, as on an accelerator, whose allocator has one. Invariant: what is
returned was counted allocation by allocation; where that is not possible there is an error, not an
estimate. Imports memory events, marks, limits, errors. Rejected: the resident size of the
process, which moves in pages, keeps freed memory and includes everything else that the process
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.limits import format_bytes
from lowtide.memory.events import MemoryEvents
from lowtide.memory.marks import DevicePeak


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one call of a step took.

    Attributes:
        peak_bytes: the largest number of bytes held at any point above what was held at entry.
        allocated_bytes: what the step leaves behind above what was held at entry: gradients and
            state that it creates, but not the value it returns. Negative where it frees more.
        seconds: wall clock of the call alone, on an accelerator up to the end of its kernels.
        device: where the bytes were counted.
    """

    peak_bytes: int
    allocated_bytes: int
    seconds: float
    device: torch.device

    def __str__(self) -> str:
        peak, left = format_bytes(self.peak_bytes), format_bytes(self.allocated_bytes)
        return f"peak {peak}, left allocated {left}, {self.seconds:.3f} s on {self.device}"


def measure(step: Callable[[], object], *, device: torch.device | str | None = None) -> Measurement:
    """Call `step` once and count the bytes it allocates and the seconds it takes.

    Args:
        step: called without arguments; what it returns is dropped.
        device: where to count. Default: the current device of the accelerator (CUDA, ROCm, XPU,
            MPS, ...) if the process uses it already, else the CPU.

    On the CPU every allocation that torch makes for this thread and for autograd is counted, with
    torch's own profiler; the release of memory that was allocated before the call is not reported
    there and not subtracted, so clear old gradients before the call, not in it. Threads that `step`
    starts by itself are not seen. On an accelerator its allocator's peak counter is used:
    `torch.accelerator.reset_peak_memory_stats` is called for the device, so peaks that were being
    collected start anew.

    Raises:
        UsageError: `step` cannot be called; torch counts no bytes on the device; or, on the CPU, a
            profiler is active, another measurement is running, or either was started while `step`
            ran.

    Examples:
        >>> import torch
        >>> def step():
        ...     torch.zeros(256)
        >>> measure(step, device="cpu").peak_bytes
        1024
    """
    if not callable(step):
        raise UsageError(
            f"lowtide.measure calls a step without arguments; got {type(step).__name__}. Pass a "
            "function, as in lowtide.measure(lambda: step(batch))."
        )
    where = _device(device)
    if where.type != "cpu":
        return _measure_device(step, where)
    events = MemoryEvents(where)
    if not events.start():
        raise UsageError(
            f"lowtide.measure cannot count allocations on the CPU: {events.obstacle}, and torch "
            "has one recorder per process. Call measure outside of it."
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
            "Start no profiler inside the step that is measured."
        )
    return Measurement(timeline.peak, timeline.final, seconds, where)


def _measure_device(step: Callable[[], object], device: torch.device) -> Measurement:
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
    """A device on which bytes are counted; one of an accelerator with its index.

    Raises:
        UsageError: it names no device, or one that cannot be counted, or is not there.
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
                "which torch reports no allocations. Pass device='cpu' or a device that trains."
            )
        raise UsageError(
            f"{caller}: device={str(where)!r}, and torch finds no {_named(where)} here. Pass "
            "device='cpu', or leave it out."
        )
    count = torch.accelerator.device_count()
    if where.index is not None and where.index >= count:
        raise UsageError(
            f"{caller}: device={str(where)!r}, and torch finds {count} of these here, numbered "
            "from 0. Pass one of them."
        )
    if not _compat.counts_bytes(where):
        raise UsageError(
            f"{caller}: this version of torch reports no allocations of {_named(where)}, so that "
            "no limit can be kept there. Take a newer one, or checkpoint parts of the model by "
            "hand (lowtide.checkpoint_modules), which needs none."
        )
    return where if where.index is not None else _compat.current_device()


def _named(device: torch.device) -> str:
    return {"cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}.get(device.type, device.type)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return _compat.current_device() if _compat.accelerator_in_use() else torch.device("cpu")
    return counted_device(device, "lowtide.measure")
