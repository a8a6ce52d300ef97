"""What the backward of a custom `torch.autograd.Function` takes, guessed from its forward.

Problem: its forward runs without grad, operation by operation, and nothing tells what its backward
will do before that has run once. Invariant: a forward that reads parameters is taken to be gone
through again with grad, as reversible blocks, equilibria and reentrant checkpoints do, and one that
does not for a formula, whose derivative holds what it did; both with the gradients of its inputs.
What ran without grad and never gets a gradient costs nothing. Imports nothing that runs. Rejected:
wrapping `Function.apply`, which is often bound before anybody could.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.observing.observer import Observer
    from lowtide.observing.rebuild import OpLog


def ends(seen: Observer) -> set[int]:
    """The last operation of each Function's forward: something with a graph was read of what it
    made, or saved right after it and not for the operation that follows."""
    ops = seen.ops
    found = {index for index, log in enumerate(ops) if log.function}
    for number, place in seen.last_save:
        hidden = 0 < place <= len(ops) and ops[place - 1].hidden is not None
        if hidden and kept_for(ops, number, place - 1):
            found.add(place - 1)
    return found


def kept_for(ops: Sequence[OpLog], number: int, last: int) -> bool:
    """Whether a value that was saved right after this last operation of a Function was saved by
    it: the operation that follows does not read it."""
    return last + 1 >= len(ops) or number not in ops[last + 1].inputs


def extra(seen: Observer, sizes: list[int], ended: set[int]) -> dict[int, int]:
    """Of the last operation of each Function's forward: bytes that its backward takes."""
    found = {}
    for last in ended:
        first, hidden = last, seen.ops[last].hidden
        assert hidden is not None
        # Autograd makes its node before its forward, and none while that runs.
        while first and (before := seen.ops[first - 1].hidden) and before[0] == hidden[0]:
            first -= 1
        found[last] = _cost(seen, sizes, first, last)
    return found


def _cost(seen: Observer, sizes: list[int], first: int, last: int) -> int:
    ops = seen.ops[first : last + 1]
    made = {number for log in ops for number in log.outputs}
    inputs = {number for log in ops for number in log.inputs} - made
    # What the next operation has saved perhaps is taken to be gone by then.
    saved = {n for n, place in seen.last_save if place == last + 1 and n not in made}
    there = sum(sizes[n] for n in saved if not kept_for(seen.ops, n, last))
    gradients = sum(sizes[number] for number in inputs)
    if not any(log.hidden and log.hidden[1:] for log in ops):
        return there + gradients + _passing(ops, sizes)
    return there + gradients + _again(ops) + max(sum(log.sizes) for log in ops)


def _again(ops: Sequence[OpLog]) -> int:
    """All that its forward makes. What is called with the same parameters once more is an
    iteration, of which one is differentiated."""
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
    """The most that is there at once of what its forward makes."""
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
