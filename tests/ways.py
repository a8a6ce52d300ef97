"""Ways of applying lowtide to a case of the catalogue, on the CPU and on a device.

Problem: the tests of the catalogue and its run on a device must apply the same, or their results
cannot be compared. Invariant: lowtide is imported when a way is used, so that a broken engine does
not hide the tests of the harness. Imports harness, zoo. Rejected: ways in `harness`, which may not
know lowtide.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from harness import Compute, Method, Trace, run_steps
from zoo.case import Batch, Case

REFUSALS = 60


def whole_step_checkpoint(model: nn.Module, compute: Compute) -> Compute:
    import lowtide

    def run(batch: Batch) -> Tensor:
        return lowtide.checkpoint(compute, batch)

    return run


def budgeted(limit: float | int) -> Method:
    """One budget for all steps, open around forward and loss."""

    def method(model: nn.Module, compute: Compute) -> Compute:
        import lowtide

        allowance = lowtide.budget(limit)

        def run(batch: Batch) -> Tensor:
            with allowance:
                return compute(batch)

        return run

    return method


def within(
    case: Case, method: Callable[[float | int], Method], limit: float, device: str = "cpu"
) -> Trace:
    """The trace under a limit, or, if that is refused, under the smallest that is not.

    Until a step has been recorded to its end, a refusal can only name a limit that gets past the
    operation that did not fit, so several refusals may follow; each must name more.
    """
    import lowtide

    asked: float | int = limit
    for _ in range(REFUSALS):
        try:
            return run_steps(case, method(asked), penalty_inside=True, device=device)
        except lowtide.BudgetError as error:
            if isinstance(asked, int) and error.minimum <= asked:
                raise AssertionError(f"refused at {asked}, which an error had named") from error
            asked = error.minimum
    raise AssertionError(f"refused at {limit}, and at each smallest limit named after, to {asked}")
