"""Steps that were refused because they had been measured, should they come again.

Problem: a refused step leaves no plan, so the next one like it would run as an unknown step, which
is kept inside the limit only as well as its backward is modelled. Invariant: a step is refused
again only if it is the same one, operation by operation, with no fewer gradients to allocate and no
more room left by the steps before it.
Imports errors and prepared. Rejected: refusing whatever comes next: it may be a smaller batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from lowtide.errors import BudgetError
from lowtide.observing.seen import Seen
from lowtide.running.prepared import Signature, signatures_of

_KEPT = 16


class Refusals:
    """What was refused, the latest ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[Signature, ...], tuple[Seen, BudgetError]] = {}

    def add(self, seen: Seen, error: BudgetError) -> None:
        """A step that nothing brings under the limit."""
        forward = signatures_of(seen.ops[: seen.forward])
        self._known[forward] = seen, error
        if len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    def of(
        self, forward: Iterable[Signature], to_come: Container[int], before: int
    ) -> BudgetError | None:
        """The error of a forward that was refused, if it is one.

        Args:
            forward: what it did.
            to_come: leaves without a gradient so far.
            before: bytes that earlier steps of the same context have left.
        """
        if not self._known:
            return None
        seen, error = self._known.get(tuple(forward), (None, None))
        if seen is None or error is None or before < seen.before:
            return None
        if any(leaf not in to_come for leaf in seen.parameters):
            return None
        return error.again()
