"""What backwards through the graphs of earlier steps take again.

Problem: truncated back-propagation through time whose state is not detached sends each backward
through the graphs of the parts before it, which were retained. Their records replay what their own
backward replayed, beside what the running step holds, and no record of this step shows that.
Invariant: nothing of those steps is held; they count as long as autograd has a handle of theirs.
Imports tape values. Rejected: planning the backwards of several records as one, as each has decided
for good what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.tape.values import Handle, WeakList


class Behind:
    """Steps that are over, whose graphs are still there for another backward."""

    def __init__(self) -> None:
        self._known: list[_Step] = []

    def add(self, handles: WeakList[Handle], nbytes: int, dropped: int, doubled: int) -> None:
        """A step's backward is over, and has kept its graph, which has these handles: it took so
        many bytes beside what the step still holds, and would hold `dropped` more if it might. A
        differentiable one has `doubled` bytes in memory for the backward through it."""
        self._known.append(_Step(handles, nbytes, dropped, doubled))

    def context_begins(self) -> None:
        """What the steps so far have in memory does not count towards the limit from here on."""
        for step in self._alive():
            step.dropped = 0

    @property
    def nbytes(self) -> int:
        """The most that a backward through one of them takes beside what they hold."""
        return max((step.nbytes for step in self._alive()), default=0)

    @property
    def dropped(self) -> int:
        """What those of this context would hold more under a larger limit."""
        return sum(step.dropped for step in self._alive())

    @property
    def doubled(self) -> int:
        """What is in memory for a backward through those whose own was differentiable."""
        return sum(step.doubled for step in self._alive())

    def _alive(self) -> list[_Step]:
        self._known = [step for step in self._known if step.handles.any()]
        return self._known


@dataclass
class _Step:
    handles: WeakList[Handle]
    nbytes: int
    dropped: int
    doubled: int
