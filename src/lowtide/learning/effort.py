"""Which steps a budget measures, and which it plans.

Problem: to measure a step and to plan it pays if a step like it comes again; loops alternate
between a few steps, end an epoch with a short batch, or never take the same step twice. Invariant:
what is decided here costs time or saves it and never decides whether the limit holds: a step that
was measured above its limit is always planned, or refused. Imports planner and prepared. Rejected:
planning every step that no plan covers, which took a hundred times a step's own time where teacher
forcing is drawn by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lowtide.planner import Graph
from lowtide.running.prepared import Prepared, Signature

LESSONS = 2
"""Measured steps that a plan is made from."""
_AWAITED = 16  # steps that are measured in vain for one that was not
_PATIENCE = 4  # plans that nobody followed, for each time that a step is to come before it has one
_COUNTED = 1000
_ROW = 3  # times in a row, after which a step that goes by the plan for a larger one has its own
_NEAR = 0.85  # of the bytes of a larger step: its plan costs little more than one's own
_BETWEEN = 8  # steps that go by the plan for a much larger one, at least, for one that is planned
_SHARE = 0.1  # of their time, for planning that one
_BACKWARD = 3  # times its forward, that a step takes


class Effort:
    """What a budget remembers of its steps for this; one for each budget."""

    def __init__(self) -> None:
        self._awaited = 0  # measured steps to come in which one that has not been may come
        self._row = 0, 0  # the last step that went by the plan for a larger one; times in a row
        self._between = _BETWEEN  # of those for which it is much too large, for one that is planned
        self._far = _BETWEEN  # of these, since the last that was planned
        self._barren = 0  # plans that were made and not followed
        self._came: dict[int, int] = {}  # how often steps came that no plan covers

    def to_measure(self, expected: Prepared | None, unmeasured: Callable[[], bool]) -> bool:
        """Whether to measure a step that begins now. `unmeasured`: whether another may come that
        never was."""
        if expected is None or expected.lessons < LESSONS:
            return True
        return self._awaited > 0 and unmeasured()

    def smaller(self, larger: Prepared, seen: Sequence[Signature], *, measured: bool) -> bool:
        """Whether to plan a step that has gone by the plan for a larger one.

        That plan recomputes more than this step would have to. A step that comes again and again
        is planned, and of those for which the plan is much too large some are, as many as take
        little time: after a while there is a plan near each size.
        """
        if measured:
            self._awaited = max(0, self._awaited - 1)
        if larger.peak == larger.plain_peak:
            return False
        step, (last, times) = hash(tuple(seen)), self._row
        self._row = step, times + 1 if step == last else 1
        if self._row[1] == _ROW:
            return True
        planned = sum(map(_bytes, larger.signatures))
        if larger.measured and sum(map(_bytes, seen)) >= _NEAR * planned:
            return False
        self._far += 1
        if self._far < self._between and not measured:
            return False
        self._far = 0
        return True

    def spent(self, seconds: float, graph: Graph) -> None:
        """How long such a plan took. The next one is for when steps have taken many times that."""
        step = _BACKWARD * sum(op.seconds for op in graph.ops)
        self._between = max(_BETWEEN, math.ceil(seconds / (_SHARE * step)) if step > 0 else 0)

    def followed(self, prepared: Prepared, *, covered: bool) -> None:
        """A step went by one of the plans: its own, or that for a larger one, which covers it."""
        self._barren //= 2
        if not covered and not prepared.measured:  # it has come again
            self._awaited = _AWAITED

    def again(self, prepared: Prepared) -> bool:
        """Whether to plan a step anew that followed a plan and was measured."""
        self._awaited = max(0, self._awaited - 1)
        return prepared.lessons < LESSONS or not prepared.measured

    def patient(self) -> bool:
        """Whether most of the plans that were looked for lately have been of use."""
        return self._barren < _PATIENCE

    def in_vain(self) -> None:
        """A plan was looked for, and there was none."""
        self._barren += 1

    def first(self, seen: Sequence[Signature]) -> bool:
        """Whether to plan a step that no plan covered."""
        key = hash(tuple(seen))
        came = self._came.pop(key, 0)
        self._came[key] = came + 1
        if len(self._came) > _COUNTED:
            del self._came[next(iter(self._came))]
        if came < self._barren // _PATIENCE:
            return False
        self._barren += 1
        self._awaited = _AWAITED
        return True


def _bytes(signature: Signature) -> int:
    return sum(signature[1])
