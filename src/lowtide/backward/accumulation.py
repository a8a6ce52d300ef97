"""How the gradients of leaves arise in a backward that has not run.

Problem: a leaf that is read several times gets a gradient from each read, and they are added up; if
parts of it are read, gradients of its full size are made of small ones when backward reaches the
views that made the parts, which may be long after the reads. Invariant: a waiting gradient is
counted from the backward of its reader to that of its view, the sum from the first gradient on, and
what is added to it while it is added; torch adds in place if nothing else refers to the sum, and
copies a sum that is laid out in memory in another way than the leaf.
Imports nothing that runs. Rejected: a new sum for each read, which refuses limits that can be met
for every shared table.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lowtide.observing.leaves import Leaves, Read
    from lowtide.observing.logs import OpLog


_OF_ITS_OWN = 1 << 62  # an operation's own gradient comes before those of views that it reads


class Accumulation(NamedTuple):
    """Bytes of the gradients of leaves, by operation.

    Attributes:
        made: what stays to the end of the step once the backward of the operation is over.
        change: their running sum at `k` is what waits when the backward of operation `k` begins.
        extra: what is allocated around the backward of an operation, besides its own memory.
        copied: of gradients that are copied right after the backward of an operation because they
            are laid out in memory in another way than the leaf, those of the largest.
    """

    made: list[int]
    change: list[int]
    extra: list[int]
    copied: list[int]


class _Gift(NamedTuple):
    """One gradient that is added to the gradient of a leaf."""

    place: int  # the operation after whose backward it arrives
    order: int  # at one place, the highest is the first
    made: int  # bytes that its view makes of gradients of parts
    parts: int  # bytes of those
    lent: bool  # something else refers to its memory, so nothing is added to it in place
    by: int | None = None  # the node that passes it on: those from one node are added up first
    again: bool = False  # through views of a view, as a double backward reads: never added in place
    astray: int = 0  # bytes of it, if it is not laid out as the leaf and therefore copied


def accumulation(
    leaves: Leaves, ops: Sequence[OpLog], dead: Collection[int], *, watched: bool
) -> Accumulation:
    """When the gradients of a step's leaves are in memory.

    Args:
        leaves: what was read.
        ops: the operations that read them.
        dead: operations without a backward.
        watched: all operations were watched; else a leaf may have reads that are not known.
    """
    count = len(ops)
    found = Accumulation(*([0] * (count + 2) for _ in range(4)))
    passing = [0] * (count + 2)
    for key, reader, nbytes, there in leaves.collecting():
        reads = leaves.reads.get(key, ())
        gifts = _gifts([r for r in reads if r.op not in dead], nbytes, leaves.nodes, ops, found)
        if gifts:
            _add_up(gifts, nbytes, there, found, passing)
        elif not there and not (reads and watched):  # not watched: only its last reader is known
            found.made[reader] += nbytes
    for place, nbytes in enumerate(passing):
        found.extra[place] += nbytes
    return found


def _gifts(
    reads: Sequence[Read],
    nbytes: int,
    nodes: Sequence[int],
    ops: Sequence[OpLog],
    found: Accumulation,
) -> list[_Gift]:
    """One gift for each read of the whole leaf, one for all reads through one view; in order."""
    gifts = {}
    ways: dict[int, list[Read]] = {}
    for read in reads:
        if read.way is None:
            made = 0 if read.whole or read.nbytes >= nbytes else nbytes
            astray = 0 if made else ops[read.op].astray.get(read.argument, 0)
            gifts[read.op] = _Gift(read.op, _OF_ITS_OWN, made, 0, ops[read.op].lent, astray=astray)
        else:
            ways.setdefault(read.way.node, []).append(read)
    several = list(gifts.values())
    for node, group in ways.items():
        # The view's node runs right after the backward of the first operation that followed it.
        place = min(bisect.bisect_left(nodes, node), *(read.op for read in group))
        parts = _waiting(group, place, ops, found, alone=not gifts and len(ways) == 1)
        way = group[0].way
        assert way is not None
        between = max(read.between for read in group)
        made = nbytes + between if way.makes else 0
        if way.joins:
            made += max(0, nbytes - max(between, sum({r.way: r.nbytes for r in group}.values())))
        again = _again(group) and not way.makes
        newest = max(group, key=lambda read: read.op)  # the others are added to its gradient
        astray = 0 if made else ops[newest.op].astray.get(newest.argument, 0)
        several.append(_Gift(place, node, made, parts, way.by is not None, way.by, again, astray))
    return sorted(several, key=lambda gift: (-gift.place, -gift.order))


def _again(group: Sequence[Read]) -> bool:
    """Whether these reads of one view are through other views of it, or it and such ones."""
    return len({read.way and read.way.part for read in group}) > 1


def _waiting(
    group: Sequence[Read], place: int, ops: Sequence[OpLog], found: Accumulation, *, alone: bool
) -> int:
    """Bytes of the gradients of parts that wait for the view's node, at `place`, to run. `alone`:
    the leaf gets no others, to which they would be added in place."""
    parts: dict[object, list[Read]] = {}
    for read in sorted(group, key=lambda read: -read.op):
        # Views of all of it pass their gradients on at once, and these are added up.
        part = read.way and read.way.makes and read.way.part
        parts.setdefault(part, []).append(read)
    waiting = 0
    for readers in parts.values():
        first, size = readers[0].op, readers[0].nbytes
        if first > place:
            found.change[place] += size
            found.change[first] -= size
            waiting += size
        if len(readers) > 1 and (ops[first].lent or (alone and _again(readers))):
            found.extra[readers[1].op] += size  # a sum is made of the first two
    return waiting


def _add_up(
    gifts: Sequence[_Gift], nbytes: int, there: bool, found: Accumulation, passing: list[int]
) -> None:
    first, last = gifts[0], gifts[-1].place
    if not there:
        found.made[first.place] += nbytes
    elif last < first.place:  # the sum exists until it is added to the gradient that was there
        found.change[last] += nbytes
        found.change[first.place] -= nbytes
    # What the first view makes becomes the sum; what else it takes is freed before the next gift.
    found.extra[first.place] += min(first.made, nbytes)
    lent, gone = first.lent, first.parts
    takes = {first.place: max(0, first.made - nbytes)}
    summed = False
    for gift in gifts[1:]:
        sums = 0
        if gift.again or (lent and (gift.by is None or gift.by != first.by)):
            sums, lent, summed = nbytes, False, True
        besides = max(0, gift.made - gone if gift.place == first.place else gift.made) + sums
        takes[gift.place] = max(takes.get(gift.place, 0), besides)
    if not (there or summed):
        found.copied[last] = max(found.copied[last], first.astray)
    for place, besides in takes.items():
        passing[place] = max(passing[place], besides)
