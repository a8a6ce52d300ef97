"""Steps under a limit that are not recorded, or only from one of their calls on.

Problem: what a step needs in order to go unrecorded is known to the loop, to the plans and to its
recorder. Invariant: such a step begins alone, under a limit that is not shared with other ranks;
one that is recorded from its middle on is allowed what its first part may have taken at most, and
nothing is learned from it. Imports idling, knowledge and decide. Rejected: asking the
recorder for what it let pass, which it does not keep.
"""

from __future__ import annotations

from typing import Any

from lowtide.learning import idling
from lowtide.learning.knowledge import Knowledge
from lowtide.running.decide import StepDecisions
from lowtide.running.prepared import Prepared
from lowtide.running.where import Where


class Unrecorded:
    """The part of a budget that lets steps run unrecorded.

    Attributes:
        idling: which ones may, and how many did.
    """

    def __init__(self, knows: Knowledge, where: Where) -> None:
        self._knows, self._allowance, self._where = knows, knows.allowance, where
        self.idling = idling.Idling()

    def begins(self, decisions: StepDecisions, recorder: Any, alone: bool) -> None:
        """A step begins: not recorded if that is possible. `alone`: no other step is under way, and
        no hooks of the program's are around this one."""
        now, device = self._allowance.now or 0, self._where.device
        roomy = self._roomy(decisions) if alone else None
        decisions.idle = self.idling.begins(roomy, now, recorder, device)
        decisions.noted = None if decisions.idle else getattr(recorder, "calls", None)

    def _roomy(self, decisions: StepDecisions) -> Prepared | None:
        """The plan of a step that need not be recorded: nothing is to be learned from it, and there
        is room to spare."""
        prepared, now = decisions.prepared, self._allowance.now
        if prepared is None or now is None or decisions.observer is not None:
            return None
        if self._knows.ranks is not None or self._knows.behind.nbytes:
            return None
        return prepared if idling.roomy(prepared, now) else None

    def woken(self, prepared: Prepared | None, at: int) -> None:
        """The running step is not the one that its idle recorder was to compare it with, and has
        made `at` of that one's calls."""
        self.idling.woken(at)
        if at and prepared is not None:
            self._knows.compared = idling.Compared(at, prepared.unrecorded_peak)
            self._allowance.before += self._knows.compared.nbytes
            self._allowance.renew()
