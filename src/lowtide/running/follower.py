"""The compiled recorder while it follows a plan by itself.

Problem: asking Python at each operation whether the step is still the planned one costs more than
recording it. Invariant: what the recorder has found to be as planned it does not tell; `seen` has
it once `catch_up` has been called, so whoever reads `seen` calls that first. The recorder is left
alone for good by `stop`. Imports engine, prepared. Rejected: a list that the compiled recorder
appends to, which makes three Python objects an operation that nobody reads in a step as planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowtide import engine
from lowtide.running.prepared import Prepared, Signature
from lowtide.tape.values import Handle, Value, WeakList


class Follower:
    """A compiled recorder, what it has been given to follow, and what it shares with Python.

    Attributes:
        made: values that were made, `Decisions.produced` or not.
        handles: what autograd has got, `Decisions.packed` or not.
        event: the number of backward's last request, which a compiled hook counts.
    """

    __slots__ = ("_recorder", "_seen", "_signatures", "_sizes", "event", "handles", "made")

    def __init__(self, recorder: Any, seen: list[Signature]) -> None:
        core = engine.core()
        self.made: WeakList[Value] = core.WeakList()
        self.handles: WeakList[Handle] = core.WeakList()
        self.event: list[int] = core.Box(-1)
        self._recorder = recorder
        self._seen = seen
        self._signatures: tuple[Signature, ...] = ()
        # Of a step that is covered, not yet in `seen`: what each operation made, and wants.
        self._sizes: list[int] | None = None
        recorder.made, recorder.handles = self.made, self.handles

    @staticmethod
    def of(recorder: Any, seen: list[Signature]) -> Follower | None:
        """None for the recorder in Python, which tells everything."""
        core = engine.core()
        if core is None or not isinstance(recorder, core.State):
            return None
        return Follower(recorder, seen)

    def follow(self, prepared: Prepared, ceiling: int | None, *, covered: bool) -> None:
        """Compare the step with this plan, as long as no more than so many bytes are live.

        `produced` is called only where something has to be done that is not in the plan's list.
        A step that is covered may make fewer of them than planned.
        """
        self._signatures = prepared.signatures
        self._recorder.script = prepared.script
        self._sizes = self._recorder.sizes = [] if covered else None
        self._recorder.limit = -1 if ceiling is None else ceiling

    def catch_up(self, count: int | None = None) -> None:
        """Operations that were found to be as planned, up to the `count`-th or to the last."""
        if count is None:
            count = self._recorder.sequence
        seen = self._seen
        if len(seen) >= count:
            return
        planned = self._signatures[len(seen) : count]
        seen.extend(planned if self._sizes is None else self._as_made(planned))

    def _as_made(self, planned: Sequence[Signature]) -> Iterator[Signature]:
        """Operations of a step that is covered, with the bytes that they made."""
        assert self._sizes is not None
        sizes, used = self._sizes, 0
        for name, most, reads, _ in planned:
            last = used + len(most)
            yield name, tuple(sizes[used:last]), reads, sizes[last]
            used = last + 1
        del sizes[:used]

    def stop(self) -> None:
        """From now on every operation is told."""
        self._recorder.script = None
