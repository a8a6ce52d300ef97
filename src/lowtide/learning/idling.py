"""Which steps are not recorded, as they fit with everything kept and with room to spare.

Problem: the records of a step that takes less than half of what it may are never used, and cost
more than many small kernels do. Invariant: the recorder of such a step stays open and compares each
call with the ones that recorded steps of its plan made, one after the other; from the first call
that is another one on, the step is recorded. One of sixteen is recorded in any case, as a backward
shows nothing to a recorder that has recorded nothing. Imports newest, prepared and the engine.
Rejected: no recorder at all, as a larger batch would go unnoticed until the memory is gone; to let
steps that never recur pass until they have made a little, as one call may make any amount out of
little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lowtide import _compat, engine
from lowtide.learning.newest import Newest
from lowtide.running.prepared import Prepared

ROOM = 2  # a step is recorded if it takes more than one half of what it may
_ALIKE = 2  # recorded steps in a row that made the same calls as the one before
_EVERY = 16  # one of so many steps is recorded
_MOST = 1024  # recorded steps in a row after idling ended often in the middle of a step
_LITTLE = 8  # what is not as in the steps before may take this part of what is left
_KNOWN = 16  # plans whose calls are remembered


class Compared(NamedTuple):
    """The part of a step that was compared and not recorded, if the rest is."""

    calls: int
    nbytes: int
    """What is allowed for it: what was made is not known, but at most this."""


NOTHING = Compared(0, 0)


class _Step:
    """The steps that follow one plan."""

    def __init__(self) -> None:
        self.calls: Any = None
        self.alike = 0
        self.idled = 0  # in a row
        self.wanted = _ALIKE
        self.spare = 0  # bytes that a step which turns out to be another one may make after that

    def may_idle(self) -> bool:
        return self.alike >= self.wanted and self.idled < _EVERY - 1


def roomy(prepared: Prepared, now: int) -> bool:
    """Whether a step of this plan keeps everything and takes at most half of these bytes."""
    if not (prepared.keeps_all and prepared.measured and ROOM * prepared.unrecorded_peak <= now):
        return False
    seen = prepared.seen  # of other leaves, autograd would save and allocate something else
    return seen.current() and not seen.appeared()


def _has_room(prepared: Prepared, device: torch.device) -> bool:
    """Whether the device itself has that much more, now that the step begins. One that is not
    recorded cannot go on where it has not (rule 10)."""
    if device.type == "cpu":
        return True
    spare = _compat.spare_memory(device)
    return spare is not None and ROOM * prepared.unrecorded_peak <= spare


class Idling:
    """What a budget remembers of the calls of its steps.

    Attributes:
        steps: how many were not recorded.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._known = Newest[int, _Step](_KNOWN)
        self._now: _Step | None = None  # the running step, if it has room to spare
        self._turned = False  # it began idle, and was woken after some of its calls

    def begins(
        self, prepared: Prepared | None, now: int, recorder: Any, device: torch.device
    ) -> bool:
        """A step begins that may follow this plan and take `now` bytes, with room to spare, or
        that follows none: whether its recorder idles. It is the compiled one, or never does."""
        self._turned = False
        core = engine.core()
        if prepared is None or core is None or not isinstance(recorder, core.State):
            self._now = None
            return False
        step = self._now = self._of(prepared)
        if not (step.may_idle() and (step.idled or _has_room(prepared, device))):
            recorder.calls = core.Calls()
            return False
        core.watched.sweep()  # what other tapes read is looked up at each write
        step.spare = (now - prepared.unrecorded_peak) // _LITTLE
        step.calls.begin(step.spare)
        recorder.calls = step.calls
        step.idled += 1
        self.steps += 1
        return True

    def _of(self, prepared: Prepared) -> _Step:
        step = self._known.get(prepared.digest) or _Step()
        self._known.put(prepared.digest, step)
        return step

    def recorded(self, followed: Prepared, calls: Any) -> None:
        """A recorded step went as this plan says, and made these calls."""
        if calls is None:
            return
        step = self._of(followed)
        step.idled = 0
        same = step.calls is not None and not calls.unusual and calls.same_as(step.calls)
        step.alike = step.alike + 1 if same else 0
        step.calls = None if calls.unusual else calls

    def woken(self, at: int) -> None:
        """The idle step turned out to be another one after `at` calls, and is recorded."""
        self.steps -= 1
        self._turned = at > 0
        if at and self._now is not None:
            self._now.alike = 0

    def turned(self, made: Callable[[], int | None] | None) -> None:
        """The forward has ended. If it was woken, `made` gives the bytes that it has made since:
        None if nobody knows. That asks each operation, so it is not called in every step.

        One that made little (the first step of an epoch, which sets metrics back; one after a
        validation) would have kept the limit unrecorded, however often it comes.
        """
        turned, self._turned = self._turned, False
        if not turned or self._now is None:
            return
        nbytes = None if made is None else made()
        if nbytes is None or nbytes > self._now.spare:
            self._was_another()

    def ended(self) -> None:
        """The forward of an idle step has ended: with fewer calls, it was another one."""
        step = self._now
        if step is not None and step.calls.at < len(step.calls):
            self._was_another()

    def ran_out(self) -> None:
        """The device had no memory for an idle step: of one that is recorded, some can be freed."""
        self._was_another()

    def _was_another(self) -> None:
        if self._now is not None:
            self._now.alike = 0
            self._now.wanted = min(4 * self._now.wanted, _MOST)
