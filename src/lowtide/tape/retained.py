"""What regions have recomputed, while a backward retains the graph that asks for it.

Problem: autograd lets go of a handle when it releases the graph. With `retain_graph=True` it does
not, so that what each region recomputes would stay, and the peak be that of the plain step.
Invariant: a value is dropped when the backward that runs has asked for all that was saved of it, as
`torch.utils.checkpoint` does; another backward makes it again. Imports `_compat`, values. Rejected:
dropping at the end of the backward, when all regions' values are in memory at once.
"""

from __future__ import annotations

from lowtide import _compat
from lowtide.tape.values import Handle


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
    if value.op is None or value.keep or value.scope is not value.region:
        return  # it cannot be made again, or a region inside of this one may still read it
    if all(other.asked_in == backward for other in value.handles()):
        value.held = None
