"""What a budget's report tells, noted where it is learned.

Problem: a report is asked for at any time, and tells of the last step, of peaks that an earlier one
may have shown, and of what the next may take. Invariant: asking changes nothing, and what is not
known is None. Imports knowledge, report, decide, making_room and prepared. Rejected: a report made
at the end of each step, which most programs never look at.
"""

from __future__ import annotations

from lowtide.learning.knowledge import Knowledge
from lowtide.report import BudgetReport
from lowtide.running.decide import StepDecisions
from lowtide.running.making_room import Tally
from lowtide.running.prepared import Signature


class Reported:
    """The last step, and what was measured.

    Attributes:
        last: the step that was learned from last.
    """

    def __init__(self, knows: Knowledge) -> None:
        self._knows = knows
        self.last: StepDecisions | None = None
        self._peak: tuple[int, tuple[Signature, ...]] | None = None  # the last one, and whose
        self._peaks = 0
        self._highest: int | None = None
        self._obstacle: str | None = None  # why the last that should have been measured was not

    def measured(self, peak: int, whose: tuple[Signature, ...]) -> None:
        """A step of these operations took so many bytes at its peak, with what was there before."""
        self._peak, self._peaks = (peak, whose), self._peaks + 1
        self._highest = max(peak, self._highest or 0)
        self._obstacle = None

    def not_measured(self, why: str) -> None:
        """A step that was to be measured could not be."""
        self._obstacle = why

    def report(self, *, steps: int, idle_steps: int, recorder: str | None) -> BudgetReport:
        """What the last step that was learned from did, and what else `BudgetReport` has."""
        last, allowance = self.last, self._knows.allowance
        prepared = last.prepared if last is not None else None
        tally = last.tally if last is not None else Tally()
        kept, recomputed = (None, None) if prepared is None else prepared.bytes()
        peak, whose = self._peak or (None, ())
        alike = last is not None and peak is not None and tuple(last.seen) == whose
        compared, plain = self._knows.compared.nbytes, allowance.plain_peak

        def whole(nbytes: int | None) -> int | None:
            return None if nbytes is None else nbytes + allowance.before

        return BudgetReport(
            limit=whole(allowance.promised()),
            planned_peak=None if prepared is None else whole(prepared.peak - compared),
            measured_peak=peak,
            plain_peak=None if plain is None else whole(plain - compared),
            kept_bytes=kept,
            recomputed_bytes=recomputed,
            recorded_operations=0 if last is None else last.operations,
            replayed_operations=tally.replayed_operations,
            replay_seconds=tally.replay_seconds,
            steps=steps,
            planned=prepared is not None,
            measured_alike=alike,
            left_plan_at=tally.diverged_at,
            measured_steps=self._peaks,
            highest_peak=self._highest,
            device_room=allowance.shortage.room,
            fraction=allowance.limit if isinstance(allowance.limit, float) else None,
            idle_steps=idle_steps,
            recorder=recorder,
            obstacle=self._obstacle,
        )
