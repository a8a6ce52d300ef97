"""An operation for which the device has no memory, run again once something has gone (rule 10).

Problem: a device may be full before a limit is reached, and a step that was to fit would end there.
Invariant: only what has left nothing behind is run again: an operation that writes to none of its
arguments, random states and running statistics being put back as they were. What then fails arrives
as itself. Imports torch. Rejected: to begin the step anew, which would run user
code twice (rule 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder
    from lowtide.tape.values import RareOperation

NOTE = (
    "lowtide: the device was full here although the limit was not reached, and nothing more could "
    "be let go of. Use a smaller limit than what other tensors and processes leave free, or a "
    "smaller batch."
)

MakeRoom = Callable[[int], bool]
"""Let go of something, the more the higher the number of the attempt; whether any has gone."""


def with_room(
    run: Callable[[], Any],
    make_room: MakeRoom,
    undo: Callable[[], None] | None = None,
    *,
    limited: bool,
) -> Any:
    """Run something, as often as it runs out of memory and something can go.

    Args:
        limited: there is a limit, of which the error says that it was not reached.

    Raises:
        torch.OutOfMemoryError: nothing is left that could go.
    """
    attempt = 0
    while True:
        try:
            return run()
        except torch.OutOfMemoryError as error:
            failed = error.with_traceback(None)  # whose frames hold tensors
        if not make_room(attempt):
            if limited:
                failed.add_note(NOTE)
            try:
                raise failed
            finally:
                del failed  # or its traceback would hold this frame, and this frame it
        if undo is not None:
            undo()
        attempt += 1


def called_with_room(
    recorder: Recorder,
    op: RareOperation,
    func: Any,
    args: Any,
    kwargs: Any,
    written: Iterable[tuple[Any, int | str]],
    statistics: tuple[int, ...],
) -> Any:
    """Run an operation of the forward on a device.

    Running statistics are copied before it while a step is watched, and not in each that follows a
    plan: one that moves them is not run again there.
    """
    if any(not recorder.timed or place not in statistics for _, place in written):
        return recorder.call(op, func, args, kwargs)
    moved = [(args[place], args[place].detach().clone()) for place in statistics]

    def undo() -> None:
        for generator, state in op.draws:
            generator.set_state(state)
        with _compat.below_autograd():  # no version moves with them (rule 4)
            for tensor, before in moved:
                tensor.copy_(before)

    return with_room(
        lambda: recorder.call(op, func, args, kwargs),
        lambda attempt: recorder.decisions.out_of_memory(op.facts, func, args, kwargs, attempt),
        undo,
        limited=recorder.decisions.where is not None,
    )
