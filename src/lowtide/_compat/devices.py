"""The accelerator that the process uses, if any: its streams, generators and allocator's counters.

Problem: an operation is replayed on the stream it ran on and with the device's own random state, a
budget counts what the device's allocator does, and no query may initialise a device that nothing
uses. Invariant: as in `lowtide._compat`, of which this is a part; nothing here depends on "cuda": a
process has at most one kind of accelerator, and `torch.accelerator` knows which (CUDA, ROCm, XPU,
MPS, or one from another package). `accelerator_seen` is read only as an attribute of this module,
here, in `switches` and in the compiled recorder: a copy would keep its first value. Imports torch.
Rejected: `torch.cuda.is_available`, which says that a device exists and not that it is used; one
module per vendor, of which we could test none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import _C

accelerator_seen = False
_WITHOUT = ("cpu", "meta")  # devices that have neither streams nor an allocator of their own


def accelerator_in_use() -> bool:
    """Whether this process has used its accelerator; asking must not initialise it."""
    global accelerator_seen
    accelerator_seen = accelerator_seen or _initialized()
    return accelerator_seen


def _initialized() -> bool:
    device = torch.accelerator.current_accelerator()
    if device is None:
        return False
    asked = getattr(torch.get_device_module(device), "is_initialized", None)
    if asked is not None:
        return bool(asked())
    return counts_bytes(device) and torch.accelerator.memory_allocated() > 0  # MPS does not tell


def current_device() -> torch.device:
    """The accelerator device that is current on this thread; it must be in use."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is of the process's accelerator."""
    if device.type in _WITHOUT:  # asked at each operation, and torch makes a device to answer
        return False
    kind = torch.accelerator.current_accelerator()
    return kind is not None and kind.type == device.type


def available() -> bool:
    """Whether there is an accelerator; asking does not initialise it."""
    return torch.accelerator.is_available()


def counts_bytes(device: torch.device) -> bool:
    """Whether torch counts what a device's allocator has given out; on MPS it does since 2.14."""
    if not is_accelerator(device):
        return False
    try:
        torch.accelerator.memory_allocated()
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Given(NamedTuple):
    """Bytes that a device's allocator has given out."""

    now: int = 0
    peak: int = 0
    """Since the last reset."""
    altogether: int = 0
    """The sum of all allocations, freed ones included."""
    failures: int = 0
    """How often the allocator was out of memory."""


def allocated(device: torch.device) -> Given:
    """What a device's allocator has given out.

    `torch.accelerator.memory_stats` makes a sorted dictionary of all hundred statistics on each
    call, and a watched step asks at every operation. Unnecessary when torch has a public way to
    read one of them.
    """
    if not _C._accelerator_isAllocatorInitialized():
        return Given()
    index = device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    found = _C._accelerator_getDeviceStats(index)
    total = found["allocated_bytes"]["all"]
    return Given(total["current"], total["peak"], total["allocated"], found["num_ooms"])


def reset_peak(device: torch.device) -> None:
    """Start the peak of `allocated` anew."""
    torch.accelerator.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, according to its driver; None if it does not tell."""
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError, NotImplementedError):  # torch 2.10 has no such function
        if device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[0])
        return None


def spare_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, and those that its allocator has and has not given out; None
    if the driver does not tell."""
    free = free_memory(device)
    if free is None or not _C._accelerator_isAllocatorInitialized():
        return free
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found = _C._accelerator_getDeviceStats(index)
    kept, given = found["reserved_bytes"]["all"], found["allocated_bytes"]["all"]
    return free + int(kept["current"]) - int(given["current"])


def synchronize(device: torch.device | None = None) -> None:
    """Wait for a device, the current one by default. Only timing needs this."""
    torch.accelerator.synchronize(device)


def device_of(args: Any) -> torch.device | None:
    """The device that an operation on these arguments runs on: that of the first tensor that is not
    on the CPU, else the device among its arguments. None: the CPU."""
    named = None
    for argument in args:
        device = None
        if isinstance(argument, torch.Tensor):
            device = argument.device
        elif isinstance(argument, list | tuple) and argument:
            device = device_of(argument)
        elif isinstance(argument, torch.device):
            named = argument
        if device is not None and device.type not in _WITHOUT:
            return device
    return None if named is None or named.type in _WITHOUT else named


def stream_of(args: Any) -> torch.Stream | None:
    """The stream that an operation on these arguments will run on; None on the CPU."""
    device = device_of(args)
    return None if device is None or not is_accelerator(device) else current_stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The current stream of a device on this thread."""
    return torch.accelerator.current_stream(device)


_told: dict[str, bool] = {}  # kinds of device: whether their allocators can be told of streams


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Tell the allocator that a tensor is read on a stream. MPS has one stream and no such call."""
    kind = tensor.device.type
    if not _told.get(kind, True):
        return
    try:
        tensor.record_stream(stream)
    except NotImplementedError:
        _told[kind] = False


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Run on a recorded stream and its device, ordered after and before the current stream."""
    current = current_stream(stream.device)
    if current == stream:
        with torch.accelerator.device_index(stream.device_index):
            yield
        return
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that operators on a device draw from unless they are given one. None: there is
    none, as on "meta" or on a device that does not exist and is only faked.

    It is found in another way for each kind of device. For MPS the way is private, until MPS has
    `default_generators` like the others.

    Raises:
        LookupError: it is not known what operators on such a device draw from.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "meta":
        return None
    module = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", None)
    if generators is None:
        single = getattr(module, "_get_default_mps_generator", None)
        if single is None:
            raise LookupError(device.type)
        generators = (single(),)
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return generators[index] if index < len(generators) else None
