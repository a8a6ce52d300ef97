"""Where steps part from a plan, and what they take there that the plan does not know of.

Problem: a step that is another one than planned shows that with its first operation of its own.
What it has allocated before, in a call that no recorder sees into (a custom operator, a kernel of
the program's own), it has allocated beside what the other step's plan holds, each time anew.
Invariant: a plan has room for what steps that were measured over their limit took where they parted
from it; but no step is refused for what another one took. Imports learned and newest. Rejected: one
plan for both steps, whose backwards have nothing in common.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.learning.learned import Learned
from lowtide.learning.newest import Newest
from lowtide.running.prepared import Prepared, Signature

_MOST = 16

_Place = tuple[int, tuple[Signature, ...]]


class Partings:
    """For the operations that steps have in common: what one took next."""

    def __init__(self) -> None:
        self._taken = Newest[_Place, int](_MOST)

    def note(self, left: Prepared, index: int, learned: Learned, limit: int) -> Prepared | None:
        """A measured step has parted from a plan at an operation, and was over its limit. Another
        plan for the step left; None: it needs none, or none has that much room."""
        ops = left.graph.ops
        if index >= min(len(ops), len(learned.graph.ops)):
            return None
        taken = learned.graph.ops[index].peak_other
        if taken <= ops[index].peak_other:
            return None
        place = left.seen.place, left.signatures[:index]
        self._taken.put(place, max(taken, self._taken.get(place, 0)))
        found = self.with_room(Learned.of(left)).search(limit)
        if found is None or found.peak > limit:
            del self._taken[place]
            return None
        return found

    def lacks_room(self, prepared: Prepared) -> bool:
        """Whether a plan was made before it was known what others take there."""
        return self.with_room(Learned.of(prepared)).own is not None

    def concern(self, prepared: Prepared) -> bool:
        """Whether a plan has room for what its own step does not take."""
        return any(
            prepared.seen.place == place and prepared.signatures[: len(prefix)] == prefix
            for place, prefix in self._taken
        )

    def with_room(self, learned: Learned) -> Learned:
        """The learned step, with room for what others took where they parted from it."""
        if not self._taken or learned.own is not None:
            return learned
        ops, changed = list(learned.graph.ops), False
        signatures = learned.signatures
        for (place, prefix), taken in self._taken.items():
            index = len(prefix)
            if (
                learned.seen.place == place
                and index < len(ops)
                and taken > ops[index].peak_other
                and signatures[:index] == prefix
            ):
                ops[index] = replace(ops[index], peak_other=taken)
                changed = True
        if not changed:
            return learned
        graph = replace(learned.graph, ops=tuple(ops))
        return replace(learned, graph=graph, own=learned.graph)
