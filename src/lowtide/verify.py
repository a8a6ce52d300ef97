"""`lowtide.verify`: whether a step of the user's own keeps its bits, and its limit.

Problem: tests of other models say little to who is about to trust a library with a training of
weeks. Invariant: the step is run for real, plain and with lowtide, from one state, and everything
that it leaves is compared bit by bit; the program's state is as it was afterwards. Imports
verifying. Rejected: comparing losses over a training, in which a wrong gradient shows late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.dryrun.run import check_step
from lowtide.errors import UsageError
from lowtide.limits import meant_by_place, parse_limit, whole_number
from lowtide.plans import Plan
from lowtide.verifying.steps import Steps
from lowtide.verifying.verification import Verification


def verify(
    fn: Callable[..., Any],
    /,
    *args: Any,
    limit: int | float | str | Plan | None = None,
    steps: int = 4,
    **kwargs: Any,
) -> Verification:
    """Run a training step plain and with lowtide, and compare every bit that it leaves behind.

    Results, gradients, parameters, buffers, inputs, optimizer states and random states are
    compared, after each of `steps` steps: the first is kept inside the limit while it runs, later
    ones follow plans. Each starts from the same state, which is put back at the end: optimizers,
    generators, and the attributes of the objects that the step reaches included. The plain step is
    run twice, and what differs between the two is not held against lowtide::

        assert lowtide.verify(step, batch)

    Args:
        fn: the step: a module, or a function that returns the loss, or one that runs backward
            itself. It should start from scratch each time: take a batch as an argument, not from a
            loader or another iterator, which cannot be put back.
        args: its positional arguments.
        limit: the limit to run it under: bytes, text, a fraction of the plain peak, or a `Plan`.
            Default: if the step itself uses lowtide (a budget, regions, a fitted model), it is run
            as it is; else half its plain peak, or the smallest limit that can be kept.
        steps: how many steps with lowtide to compare.
        kwargs: its keyword arguments.

    Returns:
        What was compared and what differs. It is true if nothing does and the limit was kept, and
        prints as a report.

    Raises:
        UsageError: ``fn`` cannot be called; the limit cannot be read; called inside a budget or
            region, with grad disabled, or while a profiler runs.
        BudgetError: the limit cannot be kept.

    It takes eight real steps by default, and memory for copies of the parameters, gradients,
    results and all other tensors that the step reaches, in main memory, besides that of the plain
    step on its device. What torch.compile has
    compiled is compared with its eager step, as it runs eagerly inside a budget. In a process group
    call it on every rank, with a limit that each of them can keep.

    Examples:
        >>> import torch
        >>> layers = [torch.nn.Linear(64, 64) if i % 2 else torch.nn.Tanh() for i in range(12)]
        >>> found = verify(torch.nn.Sequential(*layers), torch.ones(512, 64))
        >>> found.same, found.held, found.compared["gradient"]
        (True, True, 12)
    """
    check_step(fn, "a step cannot be verified")
    wanted = limit if limit is None or isinstance(limit, Plan) else parse_limit(limit)
    count = whole_number(steps)
    if count is None or count < 1:
        raise UsageError(f"steps is how many steps to compare, at least 1; got {steps!r}.")
    with meant_by_place("lowtide.verify", limit, args):
        return verify_step(fn, args, kwargs, wanted, count)


def verify_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: int | float | Plan | None,
    steps: int,
    tell: Callable[[str], object] = lambda text: None,
) -> Verification:
    """Verify a step whose arguments are known to be right; `tell` gets what comes next."""
    return Steps(fn, args, kwargs, steps, tell).verify(limit)
