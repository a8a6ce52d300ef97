"""When the gradients of activations are in memory, in a backward that has not run.

Problem: gradients are a large part of memory in backward, and the gradient of a `cat` is one buffer
of which the gradients of its inputs are views. Invariant: a gradient exists from the backward of
the last reader to that of the producer; one that is a view keeps its base alive until it is used
or, if another gradient is added to it, until the sum is made. Imports nothing but the log of
operations. Rejected: a buffer for every gradient, which counts each `cat` of a DenseNet twice.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lowtide.observing.logs import OpLog


# Parts of the names of operators whose kernels copy a gradient that is not contiguous, as measured
# on the CPU.
_COPYING = ("upsample", "pool", "layer_norm", "group_norm", "gelu", "softmax", "convolution",
            "pixel_shuffle")  # fmt: skip

# The gradients of what these make complex are every other number of its gradient, which a product
# copies: it takes rows with gaps between them, but no gaps in rows.
_COMPLEX = ("aten::_to_copy", "aten::complex")
_PRODUCTS = ("mm", "aten::mv", "aten::addmv", "aten::dot")

_NUMBER = 16  # bytes of the largest


class Lifetimes(NamedTuple):
    """Bytes of gradients that live across operations, in backward order.

    Attributes:
        change: their running sum at `k` is what exists when the backward of operation `k` begins.
        sums: for each operation, the sums of gradients that are made right after its backward.
        copies: for each operation, the copy that its backward makes of the gradient it is given.
    """

    change: list[int]
    sums: list[int]
    copies: list[int]


def lifetimes(
    ops: Sequence[OpLog],
    sizes: Sequence[int],
    carries_grad: AbstractSet[int],
    outside: AbstractSet[int] = frozenset(),
) -> Lifetimes:
    """When the gradients of a step's values are in memory. `outside`: values to which what follows
    the recording may give one; it is there from the beginning, if no operation gives one too."""
    count = len(ops)
    found = change, sums, copies = Lifetimes(*([0] * (count + 2) for _ in range(3)))
    readers = _readers(ops, carries_grad)
    _pieces(ops, sizes, readers, change, sums)
    _views(ops, sizes, readers, change)
    until: dict[int, int] = {}  # value -> the operation whose backward is the last to need it
    for index, log in enumerate(ops):
        for number in log.outputs:
            reading = readers.get(number)
            end = min([index, *_looked_into(log, index, readers, until)])
            until[number] = end
            if not reading:
                if number in outside and log.receivers:
                    change[end] += sizes[number]
                    change[count] -= sizes[number]
                continue
            start = reading[-1]
            given, only = number in ops[start].viewing, len(reading) == 1
            remade = only and number in ops[start].remade
            remade = remade and not (given and _of_one_number(ops, start, sizes, readers))
            if remade:  # while what is copied is still there
                sums[start] += sizes[number]
            if only and any(name in log.name for name in _COPYING):
                # Of a view, that of a part has gaps, and that of the terms of a sum is expanded.
                most = max(map(sizes.__getitem__, ops[start].outputs))
                apart = given and sizes[number] != most
                turned = number in (ops[start].turned if given else ops[start].athwart)
                if number in ops[start].perhaps and not given and not turned:
                    turned = not _of_one_number(ops, start, sizes, readers)
                if (apart and not remade) or turned:
                    copies[index] += _copied(log, number, sizes) if turned else sizes[number]
            apart = only and given and ops[start].name in _COMPLEX
            if apart and any(name in log.name for name in _PRODUCTS):
                copies[index] += sizes[number]
            view = given and not remade
            if view:
                # Its gradient is a view of that of the reader's result, until another is added.
                if len(reading) == 1:
                    continue
                start = reading[-2]
                sums[start] += sizes[number]
            if start > end:
                change[end] += sizes[number]
                change[start] -= sizes[number]
    return found


def of_unmade(ops: Sequence[OpLog], nodes: Sequence[int]) -> list[int]:
    """As `Lifetimes.change`, for what calls have made that are not recorded, or that ran before the
    recording: its gradient waits for their node. They pass on what is taken to be as large, for the
    operation before them. `nodes`: for each operation, autograd's newest node when it ran."""
    change = [0] * (len(ops) + 2)
    readers: dict[int, tuple[int, int]] = {}
    for index, log in enumerate(ops):
        readers.update({node: (index, nbytes) for node, nbytes, _ in log.unmade})
    for node, (start, nbytes) in readers.items():
        end = max(0, bisect.bisect_right(nodes, node) - 1)
        if start > end:
            change[end] += nbytes
            change[start] -= nbytes
    return change


def _copied(log: OpLog, number: int, sizes: Sequence[int]) -> int:
    """The copies that a kernel makes because the gradient of this result is transposed."""
    if "gelu" in log.name:
        return 2 * sizes[number]  # oneDNN's copies the result too
    if "pool2d" in log.name:  # channels-last: copies the result, which is as large as the input
        others = sum(sizes[made] for made in (*log.inputs, *log.outputs) if made != number)
        return max(sizes[number], others)
    return sizes[number]


def _of_one_number(
    ops: Sequence[OpLog], index: int, sizes: Sequence[int], readers: dict[int, list[int]]
) -> bool:
    """Whether the gradient of an operation's result is a single number, expanded: any view of that
    can be divided and joined without a copy."""
    for number in ops[index].outputs:
        reading = readers.get(number, ())
        if len(reading) == 1 and number in ops[reading[0]].viewing:
            return all(sizes[made] <= _NUMBER for made in ops[reading[0]].outputs)
    return False


def _readers(ops: Sequence[OpLog], carries_grad: AbstractSet[int]) -> dict[int, list[int]]:
    """For each value, the operations whose backward gives it a gradient, not of a piece only."""
    readers: dict[int, list[int]] = {}
    for index, log in enumerate(ops):
        for number in log.receivers:
            if number in carries_grad and number not in log.pieces:
                known = readers.setdefault(number, [])
                if known[-1:] != [index]:
                    known.append(index)
    return readers


def _pieces(
    ops: Sequence[OpLog],
    sizes: Sequence[int],
    readers: dict[int, list[int]],
    change: list[int],
    sums: list[int],
) -> None:
    """Gradients of pieces wait until the first reader, the last in backward, has given its own;
    then the whole is made of them, as if that reader had given it."""
    first: dict[int, int] = {}
    unused: dict[int, int] = {}
    for index, log in enumerate(ops):
        for number, nbytes in zip(log.pieces, log.piece_sizes, strict=True):
            start = first.setdefault(number, index)
            change[start] += nbytes
            change[index] -= nbytes
            if number in log.split:
                unused[number] = unused.get(number, sizes[number]) - nbytes
    for number, start in first.items():
        sums[start] += sizes[number] + max(0, unused.get(number, 0))
        known = readers.setdefault(number, [])
        if start not in known:
            bisect.insort(known, start)


def _views(
    ops: Sequence[OpLog], sizes: Sequence[int], readers: dict[int, list[int]], change: list[int]
) -> None:
    """What is read through one view several times has a sum of its own at the view's node, which
    waits until the first of these readers, the last in backward, has given its gradient. Only then
    does the value get it.

    A weight that is transposed for a product is read through that view again by the product's
    backward, which the backward of a gradient step goes through.
    """
    through: dict[int, dict[int, list[int]]] = {}
    for index, log in enumerate(ops):
        for number, view in log.views:
            if index in readers.get(number, ()):
                through.setdefault(number, {}).setdefault(view, []).append(index)
    for number, views in through.items():
        if all(len(group) == len(readers[number]) for group in views.values()):
            continue  # one sum, wherever it is
        points = set(readers[number])
        for group in views.values():
            last, first = group[-1], group[0]
            if last > first:
                change[first] += sizes[number]
                change[last] -= sizes[number]
                points -= set(group[1:])
        readers[number] = sorted(points)


def _looked_into(
    log: OpLog, index: int, readers: dict[int, list[int]], until: dict[int, int]
) -> list[int]:
    """Until when the gradient of an operation's result lives on in views that its inputs got."""
    found = []
    for number in log.viewing:
        reading = readers.get(number)
        if reading and reading[-1] == index and number in until:
            if len(reading) == 1 and number in log.remade:
                continue
            found.append(until[number] if len(reading) == 1 else reading[-2])
    return found
