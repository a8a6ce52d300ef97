"""The compiled recorder while it follows a plan by itself.

Problem: asking Python at each operation whether the step is still the planned one costs more than
recording it. Invariant: the recorder does not report operations that are as planned; `seen` has
them once `catch_up` was called, so call that before reading `seen`. After `stop` the recorder
follows no plan any more. Imports engine, prepared. Rejected: a list that the compiled recorder
appends to, three Python objects for each operation that are never read if all goes as planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowtide import engine
from lowtide.running.prepared import Prepared, Signature
from lowtide.tape.values import Handle, Value, WeakList


class Follower:
    """A compiled recorder, the plan that it follows, and what it shares with Python.

    Attributes:
        made: the values made while it follows the plan, reported to `Decisions` or not.
        handles: the handles that autograd got, reported to `Decisions` or not.
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
        # For a covered step: what each operation not yet in `seen` made, and wants as gradients.
        self._sizes: list[int] | None = None
        recorder.made, recorder.handles = self.made, self.handles

    @staticmethod
    def of(recorder: Any, seen: list[Signature]) -> Follower | None:
        """None for the recorder in Python, which reports everything."""
        core = engine.core()
        if core is None or not isinstance(recorder, core.State):
            return None
        return Follower(recorder, seen)

    def follow(self, prepared: Prepared, ceiling: int | None, *, covered: bool) -> None:
        """Compare the step with this plan, as long as at most `ceiling` bytes are live.

        `produced` is called only if an operation is not as planned or has to be anchored. A
        `covered` step is smaller than the planned one, and may make fewer bytes.
        """
        self._signatures = prepared.signatures
        self._recorder.script = prepared.script
        self._sizes = self._recorder.sizes = [] if covered else None
        self._recorder.limit = -1 if ceiling is None else ceiling

    def catch_up(self, count: int | None = None) -> None:
        """Add the operations that were as planned to `seen`, up to the `count`-th or the last."""
        if count is None:
            count = self._recorder.sequence
        seen = self._seen
        if len(seen) >= count:
            return
        planned = self._signatures[len(seen) : count]
        seen.extend(planned if self._sizes is None else self._as_made(planned))

    def _as_made(self, planned: Sequence[Signature]) -> Iterator[Signature]:
        """The operations of a covered step, with the bytes that they made."""
        assert self._sizes is not None
        sizes, used = self._sizes, 0
        for name, most, reads, _ in planned:
            last = used + len(most)
            yield name, tuple(sizes[used:last]), reads, sizes[last]
            used = last + 1
        del sizes[:used]

    def stop(self) -> None:
        """From now on the recorder reports every operation."""
        self._recorder.script = None
