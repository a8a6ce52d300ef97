"""Running an operation again after the device ran out of memory and something was freed (rule 10).

Problem: a device may be full before a limit is reached, and a step that should fit would end there.
Invariant: an operation is run again only if the failed attempt left no trace: it writes to none of
its arguments, and random states and running statistics are restored. If it cannot be run again, the
allocator's own error is raised. Imports `_compat` and generators. Rejected: starting the step
anew, which would run user code twice (rule 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.tape.generators import put

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder
    from lowtide.tape.values import RareOperation

NOTE = (
    "lowtide: the device was full here although the limit was not reached, and nothing more could "
    "be let go of. Use a smaller limit than what other tensors and processes leave free, or a "
    "smaller batch."
)

MakeRoom = Callable[[int], bool]
"""Free memory, the more the higher the number of the attempt; returns whether any was freed."""


def with_room(
    run: Callable[[], Any],
    make_room: MakeRoom,
    undo: Callable[[], None] | None = None,
    *,
    limited: bool,
) -> Any:
    """Call `run`, and again each time it runs out of memory and `make_room` frees some.

    Args:
        limited: there is a limit; the error then notes that it was not reached.

    Raises:
        torch.OutOfMemoryError: nothing is left that could be freed.
    """
    attempt = 0
    while True:
        try:
            return run()
        except torch.OutOfMemoryError as error:
            failed = error.with_traceback(None)  # its frames hold tensors
        if not make_room(attempt):
            if limited:
                failed.add_note(NOTE)
            try:
                raise failed
            finally:
                del failed  # or its traceback and this frame would keep each other alive
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
    """Run an operation of the forward on an accelerator.

    Running statistics are copied beforehand only while a step is watched. In a step that follows a
    plan, an operation that moves them is not run again.
    """
    if any(not recorder.timed or place not in statistics for _, place in written):
        return recorder.call(op, func, args, kwargs)
    moved = [(args[place], args[place].detach().clone()) for place in statistics]

    def undo() -> None:
        for generator, state in op.draws:
            put(generator, state)
        # must not move their version counters (rule 4)
        with _compat.below_autograd(), _compat.no_overrides():
            for tensor, before in moved:
                tensor.copy_(before)

    return with_room(
        lambda: recorder.call(op, func, args, kwargs),
        lambda attempt: recorder.decisions.out_of_memory(op.facts, func, args, kwargs, attempt),
        undo,
        limited=recorder.decisions.where is not None,
    )
