"""`lowtide.use_cpu_allocator`: a process that takes no more than what is in use, on the CPU.

Problem: a limit counts what torch allocates. The C library keeps what torch releases and fits new
tensors badly into the gaps, so that under a limit the process hardly shrinks. Invariant: tensors
have the same bits and are counted in the same bytes as with torch's allocator; what is kept for the
next ones is bounded (`compiled/cpu/pages.h`). Imports errors, limits, and `compiled.build`.
Rejected: doing it whenever a budget is entered, as the allocator belongs to the process, and
parameters that exist by then stay where they are; MALLOC_MMAP_THRESHOLD_, with which the kernel
clears every page of every tensor (`benchmarks/resident.py` compares them).
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from types import ModuleType

from lowtide.compiled import build
from lowtide.errors import UnsupportedError, UsageError
from lowtide.limits import format_bytes, parse_limit, whole_number

_HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_GROWTH = 32 << 20  # as in pages.h: a huge page must divide it

_lock = threading.Lock()
_loaded: ModuleType | None = None


class CPUAllocator:
    """The allocator that `use_cpu_allocator` has put in place; there is one in a process.

    All sizes are in bytes, of blocks of 64 KiB and more (on a machine with pages of 4 KiB): smaller
    ones come from the allocator that was there before, and so do a `torch.UntypedStorage` that is
    made directly and memory that processes share; they are not counted. A block is a whole number
    of pages.
    """

    def __init__(self, core: ModuleType) -> None:
        self._core = core

    def memory_allocated(self) -> int:
        """Bytes of the blocks that are in use."""
        return self._figure("allocated")

    def max_memory_allocated(self) -> int:
        """The most that was in use, since the start or `reset_peak_memory_stats`."""
        return self._figure("peak_allocated")

    def memory_reserved(self) -> int:
        """Bytes that are in use or kept for the next blocks: the most that they take of the
        process's resident memory."""
        return self._figure("reserved")

    def max_memory_reserved(self) -> int:
        """The most that was reserved, since the start or `reset_peak_memory_stats`."""
        return self._figure("peak_reserved")

    def reset_peak_memory_stats(self) -> None:
        """Forget the largest figures. Without a `reserve`, what is kept beyond what is in use now
        goes back to the system: do it between two trainings of which the second needs less."""
        self._core.reset_peaks()

    def empty_cache(self) -> None:
        """Give all that is kept back to the system."""
        self._core.empty_cache()

    def remove(self) -> None:
        """Let torch allocate as before. Blocks that are in use stay until they are released, and
        then go back to the system."""
        self._core.remove()

    @property
    def active(self) -> bool:
        """Whether new tensors come from this allocator."""
        return bool(self._core.installed())

    def _figure(self, name: str) -> int:
        return int(self._core.figures()[name])

    def __repr__(self) -> str:
        allocated, reserved = self.memory_allocated(), self.memory_reserved()
        return (
            f"<lowtide.CPUAllocator: {'active' if self.active else 'removed'}, "
            f"{format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved>"
        )


def use_cpu_allocator(
    reserve: int | str | None = None, *, huge_pages: bool = False
) -> CPUAllocator:
    """From here on, torch's tensors on the CPU come from an allocator that keeps little.

    Blocks of 64 KiB and more lie in pages that are used again for blocks of any size. What is in
    use and what is kept are together at most `reserve`, or what is in use if that is more; the rest
    goes back to the system at once. Call it before the model is made: tensors that exist stay where
    they are. What a limit counts does not change. The first call on a machine compiles the
    allocator, which takes some seconds.

    Args:
        reserve: how much may be in use and kept together: bytes, or text such as "6 GiB"; 0 keeps
            nothing. Default: the most that was in use so far, so that a training that repeats
            itself takes new pages only in its first steps; with less, steps are slower. Another
            call changes it.
        huge_pages: ask the kernel for huge pages (2 MiB on most machines), which large networks
            often run faster with. What is kept may then exceed its bound by parts of such pages.
            Without it, these blocks get none, even where the kernel gives them to every program. It
            cannot be changed while there are blocks.

    Returns:
        The allocator, with its figures, named as those in `torch.cuda`.

    Raises:
        UsageError: `reserve` is not a size, or `huge_pages` differs from that of an earlier call.
        UnsupportedError: the system is not Linux or gives no huge pages, the allocator cannot be
            compiled, or another one is in the way; the text says which.

    Examples:
        >>> import torch
        >>> allocator = use_cpu_allocator()
        >>> before = allocator.memory_allocated()
        >>> x = torch.zeros(1 << 20)
        >>> allocator.memory_allocated() - before
        4194304
        >>> allocator.remove()
    """
    most = _size(reserve)
    with _lock:
        core = _core()
        unit = _huge_page() if huge_pages else mmap.PAGESIZE
        if not core.set_unit(unit):
            raise UsageError(
                f"lowtide.use_cpu_allocator: huge_pages={huge_pages} needs pages of "
                f"{format_bytes(unit)}, and this process has blocks in pages of "
                f"{format_bytes(core.figures()['unit'])}. Ask for it in the first call, or "
                "once their tensors are gone."
            )
        obstacle = core.install()
        if obstacle is not None:
            raise UnsupportedError(
                f"lowtide.use_cpu_allocator cannot replace the allocator in use: {obstacle}. Call "
                "it before the library that has set that one, or do without."
            )
        core.reserve(most)
    return CPUAllocator(core)


def _core() -> ModuleType:
    global _loaded
    if _loaded is None:
        try:
            _loaded = build.load(build.cpu_allocator(), build.CPU_MODULE)
        except (build.BuildError, ImportError) as error:
            raise UnsupportedError(
                f"lowtide.use_cpu_allocator cannot be used here: {error}. Leave it out: limits "
                "hold without it, and the process takes more."
            ) from error
    return _loaded


def _size(reserve: object) -> int | None:
    if reserve is None:
        return None
    if whole_number(reserve) == 0 or (isinstance(reserve, str) and reserve.strip() == "0"):
        return 0  # which is no limit
    try:
        size = parse_limit(reserve)
    except UsageError as error:
        raise UsageError(
            f"lowtide.use_cpu_allocator: reserve is read as limits are: {error}"
        ) from error
    if isinstance(size, float):
        raise UsageError(
            f"lowtide.use_cpu_allocator: reserve is a size in bytes, or text such as '6 GiB'; got "
            f"the fraction {reserve!r}."
        )
    return size


def _huge_page() -> int:
    """The bytes of a huge page, if the kernel gives them to who asks."""
    try:
        enabled = (_HUGE / "enabled").read_text()
        size = int((_HUGE / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        enabled, size = "[never]", 0
    if "[never]" in enabled or not size or _GROWTH % size:
        raise UnsupportedError(
            f"lowtide.use_cpu_allocator: this system gives no huge pages that divide 32 MiB "
            f"({_HUGE / 'enabled'}: {enabled.strip()}; size: {size}). Leave huge_pages out."
        )
    return size
