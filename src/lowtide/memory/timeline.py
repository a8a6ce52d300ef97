"""What a recording of allocations shows: bytes over time, cut at its marks.

Problem: torch's profiler reports a stream of sizes and addresses, without a word of what the
program did meanwhile. Invariant: a mark is found exactly, as the move of a block that nobody else
can free, or the stream counts as incomplete. Imports torch. Rejected: cutting the stream by time,
which the profiler does not tell exactly enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MARKER_SIZES = (61, 67)
"""The two sizes between which a mark resizes its block; small and unusual."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes over a recording, cut at its marks; mark 0 is the start.

    Attributes:
        levels: bytes allocated since the start and not freed, at each mark.
        rises: between each mark and the next, or the end: the largest number of such bytes right
            after an allocation; without one, their number at the end. What is freed between the
            mark and the next allocation is not in it.
        final: bytes allocated and not freed at the end.
        known: for each storage that was noted, whether it is a block of the recording, so that its
            release is in the levels too. On the CPU, older blocks and memory that others have
            allocated are not.
    """

    levels: list[int]
    rises: list[int]
    final: int
    known: tuple[bool, ...] = ()

    @property
    def peaks(self) -> list[int]:
        """The largest number of bytes allocated between each mark and the next, or the end."""
        return list(map(max, self.levels, self.rises))

    @property
    def peak(self) -> int:
        """The largest number of bytes allocated at any point of the recording."""
        return max(self.peaks)

    def until(self, mark: int) -> Timeline:
        """The recording as if it had ended at a mark other than the first."""
        if mark >= len(self.levels):
            return self
        return Timeline(self.levels[:mark], self.rises[:mark], self.levels[mark], self.known)


def read_timeline(
    fields: Iterable[Any],
    device: torch.device,
    markers: list[int],
    noted: Sequence[tuple[int, int]] = (),
) -> Timeline | None:
    """Turn a stream of allocations into bytes, cut where the marker block left `markers[k]`.

    `noted` has (mark, address) of storages, in the order of their marks. `None` if not every move
    of the marker is in the stream: then events are missing.
    """
    found = _find_marks(fields, device, markers)
    if found is None:
        return None
    sizes, addresses, cuts = found
    held: dict[int, int] = {}
    on_cpu = device.type == "cpu"
    level = begin = 0
    levels, rises = [0], []
    known: list[bool] = []
    for cut in cuts:
        while len(known) < len(noted) and noted[len(known)][0] < len(levels):
            known.append(noted[len(known)][1] in held)
        rise: int | None = None
        for size, address in zip(sizes[begin:cut], addresses[begin:cut], strict=True):
            if size > 0:
                # A block known at this address was freed unseen, on a thread without a profiler.
                level += size - held.get(address, 0)
                held[address] = size
                if rise is None or level > rise:
                    rise = level
            else:
                # An unknown block is older than the start. The CPU allocator may then report the
                # size of some earlier block, which is of no use.
                level -= held.pop(address, 0 if on_cpu else -size)
        rises.append(level if rise is None else rise)
        levels.append(level)
        begin = cut
    return Timeline(levels[:-1], rises, levels[-1], tuple(known))


def _find_marks(
    fields: Iterable[Any], device: torch.device, markers: list[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """Sizes and addresses of the events of `device`, the marker's own zeroed, and the cuts."""
    sizes: list[int] = []
    addresses: list[int] = []
    cuts: list[int] = []
    one_device = device.type == "cpu" and not torch.accelerator.is_available()
    passed = 0
    here, there = markers[0], markers[1] if len(markers) > 1 else 0
    born = born_next = -1
    for field in fields:
        size, address = field.alloc_size, field.ptr
        if one_device or field.device.type == "cpu":
            if address == there and size == MARKER_SIZES[(passed + 1) % 2]:
                born_next = len(sizes)
            elif address == here and size == MARKER_SIZES[passed % 2]:
                born = len(sizes)
            elif address == here and born >= 0:  # only `mark` and `stop` free this block
                sizes[born] = addresses[born] = 0
                cuts.append(len(sizes))
                passed += 1
                if passed == len(markers):
                    return sizes, addresses, cuts
                here, there = there, markers[passed + 1] if passed + 1 < len(markers) else 0
                born, born_next = born_next, -1
                continue
        if one_device or field.device == device:
            sizes.append(size)
            addresses.append(address)
        elif len(sizes) in (born, born_next):  # the marker is on the CPU: leave a place for it
            sizes.append(0)
            addresses.append(0)
    return None
