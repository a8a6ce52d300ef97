"""Real steps, plain and under a plan, each measured and compared with its prediction.

Problem: how far to trust a prediction depends on its error on this machine. Invariant: every step
is measured allocation by allocation; gradients are removed before each step, so that all steps do
the same. At the end all is as it was, as after a dry run: gradients, buffers, attributes of modules
and random states; parameters that the step itself moves are reported. Imports budget, measure,
plans, step, dryrun. Rejected: resident memory of the process.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import _compat
from lowtide.budget import Budget
from lowtide.dryrun.found import Found
from lowtide.dryrun.putback import RealState, without_gradients
from lowtide.dryrun.watching import loss_of
from lowtide.errors import BudgetError, DryRunWarning, users_frame
from lowtide.export.document import Trial
from lowtide.measure import measure
from lowtide.plans import Plan
from lowtide.step import nothing_recorded

_SHARE = 0.6  # of free memory: a plain step that takes more is not run without being asked for


@dataclass(frozen=True)
class Tried:
    """The steps that were run, and why the last one was refused, if it was."""

    trials: tuple[Trial, ...] = ()
    refused: BudgetError | None = None


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if that is not known."""
    if device.type != "cpu":
        return _compat.free_memory(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def fits(peak: int, device: torch.device) -> bool:
    """Whether a step with this peak may be run without being asked for."""
    free = free_memory(device)
    return free is None or peak <= _SHARE * free


class OnTrial(Budget):
    """Takes the place of a budget that the model may have of its own, on purpose."""

    def __init__(self, limit: int | Plan, *, device: torch.device) -> None:
        super().__init__(limit, device=device)
        self._loop.on_trial = True


def try_steps(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan | None,
    plain_peak: int,
    *,
    steps: int = 3,
    plain: bool = True,
    own_backward: bool = False,
    tell: Callable[[str], object] = lambda text: None,
) -> Tried:
    """Run a step plain and `steps` times under a plan; the predicted and measured peak of each.

    With `own_backward` the function runs backward itself, as a dry run has found, so none is run
    here. If a step leaves its plan and is refused, the trials end there, without an error. Some
    kernels allocate memory at their first call and reuse it later, so a plain step runs once before
    the measured one.
    """
    found = Found(function, args, kwargs)
    device = device_of(found)
    budget = None if plan is None else OnTrial(plan, device=device)
    trials: list[Trial] = []

    def step(limit: Budget | None) -> None:
        _step(function, args, kwargs, limit, own_backward)

    def measured(limit: Budget | None, label: str, predicted: int) -> None:
        _clear(found)
        gc.collect()
        took = measure(lambda: step(limit), device=device)
        if limit is not None:
            report = limit.report()  # for the plan that this step has followed
            label = "planned" if report.planned else "unplanned"
            predicted = report.planned_peak or predicted
        trials.append(Trial(label, predicted, took.peak_bytes, took.seconds))

    with _put_back(found):
        if plain:
            tell("a plain step")
            with nothing_recorded():  # regions and budgets that the step has of its own
                step(None)
                measured(None, "plain", plain_peak)
        if budget is not None and plan is not None:
            for number in range(steps):
                tell(f"planned step {number + 1} of {steps}")
                try:
                    measured(budget, "planned", plan.peak)
                except BudgetError as error:
                    return Tried(tuple(trials), error)
    return Tried(tuple(trials))


def run_step(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    own_backward: bool = False,
) -> None:
    """One real step under a plan, starting without gradients; puts back what it changes."""
    found = Found(function, args, kwargs)
    with _put_back(found):
        limit = None if plan.limit is None else OnTrial(plan, device=device_of(found))
        _step(function, args, kwargs, limit, own_backward)


def device_of(found: Found) -> torch.device:
    """The device that a step's tensors are on, whose bytes its trials count."""
    return next((t.device for t in (*found.state(), *found.tensors)), torch.device("cpu"))


def _step(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: Budget | None,
    own_backward: bool,
) -> None:
    with limit or nullcontext():
        result = function(*args, **kwargs)
    # Outside, as in the dry run: a loss made from the function's results is not in the plan.
    loss = None if own_backward else loss_of(result)
    del result
    if loss is not None and loss.grad_fn is not None:
        loss.backward()


def _clear(found: Found) -> None:
    for tensor in (*found.state(), *found.tensors):
        if tensor.is_leaf:
            tensor.grad = None


@contextmanager
def _put_back(found: Found) -> Iterator[None]:
    """Start without gradients, and leave everything as it was."""
    leaves = [t for t in (*found.state(), *found.tensors) if t.is_leaf]
    # In this order, as the state would have copies of gradients that are there.
    with without_gradients(leaves), RealState(found) as state:
        yield
    if state.moved:
        warnings.warn(
            f"real steps were run, and each changed parameters or other tensors ({state.moved} of "
            "them). That was not undone: leave optimizer.step() out of the step.",
            DryRunWarning,
            stacklevel=users_frame(),
        )
