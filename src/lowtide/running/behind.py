"""What backwards through the graphs of earlier steps take again.

Problem: truncated back-propagation through time whose state is not detached sends each backward
through the graphs of the parts before it, which were retained. Their records replay what their own
backward replayed, beside what the running step holds, and no record of this step shows that.
Invariant: nothing of those steps is held; they count as long as autograd has a handle of theirs.
Imports tape values. Rejected: planning the backwards of several records as one, as each has decided
for good what it holds.
"""

from __future__ import annotations

from lowtide.tape.values import Handle, WeakList


class Behind:
    """Steps that are over, whose graphs are still there for another backward."""

    def __init__(self) -> None:
        self._known: list[tuple[WeakList[Handle], int]] = []

    def add(self, handles: WeakList[Handle], nbytes: int) -> None:
        """A step's backward is over, and has kept its graph, which has these handles: it took so
        many bytes beside what the step still holds."""
        self._known.append((handles, nbytes))

    @property
    def nbytes(self) -> int:
        """The most that a backward through one of them takes beside what they hold."""
        self._known = [known for known in self._known if known[0].any()]
        return max((nbytes for _, nbytes in self._known), default=0)
