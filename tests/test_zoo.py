"""Every model of the catalogue takes the same steps under lowtide as without it, bit for bit.

Holds semantics rules 1 (same bits), 2 (once), 3 (random state), 6 (aliasing) and 7 (requires_grad)
on whole training steps: three of them, with momentum, so that a state that drifts in the first one
shows in the next.

Models that take long run only with LOWTIDE_FULL=1 in the environment. May import: the public API of
lowtide, at run time, so that a broken engine does not hide what the harness itself says.
"""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
from torch import Tensor, nn

from harness import Compute, Method, Trace, assert_same, run_steps
from zoo import CASES
from zoo.case import Batch, Case

FULL = os.environ.get("LOWTIDE_FULL") == "1"
CHOSEN = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] if "slow" in case.tags else [])
    for name, case in CASES.items()
    if FULL or "slow" not in case.tags
]

pytestmark = [
    # Given by torch once a process about what a model does, whichever runs first.
    pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
]

every_case = pytest.mark.parametrize("case", CHOSEN)


def whole_model_checkpoint(model: nn.Module, compute: Compute) -> Compute:
    import lowtide

    def run(batch: Batch) -> Tensor:
        return lowtide.checkpoint(compute, batch)

    return run


def budget(limit: float | int | str) -> Method:
    """One budget for all steps, open around forward and loss."""

    def method(model: nn.Module, compute: Compute) -> Compute:
        import lowtide

        allowance = lowtide.budget(limit)

        def run(batch: Batch) -> Tensor:
            with allowance:
                return compute(batch)

        return run

    return method


@functools.cache
def plain_trace(name: str) -> Trace:
    return run_steps(CASES[name])


@every_case
def test_the_plain_step_is_deterministic_and_trains(case: Case) -> None:
    trace = plain_trace(case.name)
    assert_same(trace, run_steps(case))
    losses = [float(trace[f"step {number}: loss"]) for number in (1, 2, 3)]
    assert all(math.isfinite(loss) for loss in losses), losses
    assert len(set(losses)) == 3, f"the loss does not move: {losses}"
    gradients = [
        entry.value
        for entry in trace.entries
        if ": gradient" in entry.name and isinstance(entry.value, Tensor)
    ]
    moved = sum(bool(torch.any(gradient.to_dense() != 0)) for gradient in gradients)
    assert moved > len(gradients) / 2, f"{moved} of {len(gradients)} gradients are not zero"


@every_case
def test_checkpoint_of_the_whole_step_gives_the_same_bits(case: Case) -> None:
    assert_same(plain_trace(case.name), run_steps(case, whole_model_checkpoint))


@every_case
@pytest.mark.parametrize("limit", [0.9, 0.5])
def test_budget_gives_the_same_bits(case: Case, limit: float) -> None:
    assert_same(plain_trace(case.name), _within(case, limit))


def _within(case: Case, limit: float) -> Trace:
    """The trace under a limit, or where that is refused under the smallest that is said to do."""
    import lowtide

    asked: float | int = limit
    for _ in range(3):
        try:
            return run_steps(case, budget(asked), penalty_inside=True)
        except lowtide.BudgetError as error:
            assert not isinstance(asked, int) or error.minimum > asked, str(error)
            asked = error.minimum
    raise AssertionError(f"refused at {limit}, and at each smallest limit named after, to {asked}")
