"""A device that is full before a limit is reached.

Problem: a limit may be more than a device has left: other tensors, another process, fragmentation.
Invariant: the room that a device was found to have is a guess, from where it ran out; steps are
planned for it, and no step that the limit allows is refused because of it. Imports limits.
Rejected: asking the driver at each step what is free, which waits for the device and does not know
what the allocator could reuse.
"""

from __future__ import annotations

import logging

from lowtide.limits import format_bytes, limit_in_words

_log = logging.getLogger("lowtide")

_LESS = 20  # 1/20 less where a backward ran out, which shows less exactly what did not fit


class Shortage:
    """The room that one device was found to have.

    Attributes:
        room: bytes for a step and for what earlier steps of its context have left; None: the
            device has not run out of memory.
    """

    __slots__ = ("_told", "room")

    def __init__(self) -> None:
        self.room: int | None = None
        self._told = False

    def within(self, nbytes: int) -> int:
        """The smaller of a limit and the room."""
        return nbytes if self.room is None else min(nbytes, self.room)

    def ran_out(self, nbytes: int, limit: int | float) -> None:
        """More than this many bytes did not fit, although the limit allows it."""
        if self.room is None or nbytes < self.room:
            self.room = nbytes
        if self._told:
            return
        self._told = True
        _log.warning(
            "the device ran out of memory inside of a budget of %s, whose limit was not reached. "
            "From here on its steps are planned for %s (the report's device_room). A limit of no "
            "more than what is free would have done so from the first step on.",
            limit_in_words(limit),
            format_bytes(self.room),
        )

    def backward_ran_out(self, peak: int, limit: int | float) -> None:
        """A backward with this predicted peak did not fit."""
        self.ran_out(peak - peak // _LESS, limit)

    def needs(self, nbytes: int) -> None:
        """No plan brings a step below this many bytes: let it try."""
        if self.room is not None:
            self.room = max(self.room, nbytes)
