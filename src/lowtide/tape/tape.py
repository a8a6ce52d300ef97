"""The tape: what one recording shares with its handles.

Problem: handles outlive the recorder, are unpacked on other threads, and must find out what the
plan says about them. Invariant: the tape owns no values (handles do), so it costs nothing once
autograd has released its graph; every decision is left to `decisions`, which refer to their tape
weakly, so that no step waits for Python's garbage collector. Imports regions and values. Rejected:
a global registry of steps.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from lowtide.tape.regions import Region
from lowtide.tape.values import Handle, Value

if TYPE_CHECKING:
    import torch

    from lowtide.running.where import Where
    from lowtide.tape.operators import Facts
    from lowtide.tape.recorder import Recorder
    from lowtide.tape.values import Operation


class Decisions:
    """What the tape asks a plan or a policy; here it holds, retains and frees nothing.
    Implementations hold no tensors."""

    __slots__ = ()

    asks: bool
    """Whether it wants to be told of operations and saves even where no region has a policy. If
    not, it is `RegionDecisions`, whose rule for `retained` the compiled replay has in C++."""

    where: Where | None = None
    """The device whose bytes count; None: all devices."""

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        """An operation ran: set `keep` of the values to hold as soon as anything needs them.

        `args` and `kwargs` are the call's own, for policies that look at them; do not store them.
        """

    def saved(self, value: Value, region: Region) -> bool:
        """Whether to hold a value that autograd is saving now."""
        return False

    def packed(self, handle: Handle, value: Value) -> None:
        """Autograd received a handle on `value`; called again if the handle moves to another."""

    def gathered(self, keys: list[int], nbytes: int, parts: int) -> None:
        """FSDP2 has gathered parameters of so many bytes, whose storages have these keys, from so
        many ranks."""

    def cut_off(self, numbers: int) -> None:
        """Nothing can make the values so far again, of which there are so many numbers, once their
        part of the model has ended: FSDP2 has freed its parameters. The tape holds what something
        reads after that."""

    def forgotten(self, value: Value) -> None:
        """All graphs that had saved a held value died in the forward: it is about to be dropped."""

    def requested(self, handle: Handle) -> None:
        """Autograd asks for a saved tensor: the next event of backward."""

    def retained(self, value: Value, request: Handle) -> bool:
        """Whether to hold a value that a replay has made on the way to another."""
        return False

    def replayed(self, operations: list[Operation], seconds: float) -> None:
        """These operations were run again, in this order, which took this long."""

    def answered(self, value: Value, given: torch.Tensor) -> None:
        """The tensor that autograd asked for is there, in the memory of `given`."""

    def out_of_memory(self, facts: Facts, func: Any, args: Any, kwargs: Any, attempt: int) -> bool:
        """The device has no room for an operation of the forward: free something.

        `attempt` is how often this operation has failed before. Returns whether anything was
        freed, so that another attempt makes sense.
        """
        return False

    def replay_out_of_memory(self, attempt: int) -> bool:
        """The device has no room for a replay that backward has asked for: free something, as in
        `out_of_memory`."""
        return False

    def woken(self, at: int) -> None:
        """After `at` calls that were not recorded, as the recorder idled, the step turns out to be
        another one: from here on it is recorded."""

    def kept_whole(self) -> None:
        """The compiled recorder met wrapper subclasses and can drop nothing of them; the next
        recording, which is in Python, can."""


class Tape:
    """Shared by the recorder, its handles and the replay of one recording.

    Attributes:
        root: the outermost region.
        decisions: what to hold and what to retain.
        timed: measure the seconds of each operation.
        lock: one replay at a time (a backward may use several threads).
        recorder: the recorder while the forward is being recorded, else None.
        events: the number of backward's last request for a recorded value, in a backward that
            nothing observes; else None. The compiled hook then counts here instead of calling
            `requested` and `answered`, and a replay retains what it makes, if autograd still has a
            handle on it, from request `retain_from` on.
        passing: None unless regions are nested: then what replays hold for a backward that retains
            its graph, a heap of (place in the order of recording, negative; a number; the value),
            see `tape/retained.py`.
    """

    __slots__ = (
        "__weakref__",
        "decisions",
        "events",
        "lock",
        "passing",
        "recorder",
        "root",
        "timed",
    )

    def __init__(self, decisions: Decisions, root: Region, *, timed: bool = False) -> None:
        self.decisions = decisions
        self.root = root
        self.timed = timed
        self.lock = threading.RLock()
        self.recorder: Recorder | None = None
        self.events: list[int] | None = None
        self.passing: list[tuple[int, int, weakref.ref[Value]]] | None = None
