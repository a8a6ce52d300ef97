"""What a recorded step consists of: values, operations, and the requests of its backward.

Problem: the solvers, the simulator and files have to mean the same by a size or a life. Invariant:
each of these is immutable and refers to others by their index in a `Graph`, which checks that they
fit together. Imports the standard library. Rejected: objects that refer to each other, which cannot
be compared, hashed or written to a file without a walk over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class ValueNode:
    """One version of one storage."""

    nbytes: int
    producer: int
    """Index of the operation that makes it, or `EXTERNAL`."""
    pinned: bool = False
    """Its storage stays in memory through backward whatever the plan says: something outside the
    tape holds it, or the tape cannot drop it. A plan may use it, and counts no bytes for it."""
    overwritten: bool = False
    """A later operation writes its storage in place, so it cannot be held from the forward on."""
    named: int = -1
    """The last operation of the forward during which something outside the tape holds its storage:
    dropping it before then frees nothing. -1 unless that is known to be after its last use. The
    number of operations: until backward's first event, as with what a loss outside has."""
    forgotten: int = -1
    """If the autograd graph that saved it dies before any backward: the last operation of the
    forward during which that graph lives; else -1. A plain step holds it until then; a plan does
    not, since no backward will ask for it."""
    owned: bool = False
    """If it is `EXTERNAL`: nothing but the record has it in backward, such as the result of a
    custom operator. It counts for as long as an operation that reads it may be replayed, or until
    its release; no replay can make it. Other externals count no bytes. If `named` is the number of
    operations, it is in memory whatever a plan says until the first event."""
    cut: int = -1
    """If it is cut off from the operation that makes it, as FSDP2 had freed what that read: the
    last operation of the forward during which a plain step has it, unless it is saved; else -1. No
    replay makes it, though one may run that operation for its other outputs. It counts for as long
    as an operation that reads it may be replayed, or until its release; and until the first event,
    if `named` is the number of operations."""


@dataclass(frozen=True, slots=True)
class OpNode:
    """One recorded operation."""

    name: str
    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace: int = 0
    """Bytes the kernel allocates and frees while it runs."""
    replayable: bool = True
    other: int = 0
    """Bytes in memory right after this operation in the forward that the plan does not hold."""
    peak_other: int = 0
    """The maximum of such bytes while the operation runs."""
    overwrites: tuple[int, ...] = ()
    """Inputs whose storage it writes in place; their new contents are among its outputs."""


@dataclass(frozen=True, slots=True)
class Event:
    """Autograd unpacks one saved value."""

    value: int
    other: int = 0
    """Bytes in memory at the unpack that the plan does not hold."""
    peak_other: int = 0
    """The maximum of such bytes from this unpack until `releases` are released; if none is, or
    that is not known, to the next unpack."""
    releases: tuple[int, ...] = ()
    """Values whose last saved-tensor handle is dropped after this event."""
    after: int = 0
    """The maximum of such bytes from then to the next unpack: operations that saved nothing have
    their backwards there. 0 if `peak_other` covers it."""
    more: int = UNKNOWN
    """How many events it takes from this one to the last of the same node of autograd's graph,
    which has the value until then. `UNKNOWN`: it may have it until the value is released."""
