"""Regions of a forward: checkpointed parts, one inside another.

Problem: a value that is saved inside a region and read outside of it is needed by both. Invariant:
regions form a tree with the forward at its root, and where a value is needed is one of them (rule
9). Imports nothing. Rejected: a region as a range of operations, which nested calls and
generators do not keep to.
"""

from __future__ import annotations

from typing import Any


class Region:
    """A part of the forward that is checkpointed (rule 9).

    Nested regions form a chain of parents. A replay retains a value that was saved inside an inner
    region only if the replay was requested from inside that region.
    """

    __slots__ = ("depth", "parent", "policy")

    def __init__(self, parent: Region | None, policy: Any) -> None:
        self.parent = parent
        self.policy = policy
        self.depth: int = 0 if parent is None else parent.depth + 1

    def contains(self, other: Region) -> bool:
        """Whether `other` is this region or lies inside it."""
        region: Region | None = other
        while region is not None and region.depth > self.depth:
            region = region.parent
        return region is self


def common_region(a: Region, b: Region) -> Region:
    """The innermost region that contains both."""
    while a is not b:
        if a.depth >= b.depth and a.parent is not None:
            a = a.parent
        elif b.parent is not None:
            b = b.parent
        else:  # pragma: no cover - two roots never meet on one tape
            break
    return a
