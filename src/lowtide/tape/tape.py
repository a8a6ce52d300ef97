"""The tape: what one recording shares with its handles.

Problem: handles outlive the recorder, are asked for on other threads, and must find out what the
plan wants of them. Invariant: the tape owns no values (handles do), so it costs nothing once
autograd has let go; every decision is asked of `decisions`, none is taken here. Imports values.
Rejected: a global registry of steps.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from lowtide.tape.values import Handle, Region, Value

if TYPE_CHECKING:
    from lowtide.running.where import Where
    from lowtide.tape.operators import Facts
    from lowtide.tape.recorder import Recorder
    from lowtide.tape.values import Operation


class Decisions(Protocol):
    """What a plan or a policy answers. Implementations hold no tensors."""

    asks: bool
    """Whether it wants to be told of operations and saves where no region has a policy."""

    @property
    def where(self) -> Where | None:
        """The device whose bytes count; None: those of all."""
        ...

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        """An operation ran: set `keep` of the values to hold as soon as anything needs them.

        `args` and `kwargs` are the call's own, for policies that look at them; not to be kept.
        """
        ...

    def saved(self, value: Value, region: Region) -> bool:
        """Whether to hold a value that autograd is saving now."""
        ...

    def packed(self, handle: Handle, value: Value) -> None:
        """Autograd has got a handle on `value`; called again when it means another value."""
        ...

    def forgotten(self, value: Value) -> None:
        """All graphs that have saved a held value have died in the forward: it is let go."""
        ...

    def requested(self, handle: Handle) -> None:
        """Autograd asks for a saved tensor: the next event of backward."""
        ...

    def retained(self, value: Value, request: Handle) -> bool:
        """Whether to hold a value that a replay has made on the way to another."""
        ...

    def replayed(self, operations: list[Operation], seconds: float) -> None:
        """These operations were run again, in this order, in so many seconds."""
        ...

    def answered(self, value: Value) -> None:
        """The tensor that autograd asked for is there."""
        ...

    def out_of_memory(self, facts: Facts, func: Any, args: Any, kwargs: Any, attempt: int) -> bool:
        """The device has no room for an operation of the forward: let go of something.

        `attempt` counts the times that this operation has failed before; the answer is whether
        anything has gone, so that it may be tried again.
        """
        ...

    def replay_out_of_memory(self, attempt: int) -> bool:
        """The same for a replay that backward has asked for."""
        ...


class Tape:
    """Shared by the recorder, its handles and the replay of one recording.

    Attributes:
        root: the outermost region.
        decisions: what to hold and what to retain.
        timed: measure the seconds of each operation.
        lock: one replay at a time (a backward may use several threads).
        recorder: the recorder while the forward is being recorded, else None.
        events: where nobody needs to be told, the number of backward's last request for a recorded
            value. A compiled hook counts it by itself, in place of calling `requested` and
            `answered`; what a replay makes and autograd waits for is then retained from its
            `retain_from`-th request on.
        kept_whole: wrapper subclasses were met, of which this recording can let nothing go, and the
            next one can.
    """

    __slots__ = ("decisions", "events", "kept_whole", "lock", "recorder", "root", "timed")

    def __init__(self, decisions: Decisions, root: Region, *, timed: bool = False) -> None:
        self.decisions = decisions
        self.root = root
        self.timed = timed
        self.lock = threading.RLock()
        self.recorder: Recorder | None = None
        self.events: list[int] | None = None
        self.kept_whole = False
