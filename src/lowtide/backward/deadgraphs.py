"""Graphs that die before any backward: those that a forward builds and abandons.

Problem: a generator whose output is detached, or a teacher that is not under `no_grad`, saves for a
backward that cannot come; what that backward would take does not belong to the step. Invariant: an
operation counts as dead only if autograd was seen to release what it saved, or if only dead ones
depend on it; in doubt it lives, which estimates too high. Imports nothing that runs. Rejected:
asking autograd for its nodes, which a forward does not hand out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.backward.places import Place
    from lowtide.observing.logs import OpLog
    from lowtide.observing.observer import Observer


def alive(seen: Observer) -> list[bool]:
    """For each save, whether autograd still has it. Of equal saves the last one dies first, as the
    node of an operation holds those of its inputs."""
    left = Counter(seen.dead)
    living = []
    for save in reversed(seen.last_save):
        living.append(not left[save])
        if left[save]:
            left[save] -= 1
    return living[::-1]


def dead_operations(seen: Observer, places: Sequence[Place]) -> set[int]:
    """Operations whose nodes are gone; `places`: of each save."""
    if not seen.dead:
        return set()
    saves: set[int] = set()
    lives: set[int] = set()
    for (low, high, _), living in zip(places, alive(seen), strict=True):
        if living:
            lives.update((low, high))
        elif low == high:
            saves.add(low)
    readers = _readers(seen.ops)
    below = lives.copy()  # operations that a living one may depend on
    for index in range(len(seen.ops) - 1, -1, -1):
        if any(reader in below for reader in readers[index]):
            below.add(index)
    dead = saves - lives
    for index, found in enumerate(readers):  # in forward order: what a dead one leads to is dead
        if index in dead:
            dead.update(reader for reader in found if reader not in below)
    for index in range(len(seen.ops) - 1, -1, -1):
        found = readers[index]
        if index not in below and found and all(reader in dead for reader in found):
            dead.add(index)
    return dead


def _readers(ops: Sequence[OpLog]) -> list[list[int]]:
    """For each operation, those whose backward gives a gradient to something that it made."""
    makers = {number: index for index, log in enumerate(ops) for number in log.outputs}
    readers: list[list[int]] = [[] for _ in ops]
    for index, log in enumerate(ops):
        if log.node:
            for number in dict.fromkeys(log.receivers):
                if number in makers:
                    readers[makers[number]].append(index)
    return readers


def without(ops: Sequence[OpLog], dead: set[int]) -> list[OpLog]:
    """The operations for a backward that does not reach the dead ones."""
    return [
        replace(log, temporaries=0, left=0, besides=0, receivers=(), viewing=(), pieces=(),
                piece_sizes=(), views=(), unmade=(), node=False)
        if index in dead else log
        for index, log in enumerate(ops)
    ]  # fmt: skip
