"""Steps that were refused after a measurement, to refuse them again if they recur.

Problem: a refused step leaves no plan, so the next one like it would run as an unknown step, which
stays inside the limit only as far as its modelled backward is right. Invariant: a step is refused
again only if it is the same one, operation by operation and call by call (those that are not
recorded), with no fewer gradients to allocate and no more room left by the steps before it.
Imports errors, newest, prepared and `lowtide.refusal`. Rejected: refusing whatever comes next,
which may be a smaller batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowtide.errors import BudgetError
from lowtide.learning.newest import Newest
from lowtide.observing.seen import Seen
from lowtide.planner import Graph
from lowtide.refusal import refusal
from lowtide.running.prepared import Signature, signatures_of

_KEPT = 16

_Step = tuple[tuple[Signature, ...], tuple[tuple[int, str], ...]]


class Refusals:
    """The latest refusals."""

    def __init__(self) -> None:
        self._known = Newest[_Step, tuple[Seen, BudgetError]](_KEPT)
        self._spared = Newest[_Step, None](_KEPT)

    def __bool__(self) -> bool:
        return bool(self._known)

    def clear(self) -> None:
        """Refuse none of them again: from now on there is more room."""
        self._known.clear()
        self._spared.clear()

    def add(self, seen: Seen, error: BudgetError) -> None:
        """Remember a step that no plan brings under the limit."""
        forward = signatures_of(seen.ops[: seen.forward])
        self._known.put((forward, seen.calls), (seen, error))

    def not_yet(self, seen: Seen) -> bool:
        """Whether this is the first time that a step is asked about. If it is refused only when it
        comes again, it may have allocated something that it then finds there."""
        step = signatures_of(seen.ops[: seen.forward]), seen.calls
        if step in self._spared:
            return False
        self._spared.put(step, None)
        return True

    def of(
        self,
        forward: Iterable[Signature],
        calls: Iterable[tuple[int, str]],
        to_come: Mapping[int, tuple[int, int]],
        before: int,
    ) -> BudgetError | None:
        """The error with which this forward was refused before, or None.

        Args:
            forward: its operations.
            calls: its calls that are not recorded, as in `Seen`.
            to_come: leaves that have no gradient yet, as in `Seen.parameters`.
            before: bytes that earlier steps of the same context have left.
        """
        if not self._known:
            return None
        seen, error = self._known.get((tuple(forward), tuple(calls)), (None, None))
        if seen is None or error is None or before < seen.before:
            return None
        return error.again() if _no_fewer(to_come, seen) else None


def _no_fewer(to_come: Mapping[int, tuple[int, int]], seen: Seen) -> bool:
    """Whether a step has all the gradients to allocate that another one had: those of the same
    leaves, and as many bytes in place of those of leaves that were its own and are gone, such as an
    input that requires grad."""
    mine = {key for key in seen.parameters if seen.is_there(key)}
    gone = sum(nbytes for key, (_, nbytes) in seen.parameters.items() if key not in mine)
    others = sum(nbytes for key, (_, nbytes) in to_come.items() if key not in mine)
    return mine <= to_come.keys() and others >= gone


def refusing(
    graph: Graph, limit: int, retain: Sequence[int], seen: Seen, **known: Any
) -> BudgetError:
    """The error of a step that may take so many bytes beside what was there before it; see
    `lowtide.refusal.refusal`."""
    before, more = seen.before, seen.withheld
    return refusal(graph, limit + before, retain, before=before, more=more, **known)
