"""Which operation each saved tensor was saved for.

Problem: backward asks for what a node saved right before that node runs, but a save only tells of
which value it is and how many operations were recorded by then. Invariant: a tensor that is saved
between two operations is a result of the one before or an input of the one after; if both save it,
in this order. Where it is not known which, both are named. Imports functions. Rejected: asking
autograd for the node that saves, as hooks of saved tensors are not told.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lowtide.backward import functions

if TYPE_CHECKING:
    from lowtide.observing.logs import OpLog
    from lowtide.observing.observer import Observer

_COPY = "aten::clone"  # its backward needs nothing


class Place(NamedTuple):
    """The operations that may have saved something."""

    low: int
    high: int
    result: bool
    """Whether it was saved as a result; else as an input."""


def places_of(
    seen: Observer, saves: Sequence[tuple[int, int]], ended: Container[int]
) -> list[Place]:
    """The place of each save, (value, operations recorded by then), in the order of the forward.

    What counts is the value that was in memory then: the pieces of an `unsafe_chunk` go on with
    what is written into the whole later. `ended`: the last operations of custom Functions.
    """
    ops, count = seen.ops, len(seen.ops)
    producers = {number: index for index, log in enumerate(ops) for number in log.outputs}
    taken: set[tuple[int, int]] = set()
    places = []
    for save in saves:
        sequence, number = save[1], seen.first.get(save, save[0])
        before, after = sequence - 1, min(sequence, count - 1)
        if producers[number] != before:
            place = after
            if before in ended and functions.kept_for(ops, number, before):
                place = before
            elif not _may_save(ops, after, number):
                writer = _writer(ops, number, sequence)
                place = after if writer is None else writer
            places.append(Place(place, place, False))
            continue
        saved, nearest = ops[before].saved, _may_save(ops, sequence, number)
        if saved is not None and number in saved and (number, sequence) not in taken:
            taken.add((number, sequence))
            places.append(Place(before, before, True))
        elif nearest:
            places.append(Place(before if saved is None else after, after, saved is None))
        elif saved == () and sequence < count and before not in ended:
            # Running statistics are not among its inputs.
            places.append(Place(after, after, False))
        else:
            writer = None if saved is None else _writer(ops, number, sequence)
            place = before if writer is None else writer
            places.append(Place(place, place, writer is None))
    return places


def _may_save(ops: Sequence[OpLog], index: int, number: int) -> bool:
    """Whether this operation may have saved the value as one of its inputs."""
    return index < len(ops) and number in ops[index].inputs and ops[index].name != _COPY


def _writer(ops: Sequence[OpLog], number: int, sequence: int) -> int | None:
    """The operation that saves a value which the next one does not read, if it is one that writes
    in place: it first copies what it overwrites and its backward needs, and may save what it reads
    before that copy, and the copy after it."""
    for index, log in enumerate(ops[sequence : sequence + 2], sequence):
        if log.overwrites and (index == sequence or number in log.inputs):
            return index
    return None
