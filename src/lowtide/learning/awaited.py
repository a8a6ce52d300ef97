"""Waiting for steps that have a plan and were never measured.

Problem: which step it is shows only while it runs, but measuring begins with the step. Invariant:
the steps that are measured in vain get ever fewer, however the steps follow one another: a loop
over a few sizes gets all of them measured soon, one over sizes drawn at random never. Imports
newest. Rejected: measuring until the step has come, which was every third step of a loop with
thirty sizes; measuring on suspicion, as nothing at a step's begin tells its size.
"""

from __future__ import annotations

from lowtide.learning.newest import Newest

PATIENT = 16  # known steps measured in vain, one after the other
_LONGEST = 1000  # steps without waiting
_COUNTED = 1000  # steps of which it is known when they last came


class Awaited:
    """When to measure, so that a step is met that has a plan but no measurement."""

    def __init__(self) -> None:
        self._waiting = 0  # for how many more measured steps
        self._rest = 0  # how many steps follow a plan before there is waiting again
        self._pause = PATIENT  # how long that is, after the next time of waiting in vain
        self._now = 0  # the number of the step that runs
        # When a step came, and how long after the last time.
        self._last = Newest[int, tuple[int, int]](_COUNTED)
        self._due: set[int] = set()  # when one of them is due again

    def begins(self, step: int) -> None:
        """The step of this number begins."""
        self._due.discard(self._now)
        self._now = step

    @property
    def is_due(self) -> bool:
        """Whether it is time for one that comes regularly."""
        return self._now in self._due

    @property
    def waits(self) -> bool:
        """Whether to measure until one comes."""
        return self._waiting > 0

    def wait(self) -> None:
        """There is such a step, and it may come again soon."""
        if not (self._rest or self._waiting):
            self._waiting = PATIENT

    def waited(self) -> None:
        """A step was measured. If none that is awaited has come for long, there is a rest, each
        time a longer one: measuring takes a multiple of the time of a step of small operations."""
        if not self._waiting:
            return
        self._waiting -= 1
        if not self._waiting:
            self._rest = self._pause
            self._pause = min(2 * self._pause, _LONGEST)

    def followed(self) -> None:
        """A step followed a plan."""
        self._rest = max(0, self._rest - 1)

    def met(self) -> None:
        """One that was awaited came, and was measured."""
        self._pause = max(PATIENT, self._pause // 2)

    def missed(self, step: int) -> None:
        """This one came, and was not measured. The last batch of an epoch comes regularly, but not
        so soon that anyone would wait for it."""
        self.wait()
        now = self._now
        last, before = self._last.get(step, (0, 0))
        self._last.put(step, (now, now - last))
        if now - last == before:
            self._due.add(now + before)
