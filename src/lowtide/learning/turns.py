"""Which plan the step that begins now will follow.

Problem: nothing at the beginning of a step tells which one it is, and one that begins under another
step's plan has to change plans later, may lack what that plan dropped, and is measured in vain.
Invariant: a guess costs or saves time and nothing else. Imports newest and prepared. Rejected:
always the plan that was followed last, which is the wrong one at every step of a loop over several
heads, or of an accumulation whose last part is another step.
"""

from __future__ import annotations

from lowtide.learning.newest import Newest
from lowtide.running.prepared import Prepared

_LONGEST = 8  # steps: longer turns are told by how they end
_KEPT = 4096  # endings that are remembered
_WEIGHT = 0.125  # of the last guess, in how well guesses have done of late
_SURE = 0.05  # how much more often a guess has to be right than that the same step comes again

_Ending = tuple[int, ...]


class Turns:
    """What followed what, for each place among the steps of a context. Plans are known by the
    digests of their operations, as a better one may have taken a plan's place."""

    def __init__(self) -> None:
        self._history: dict[int, _Ending] = {}  # the last steps at each place, the newest last
        # What followed steps that ended so.
        self._after = Newest[tuple[int, _Ending], int](_KEPT)
        self._gain: dict[int, float] = {}  # how much more often than the last plan it was the guess

    def followed(self, prepared: Prepared) -> None:
        """A step followed this plan."""
        place, now = prepared.seen.place, prepared.digest
        history = self._history.get(place, ())
        if history:
            gain, guess = self._gain.get(place, 0.0), self._guess(place)
            self._gain[place] = gain + _WEIGHT * ((guess == now) - (history[-1] == now) - gain)
            for ending in _endings(history):
                self._after.put((place, ending), now)
        self._history[place] = (*history, now)[-_LONGEST:]

    def next(self, place: int) -> int | None:
        """The digest of the plan that is expected; None: the one that was followed last."""
        return self._guess(place) if self._gain.get(place, 0.0) > _SURE else None

    def _guess(self, place: int) -> int | None:
        """What came after steps that ended like the last ones, of which the most are alike."""
        history = self._history.get(place, ())
        found = (self._after.get((place, ending)) for ending in _endings(history))
        return next((after for after in found if after is not None), None)


def _endings(history: _Ending) -> list[_Ending]:
    """The last steps: many of them, fewer, one."""
    return [history[-count:] for count in (_LONGEST, 4, 3, 2, 1) if count <= len(history)]
