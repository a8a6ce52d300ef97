"""What a step may take of a budget's limit, in bytes.

Problem: a limit may be a fraction of a peak that is not known yet, earlier steps of the context may
have left memory, and the device may have less room than the limit. Invariant: a step may take the
limit minus what was left `before` it; all plans and refusals use this number, and a device's lack
of room makes plans smaller but refuses nothing. Imports limits, margins and shortage. Rejected:
computing it where it is asked for, as plans, refusals and the running forward have to agree.
"""

from __future__ import annotations

from lowtide.limits import exact_bytes, limit_in_words
from lowtide.memory import margins
from lowtide.running.shortage import Shortage


class Allowance:
    """A limit, and what is known of the steps that it is for.

    Attributes:
        limit: bytes, or a fraction of the plain peak.
        before: bytes in memory that earlier steps of the context have left, and that FSDP2 had
            gathered when it was opened in the model's forward.
        now: what the running step may take, in bytes; None if not known yet. See `renew`.
        plain_peak: of the running step, or of the last one; None if not known yet.
        largest: the largest plain peak of measured steps, including what was there before.
        outside: what a loss outside of the context takes, as a fraction of what the forward saves.
        shortage: the room that the device was found to have.
    """

    def __init__(self, limit: int | float) -> None:
        self.limit = limit
        self.before = 0
        self.now: int | None = None
        self.plain_peak: int | None = None
        self.largest = 0
        self.outside = 0.0
        self.shortage = Shortage()

    def __str__(self) -> str:
        """As `Budget` shows it, with what is known of it by now."""
        if isinstance(self.limit, int):
            return exact_bytes(self.limit)
        promised = self.promised()
        known = "" if promised is None else f", {exact_bytes(promised + self.before)}"
        return f"{limit_in_words(self.limit)}{known}"

    # ------------------------------------------------------------------ the running step

    def promised(self) -> int | None:
        """What the running step may take by its limit; None for a fraction of a peak that is not
        known yet."""
        if isinstance(self.limit, float) and self.plain_peak is None:
            return None
        return self.of(self.plain_peak or 0, self.before)

    def renew(self) -> None:
        """Set `now` by what is known by now."""
        promised = self.promised()
        self.now = None if promised is None else self.planned(self.plain_peak or 0, self.before)

    def follows(self, larger: int) -> None:
        """The running step follows the plan for one with a `larger` plain peak."""
        self.plain_peak = self._claim(larger, self.before)
        self.renew()

    def target(self, live: int, dropped: int) -> int:
        """Bytes that an unplanned forward may have live, when `live` are and `dropped` were.

        A fraction is relative to this step's own plain peak, as far as it is known by now, or to
        that of the largest step. A loss outside of the context is taken to be proportional to the
        forward, as in the last step.
        """
        outside = int(self.outside * (live + dropped)) + self.before
        if isinstance(self.limit, int):
            return int(self.shortage.within(self.limit) * (1 - margins.MODELLED)) - outside
        known = self.largest * (1 - margins.MODELLED)
        granted = int(self.limit * max(live + dropped + outside, known))
        if self.shortage.room is not None:
            granted = min(granted, int(self.shortage.room * (1 - margins.MODELLED)))
        return granted - outside

    # ------------------------------------------------------------------ any step

    def of(self, plain: int, before: int, *, covered: bool = False) -> int:
        """Bytes that a step of this plain peak may take: what is left of the whole limit.

        A fraction is relative to the largest step so far: others may take what that one may.
        `covered`: for a step that follows the plan for one with this plain peak.
        """
        if covered:
            plain = self._claim(plain, before)
        if isinstance(self.limit, int):
            return self.limit - before
        return int(self.limit * max(plain + before, self.largest)) - before

    def planned(self, plain: int, before: int) -> int:
        """Bytes that such a step is planned for: the same, or less if the device was found to have
        less room."""
        return self.shortage.within(self.of(plain, before) + before) - before

    def under_plan_of(self, larger: int, before: int) -> int:
        """Bytes that a step is planned for which follows the plan for one with a `larger` plain
        peak."""
        return self.planned(self._claim(larger, before), before)

    def _claim(self, larger: int, before: int) -> int:
        """The plain peak that a fraction is then relative to: at most the largest measured one,
        less what was there `before`."""
        return min(larger, self.largest - before if self.largest else larger)

    def measured(self, whole: int) -> bool:
        """A step took this much plain, with what was there before; whether a fraction grants more
        from now on."""
        grown = whole > self.largest
        self.largest = max(whole, self.largest)
        return grown and isinstance(self.limit, float)

    # ------------------------------------------------------------------ a device without room

    def ran_out(self, live: int) -> None:
        """The device ran out of memory while `live` bytes of the running step were live."""
        self.shortage.ran_out(live + self.before, self.limit)
        self.renew()

    def backward_ran_out(self, peak: int | None) -> None:
        """The device had no room for a backward planned for this peak, or for `now`."""
        expected = self.now if peak is None else peak
        if expected is not None:
            self.shortage.backward_ran_out(expected + self.before, self.limit)
