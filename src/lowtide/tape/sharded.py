"""What FSDP does to parameters while a forward is recorded.

Problem: FSDP2 gives the storages of its parameters their sizes and fills them as a module's forward
begins, and frees them as it ends; they come back in that module's own backward. Invariant: once
they are freed, what was made so far is kept as soon as something reads it, as it may be needed
before it could be replayed (rule 5); what FSDP2 gathers is not recorded, and counts as memory of
the step while it is there; what was read of a parameter that is gathered again, as its module is
called twice, is in its live memory, as in the plain step. FSDP1 frees its flat parameters in the
same way; what it gathers is not counted. Imports the table of storages and watch.
Rejected: hooks of our own on FSDP2's modules, which the recorder does not know; looking at all
parameters at each call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lowtide.tape.known import Entry, Known
from lowtide.tape.watch import unwatch

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

_BEGINS = "profiler::_record_function_enter"
_ENDS = "profiler::_record_function_exit"
_LABELS = "FSDP::", "FullyShardedDataParallel."  # of FSDP2, and of FSDP1
_GATHERS = "FSDP::pre_forward"
_COLLECTS = "c10d::_allgather_base_"


class Sharded(Known):
    """The part of a recorder that knows of FSDP2."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._read: dict[int, Entry] | None = None  # externals read since FSDP2 last freed some
        self._newest: Entry | None = None  # the one of them that was read last
        self._group = 0  # the operation at which FSDP2 freed some
        self._gathering = 0  # how many labels of profilers are open, from that of a gather on
        self._copied: list[Entry] = []  # the parameters that a single rank has copied since
        self._parts = 1  # ranks that have a part of what was gathered last

    def _fsdp_may_begin(self, name: str, args: tuple[Any, ...]) -> None:
        """A call that is not recorded begins. It shows that FSDP2 is at work if it is its own
        gather; or, as it copies instead of gathering where there is a single rank, the label that
        it gives to its hooks for profilers."""
        label = args[0] if args and name.startswith(_BEGINS) else None
        if self._read is None and (
            name.startswith("fsdp::") or (isinstance(label, str) and label.startswith(_LABELS))
        ):
            self._read = {}
        if self._read is None or label is None:
            return
        if self._gathering or (isinstance(label, str) and label.startswith(_GATHERS)):
            self._gathering += 1

    def _may_be_freed(self, entry: Entry) -> None:
        """What the recording has not allocated was read."""
        if self._read is not None:
            self._read[entry.key] = self._newest = entry

    def _fsdp_fills(self, name: str) -> bool:
        """Whether that call brings back what FSDP2 had freed: there is no old content to copy, only
        memory that was just allocated."""
        return bool(self._gathering) or name.startswith("fsdp::")

    def _fsdp_may_end(
        self, name: str, args: tuple[Any, ...], written: Iterable[tuple[Entry, int | str]]
    ) -> None:
        """That call has ended."""
        if self._read is None:
            return
        if name == _COLLECTS and len(args) > 1 and args[1].numel():
            self._parts = max(1, args[0].numel() // args[1].numel())
        elif name.startswith("fsdp::"):
            self._gathered([entry for entry, _ in written])
        elif self._gathering:
            self._copied += [entry for entry, _ in written]
        if name.startswith(_ENDS):
            self._gathering = max(0, self._gathering - 1)
            if not self._gathering and self._copied:
                copied, self._copied = self._copied, []
                self._gathered(copied)
            self._look_for_freed()

    def _gathered(self, entries: list[Entry]) -> None:
        """FSDP2 has filled parameters, whose storages it had given their sizes just before."""
        there = [entry for entry in entries if entry() is not None]
        found = [entry for entry in there if self._is_here(self._device(entry), made=False)]
        for entry in found:
            if not entry.counted:
                entry.counted = entry.nbytes
                self.live[0] += entry.counted
        nbytes = sum(entry.nbytes for entry in found)
        self.decisions.gathered([entry.key for entry in found], nbytes, self._parts)

    def _look_for_freed(self) -> None:
        """Look whether FSDP2 has freed parameters that were read: a sharded module has ended."""
        freed = [] if self._read is None else list(filter(is_freed, self._read.values()))
        if self._read is None or not freed:
            return
        for entry in freed:  # on a single rank, `unshard` brings it back without a label
            unwatch(entry.key)
            entry.value = entry.weak = None  # what is there then is another value
        self._read.clear()
        self._newest = None
        self._group = self.sequence
        self.decisions.cut_off(self.numbers)
        for entry in list(self.table.values()):
            value = entry.value or (entry.weak() if entry.weak is not None else None)
            if value is not None:
                value.keep = True  # which also keeps readers off the fast path around the check
            if entry.counted and is_freed(entry):
                self.live[0] -= entry.counted
                entry.counted = 0


def is_freed(entry: Entry) -> bool:
    """Whether a storage is there that has lost its memory."""
    storage = entry()
    return storage is not None and storage.nbytes() < entry.nbytes
