"""Budgets whose steps all go unwatched, however near their limit they are.

The problem: a budget leaves a step alone only after it has seen many that never came again, which a
test cannot wait for. The invariant: only the choice of such steps is replaced, never what they do.
The Python recorder watches every step, here too. It imports lowtide. Rejected: a switch in the
library that nobody else would use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from lowtide import engine, step
from lowtide.learning.checkups import CheckUps
from lowtide.learning.effort import Effort
from lowtide.learning.unwatched import Unwatched
from lowtide.running.decide import StepDecisions

_ALONE = property(
    lambda unwatched: engine.core() is not None and not unwatched._knows.behind.nbytes
)


@contextlib.contextmanager
def all_alone() -> Iterator[None]:
    """No step is measured, and each one may go alone."""
    with (
        patch.object(Effort, "to_measure", lambda *_: False),
        patch.object(CheckUps, "due", lambda *_: False),
        patch.object(Unwatched, "may_leave", _ALONE),
        patch.object(Unwatched, "may_go_alone", _ALONE),
    ):
        yield


def watch_from_here() -> None:
    """As if the step that goes alone had come near its limit just now."""
    recorder = step.current_recorder()
    decisions = None if recorder is None else recorder.tape.decisions
    if isinstance(decisions, StepDecisions):
        decisions.watch_from_here()
