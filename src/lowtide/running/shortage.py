"""A device that is full before a limit is reached.

Problem: a limit may be more than a device has left: other tensors, another process, memory in
pieces. Invariant: what a device was found to have room for is a guess, from where it ran out; steps
are planned for it, and none is refused for it that the limit allows. Imports limits.
Rejected: asking the driver what is free at each step, which waits for the device and does
not know what its allocator could give out again.
"""

from __future__ import annotations

import logging

from lowtide.limits import format_bytes

_log = logging.getLogger(__name__)

_LESS = 20  # one part in so many less where a backward ran out, which says less than a forward does


class Shortage:
    """What one device was found to have room for.

    Attributes:
        room: bytes of a step, with what earlier steps of its context have left; None: it has not
            run out of memory.
    """

    __slots__ = ("_told", "room")

    def __init__(self) -> None:
        self.room: int | None = None
        self._told = False

    def within(self, nbytes: int) -> int:
        """A limit, or what there is room for."""
        return nbytes if self.room is None else min(nbytes, self.room)

    def ran_out(self, nbytes: int, limit: int | float) -> None:
        """More than so many did not fit, although a limit allows it."""
        if self.room is None or nbytes < self.room:
            self.room = nbytes
        if self._told:
            return
        self._told = True
        _log.warning(
            "the device ran out of memory inside of a budget of %s, whose limit was not reached. "
            "From here on its steps are planned for %s (the report's device_room). A limit of no "
            "more than what is free would have done so from the first step on.",
            format_bytes(limit) if isinstance(limit, int) else f"{limit:g} of the plain peak",
            format_bytes(self.room),
        )

    def backward_ran_out(self, peak: int, limit: int | float) -> None:
        """A backward whose peak was to be this did not fit."""
        self.ran_out(peak - peak // _LESS, limit)

    def needs(self, nbytes: int) -> None:
        """Nothing brings a step below so many bytes: it is tried."""
        if self.room is not None:
            self.room = max(self.room, nbytes)
