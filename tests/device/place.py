"""The device that is checked: its name, its memory, and what it offers besides torch.accelerator.

Problem: the checks are the same on every device, but the driver calls are not. Invariant: what a
device does not offer raises `Skipped` with the reason, and nothing here changes the device for
longer than a `with` block. Imports torch and lowtide. Rejected: faking what is missing.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import lowtide
from lowtide import _compat

MIB = 1 << 20
GIB = 1 << 30
_UNLIMITED = 2**62


class Skipped(Exception):
    """A check or benchmark cannot run on this device; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where the checks run.

    Attributes:
        device: the device, with its index.
        quick: use tiny sizes: to see that everything runs, not what it costs.
        deadline: a time of `time.monotonic`; no benchmark starts after it.
    """

    device: torch.device
    quick: bool
    deadline: float

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def module(self) -> Any:
        """torch's module for this kind of device: `torch.cuda`, `torch.xpu`, ..."""
        return torch.get_device_module(self.device)

    def left(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    def memory(self) -> int:
        """Total bytes of the device."""
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            return int(torch.accelerator.get_memory_info(self.device)[1])
        if self.kind == "cuda":  # torch 2.10
            return int(torch.cuda.mem_get_info(self.device)[1])
        return 8 * GIB  # if it is not known

    def need(self, kind: str, what: str) -> None:
        """Skip what applies to one kind of device only."""
        if self.kind != kind:
            raise Skipped(f"{what} is for {kind}, this is {self.kind}")


def find(quick: bool, minutes: float) -> Place | None:
    """The current device of the accelerator; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    device = torch.device(found.type, torch.accelerator.current_device_index())
    torch.empty(1, device=device)  # initializes it for the process
    return Place(device, quick, time.monotonic() + 60 * minutes)


# ------------------------------------------------------------------------------ names


def name(place: Place) -> str:
    asked = getattr(place.module, "get_device_name", None)
    return f"{place.kind} device" if asked is None else str(asked(place.device))


def versions(place: Place) -> dict[str, str]:
    """Everything that a figure may depend on."""
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "lowtide": lowtide.__version__,
    }
    for kind in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, kind, None)
        if version:
            found[kind] = str(version)
    if place.kind == "cuda":
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["driver"] = _driver()
    return found


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout.split()  # fmt: skip
        if said:
            return said[0]
    return "unknown"


# ------------------------------------------------------------------------------ memory


def settle() -> None:
    """Wait for the background search for plans."""
    for thread in threading.enumerate():
        if thread.name == "lowtide-plans":
            thread.join()


def fresh(place: Place) -> None:
    """Empty the cache and reset all peaks."""
    settle()
    gc.collect()
    torch.accelerator.synchronize(place.device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(place.device)


def peak(place: Place, step: Callable[[], object]) -> int:
    """Peak of a step above what was in memory when it began, even if a budget resets counters."""
    counting(place)
    return lowtide.measure(step, device=place.device).peak_bytes


def peak_by_torch(place: Place, step: Callable[[], object]) -> int:
    """The same by torch's own counters alone: for steps in which no budget measures."""
    torch.accelerator.synchronize(place.device)
    torch.accelerator.reset_peak_memory_stats(place.device)
    entry = torch.accelerator.memory_allocated(place.device)
    step()
    return torch.accelerator.max_memory_allocated(place.device) - entry


def counting(place: Place) -> None:
    if not _compat.counts_bytes(place.device):
        raise Skipped(f"torch {torch.__version__} reports no allocations of {place.kind}")


def statistics(place: Place) -> dict[str, int]:
    """How often the allocator had to retry or ran out of memory, as far as the device counts it."""
    counting(place)
    found = torch.accelerator.memory_stats(place.device)
    wanted = {"retries": "num_alloc_retries", "ooms": "num_ooms"}
    return {key: int(found[given]) for key, given in wanted.items() if given in found}


@contextlib.contextmanager
def capacity(place: Place, more: int) -> Iterator[None]:
    """Bound the device's memory to `more` bytes above what is in use now."""
    core = emulated()
    if core is not None:
        core.set_capacity(place.device.index, torch.accelerator.memory_allocated() + more)
        try:
            yield
        finally:
            core.set_capacity(place.device.index, _UNLIMITED)
        return
    bound = getattr(place.module, "set_per_process_memory_fraction", None)
    if bound is None or place.kind == "mps":  # of another total there
        raise Skipped(f"torch has no way to bound the memory of {place.kind}")
    fresh(place)
    reserved = torch.accelerator.memory_reserved(place.device)
    bound(min(1.0, (reserved + more) / place.memory()), place.device)
    try:
        yield
    finally:
        bound(1.0, place.device)


# ------------------------------------------------------------------------------ waiting


def emulated() -> Any:
    """The module of the emulated device (`tests/accelerator`), if that is the device here."""
    return sys.modules.get("_emulated_accelerator")


def waits(place: Place, step: Callable[[], object]) -> int:
    """How often the host waits for the device in a step; on CUDA the first wait raises.

    CUDA's debug mode sees copies to the host and waiting for a stream, in C++ too; it does not see
    waiting for a whole device or an event, so these are made to raise in Python.
    """
    core = emulated()
    if core is not None:
        before = core.counts()["host_waits"]
        step()
        return int(core.counts()["host_waits"] - before)
    if not hasattr(place.module, "set_sync_debug_mode"):
        raise Skipped(f"torch has no debug mode for the synchronisation of {place.kind}")
    with contextlib.ExitStack() as stack:
        refuse = mock.Mock(side_effect=AssertionError("the host waits for the device"))
        for where in (torch.accelerator, place.module, place.module.Event):
            stack.enter_context(mock.patch.object(where, "synchronize", refuse))
        stack.callback(place.module.set_sync_debug_mode, "default")
        place.module.set_sync_debug_mode("error")
        step()
    return 0
