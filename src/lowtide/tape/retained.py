"""What regions have recomputed, while a backward retains the graph that asks for it.

Problem: autograd lets go of a handle when it releases the graph. With `retain_graph=True` it does
not, so that what each region recomputes would stay, and the peak be that of the plain step.
Invariant: a value is dropped when the backward that runs has asked for all that was saved of it, as
`torch.utils.checkpoint` does; or once it has come to what was saved before the value was made, as
regions inside others may read it until then. Another backward makes it again. Imports `_compat`,
values. Rejected: dropping at the end of the backward, when all regions' values are in memory at
once.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from typing import TYPE_CHECKING

from lowtide import _compat
from lowtide.tape.values import Handle, Value

if TYPE_CHECKING:
    from lowtide.tape.tape import Tape

_count = itertools.count()  # so that no two entries of a heap are equal


def free_once_asked(handle: Handle) -> None:
    """Autograd has asked for a handle: drop the value in a region that is not needed any more.

    A budget's plan says what stays, and counts it.
    """
    tape, backward = handle.tape, _compat.backward_number()
    if tape.decisions.asks or tape.recorder is not None:
        return
    if backward < 0 or not _compat.backward_retains_graph():
        return
    handle.asked_in = backward
    value = handle.value
    if tape.passing is not None:
        free_passed(handle)
    elif _may_go(value) and value.scope is value.region and _all_asked(value, backward):
        value.held = None


def _may_go(value: Value) -> bool:
    return value.op is not None and not value.keep


def _all_asked(value: Value, backward: int) -> bool:
    return all(handle.asked_in == backward for handle in value.handles())


def free_later(value: Value, tape: Tape) -> None:
    """A replay now holds a value: have it dropped once backward has come past its operation."""
    if tape.passing is None or tape.decisions.asks or tape.recorder is not None:
        return
    if not _may_go(value):
        return
    if _compat.backward_number() >= 0 and _compat.backward_retains_graph():
        assert value.op is not None
        heapq.heappush(tape.passing, (-value.op.sequence, next(_count), weakref.ref(value)))


def free_passed(handle: Handle) -> None:
    """Where regions are nested, backward has come to a handle: drop what was made after it.

    Autograd runs the newest node first, so nothing is asked for any more that is made of these.
    Should it be (a node on another device), they are made again. A node asks for what it has saved
    of its arguments before what it has saved of its results. So results stay until then, and
    arguments until another node asks, as results inside a region may be made again of them.
    """
    passing, backward, value = handle.tape.passing, handle.asked_in, handle.value
    assert passing is not None
    own = []
    while passing and -passing[0][0] >= handle.sequence:
        entry = heapq.heappop(passing)
        made = entry[2]()
        if made is None or not _may_go(made):
            continue
        if -entry[0] > handle.sequence or _all_asked(made, backward):
            made.held = None
        else:
            own.append(entry)
    for entry in own:
        heapq.heappush(passing, entry)
    flat = handle.region.parent is None and value.scope is value.region
    is_result = value.op is not None and handle.sequence <= value.op.sequence + 1
    if (flat or is_result) and _may_go(value) and _all_asked(value, backward):
        value.held = None
