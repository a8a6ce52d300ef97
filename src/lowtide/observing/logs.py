"""What a graph knows of an operation, as far as that needs no tensors.

Problem: a step is watched as it runs, or goes alone for a while and is watched after all; its graph
must not depend on which. Invariant: both kinds of operations are noted here, in one way; what only
the arguments show is added by an observer, or is the most that it may be. Imports rebuild and the
tape. Rejected: a type of its own for operations that nobody watched, which each reader of a graph
would have to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.observing.rebuild import KEPT, OpLog
from lowtide.tape.values import Operation, Value

if TYPE_CHECKING:
    from lowtide.running.prepared import Signature

# An operation of a step that nobody watched: its signature, the values that it made and overwrote,
# the bytes that were live after it, and the most that it and its backward take.
Alone = tuple["Signature", tuple[int, ...], tuple[int, ...], int, int, int]


def what_ran(
    op: Operation,
    made: list[Value],
    signature: Signature,
    live: int,
    begin: int | None,
    mark: int,
) -> OpLog:
    """What an operation has read and made; that it takes more, or has a backward, is not known."""
    log = unwatched((signature, made_by(made), overwritten_by(op), live, 0, 0))
    log.seconds, log.begin, log.mark, log.receivers = op.seconds, begin, mark, log.inputs
    return log


def made_by(made: list[Value]) -> tuple[int, ...]:
    """The numbers of the values that an operation has made."""
    return tuple([value.number for value in made])


def overwritten_by(op: Operation) -> tuple[int, ...]:
    """The numbers of the values that an operation writes in place."""
    found = [ref.value for ref, _ in op.writes]
    return tuple([value.number for value in found if value and value.number >= 0])


def unwatched(ran: Alone) -> OpLog:
    """An operation that nobody watched, with the most that it and its backward may take."""
    (name, sizes, reads, wanted), outputs, overwrites, live, need, later = ran
    inputs = tuple(dict.fromkeys([number for number in reads if number >= 0]))
    plain = name.removesuffix(KEPT)
    return OpLog(
        name=plain,
        seconds=0.0,
        reads=reads,
        inputs=inputs,
        outputs=outputs,
        sizes=sizes,
        live=live,
        begin=None,
        mark=0,
        workspace=max(0, need - sum(sizes)),
        temporaries=later,
        left=min(later, wanted),
        wanted=wanted,
        receivers=inputs if later else (),
        overwrites=overwrites,
        kept=plain != name,
    )
