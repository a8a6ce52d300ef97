"""What the backward of a custom `torch.autograd.Function` takes, guessed from its forward.

Problem: its forward runs without grad, operation by operation, and nothing shows what its backward
will do before that has run once. Invariant: if the forward reads parameters, the backward is taken
to run it again with grad, as reversible blocks, equilibria and reentrant checkpoints do; if not, to
be the derivative of a formula, which holds what the forward held. Both also make the gradients of
the inputs. The first is too much for a function of many reversible blocks, which runs them one by
one: room is made for it, but no step is refused for it (`Observer.sparing`). What ran without grad
and was read by others than Functions has no backward. Imports nothing that runs. Rejected: wrapping
`Function.apply`, which is often bound before it could be wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.observing.logs import OpLog
    from lowtide.observing.observer import Observer


def ends(seen: Observer) -> set[int]:
    """The last operation of each Function's forward: a result that it made was read and has a
    graph, or a tensor was saved right after it and not for the operation that follows."""
    ops = seen.ops
    found = {index for index, log in enumerate(ops) if log.function}
    for number, place in seen.last_save:
        hidden = 0 < place <= len(ops) and ops[place - 1].hidden is not None
        if hidden and kept_for(ops, number, place - 1):
            found.add(place - 1)
    return found


def kept_for(ops: Sequence[OpLog], number: int, last: int) -> bool:
    """Whether the Function whose last operation this is saved a value that was saved right after
    it: it did if the next operation does not read the value."""
    return last + 1 >= len(ops) or number not in ops[last + 1].inputs


def extra(seen: Observer, sizes: list[int], ended: set[int]) -> dict[int, int]:
    """Last operation of a Function's forward -> bytes that the Function's backward takes."""
    return {last: _cost(seen, sizes, _first(seen, last), last) for last in ended}


def _first(seen: Observer, last: int) -> int:
    """The first of the operations without grad that lead to this one, with no node in between."""
    first, hidden = last, seen.ops[last].hidden
    assert hidden is not None
    # Autograd makes a Function's node before its forward, and none while that runs.
    while first and (before := seen.ops[first - 1].hidden) and before[0] == hidden[0]:
        first -= 1
    return first


def outside(seen: Observer, ended: set[int]) -> set[int]:
    """Operations that ran without grad in no Function: a teacher's, or those of a frozen encoder
    whose parameters require grad. What they made was read, and had no graph then. As long as it was
    not read, they may be a Function's."""
    ops = seen.ops
    inside = {index for last in ended for index in range(_first(seen, last), last + 1)}
    last_read: dict[int, int] = {}
    for index, log in enumerate(ops):
        last_read.update(dict.fromkeys(log.inputs, index))
    found: set[int] = set()
    last = len(ops) - 1
    while last >= 0:
        if ops[last].hidden is None or last in inside:
            last -= 1
            continue
        run = range(_first(seen, last), last + 1)
        made = [number for index in run for number in ops[index].outputs]
        if any(last_read.get(number, -1) > last for number in made):
            found.update(run)
        last = run.start - 1
    return found - inside


def runs_again(ops: Iterable[OpLog]) -> bool:
    """Whether a custom Function among these operations is taken to run its forward again."""
    return any(log.hidden and log.hidden[1:] for log in ops)


def some_run_again(seen: Observer) -> bool:
    """Whether a custom Function of a forward that is over is taken to run its forward again; what a
    teacher ran without grad is no Function."""
    return any(runs_again(seen.ops[_first(seen, last) : last + 1]) for last in ends(seen))


def _cost(seen: Observer, sizes: list[int], first: int, last: int) -> int:
    ops = seen.ops[first : last + 1]
    made = {number for log in ops for number in log.outputs}
    inputs = {number for log in ops for number in log.inputs} - made
    # What the next operation may have saved instead is taken to be released by then.
    saved = {n for n, place in seen.last_save if place == last + 1 and n not in made}
    there = sum(sizes[n] for n in saved if not kept_for(seen.ops, n, last))
    gradients = sum(sizes[number] for number in inputs)
    if seen.sparing or not runs_again(ops):
        return there + gradients + _passing(ops, sizes)
    return there + gradients + _again(ops) + max(sum(log.sizes) for log in ops)


def _again(ops: Sequence[OpLog]) -> int:
    """Bytes of all that its forward makes. Further calls with the same parameters are iterations,
    of which only one is differentiated."""
    met: set[object] = set()
    total, offset = 0, 0
    leaves: tuple[int, ...] = ()
    for log in ops:
        if log.hidden and log.hidden[1:]:
            leaves, offset = log.hidden[1:], 0
        offset += 1
        key = (leaves, offset, log.name, log.sizes)
        if not leaves or key not in met:
            met.add(key)
            total += sum(log.sizes)
    return total


def _passing(ops: Sequence[OpLog], sizes: list[int]) -> int:
    """The most bytes of what its forward makes that are alive at once."""
    last = {number: k for k, log in enumerate(ops) for number in (*log.outputs, *log.inputs)}
    over: list[list[int]] = [[] for _ in ops]
    for log in ops:
        for number in log.outputs:
            over[last[number]].append(sizes[number])
    level = peak = 0
    for log, ended in zip(ops, over, strict=True):
        level += sum(log.sizes)
        peak = max(peak, level)
        level -= sum(ended)
    return peak
