"""`lowtide.budget`: one line around forward and loss keeps a step inside a memory limit.

Problem: nobody knows which activations to recompute, and the answer changes with every shape.
Invariant: the limit is a promise (rule 13). The first step is kept inside it by dropping values
while it runs, every later one by a plan made from what the first one showed. A step that cannot fit
is refused, and the smallest limit known to suffice is named. A backward ends a step, also inside
the context; what is saved after it belongs to the next step, which has what is left of the limit.
Imports loop, measure, plans, step. Rejected: plans made from the model's code, which does not
say what autograd saves.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Any, NoReturn

import torch

from lowtide.errors import UsageError
from lowtide.learning.ranks import ranks_of
from lowtide.limits import limit_in_words
from lowtide.loop import Loop
from lowtide.measure import counted_device
from lowtide.plans import Plan, limit_of
from lowtide.report import BudgetReport
from lowtide.step import current_recorder, recordable
from lowtide.texttable import count_of

_ANEW = 5  # after so many budgets in a row that had one step each, the user is warned

_log = logging.getLogger("lowtide")
_beginners: dict[int | float, int] = {}  # per limit: budgets since one had a second step
_MOST_LIMITS = 64  # at once; a program may compute a limit anew for each step


class Budget:
    """A memory limit for training steps; see `budget`. One object serves all steps of a loop."""

    def __init__(
        self,
        limit: int | float | str | Plan,
        *,
        device: torch.device | str | None = None,
        group: Any = None,
    ):
        self._asked = limit, device, group
        named = None if device is None else counted_device(device, "a budget")
        ranks = ranks_of(group)
        self._loop = Loop(limit_of(limit), named, ranks)
        if isinstance(limit, Plan):
            self._loop.follow(limit.prepared())
        self._threads: dict[int, bool] = {}  # threads inside: whether it records there
        self._occupant: dict[str, int] = {}  # the "thread" that it records on, if any
        self._entered = 0

    @property
    def limit(self) -> int | float:
        """Bytes; or, as a float, a fraction of the plain step's peak."""
        return self._loop.allowance.limit

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (say, of a module that has a budget) has the limit, but has learned nothing."""
        return _anew, self._asked

    def __repr__(self) -> str:
        steps = count_of(self._loop.steps, "step")
        return f"<lowtide.Budget of {self._loop.allowance}, after {steps}>"

    def __enter__(self) -> Budget:
        thread = threading.get_ident()
        if thread in self._threads:
            raise UsageError(
                "this budget is already entered: leave it before entering it again. One budget "
                "object serves all steps, one after the other."
            )
        records = recordable()
        if records:
            # In one instruction, which no interrupt divides. This thread may be in there already,
            # if an interrupt came before all of it was left.
            if self._occupant.setdefault("thread", thread) != thread:
                raise UsageError(
                    "this budget is already entered on another thread: one step on each thread "
                    "would be two steps inside one limit. Give each thread a budget of its own, or "
                    "let them take turns, backwards included."
                )
            try:
                self._loop.make_sure()
                self._begin()
                self._threads[thread] = records
                return self
            except BaseException:
                self.make_sure()
                raise
        self._threads[thread] = records
        return self

    def make_sure(self) -> None:
        """Leave it on this thread, also if an interrupt has cut that short."""
        thread = threading.get_ident()
        if self._occupant.get("thread") == thread:
            self._loop.make_sure()
            self._occupant.clear()
        self._threads.pop(thread, None)

    def _begin(self) -> None:
        if current_recorder() is not None:
            raise UsageError(
                "a budget cannot be entered inside another budget or checkpointed region of the "
                "same thread: the outer one already decides for everything that runs in it."
            )
        self._loop.open()
        self._entered += 1
        if self._entered <= 2 and not self._loop.on_trial:
            _tell_of_many(self.limit, self._entered)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._threads.get(threading.get_ident()):
                self._loop.close(kind, error, trace)
                if self._entered == 1 and self._loop.steps > 1:  # several backwards in one context
                    _tell_of_many(self.limit, self._loop.steps)
        finally:
            try:
                self.make_sure()
            except BaseException:
                self.make_sure()
                raise

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A budget is entered: as a decorator or a backend of torch.compile it is refused."""
        raise UsageError(
            "a budget is not called but entered: `with budget:` around forward and loss. For a "
            "model that others call: lowtide.fit(model, limit). For torch.compile: "
            "backend=lowtide.CompileBudget(limit)."
        )

    def report(self) -> BudgetReport:
        """Return what the last finished step did, as a `BudgetReport`."""
        if not self._occupant:
            self._loop.finish_ended()
        return self._loop.report()


def _tell_of_many(limit: int | float, steps: int) -> None:
    """A budget made anew for each step keeps its limit but never plans: warn once."""
    count = _beginners.get(limit, 0)
    if count == _ANEW:  # already warned
        return
    count = count + 1 if steps == 1 else 0
    if len(_beginners) >= _MOST_LIMITS:
        _beginners.clear()
    _beginners[limit] = count
    if count == _ANEW:
        _log.warning(
            "%d budgets of %s were entered once each: a budget learns from its first step and "
            "plans the next ones. Make one before the loop, and enter the same object for each "
            "step.",
            _ANEW,
            limit_in_words(limit),
        )


def _anew(limit: int | float | str | Plan, device: Any, group: Any) -> Budget:
    return Budget(limit, device=device, group=group)


def budget(
    limit: int | float | str | Plan,
    *,
    device: torch.device | str | None = None,
    group: Any = None,
) -> Budget:
    """Keep a training step inside a memory limit, with the same bits as without it.

    Put it around forward and loss; ``backward()`` may come after it closes::

        limit = lowtide.budget("6 GiB")
        for batch in loader:
            with limit:
                loss = loss_fn(model(batch))
            loss.backward()

    Use one object for all steps: it learns from the first and plans the others. The limit bounds
    the bytes that the step allocates on the device, above what is allocated when the context is
    entered, until the end of backward: activations, gradients, temporaries and kernel workspace.
    With grad disabled nothing is recorded. If backward runs inside the context, even several times
    (a GAN, an attack on the input, gradient accumulation), each backward ends a step with a plan of
    its own, and what that step leaves in memory counts towards the limit of the next.

    Args:
        limit: bytes, as an ``int``; text, such as ``"6 GiB"``, ``"800 MB"`` or ``"50%"``; a
            ``float`` in (0, 1], a fraction of the plain step's peak (of the largest one measured so
            far, if steps differ; the first step, whose peak is not known yet, may take more than
            later ones); or a `Plan`, which is followed from the first step on. A step other than
            the planned one is noticed at the first operation that differs, and planned like any
            unknown step; of the first step, a `PlanWarning` says so. The limit is then the plan's;
            the peak of a plan without one.
        device: the device whose bytes are counted. Default: the first accelerator device (CUDA,
            ROCm, XPU, MPS, ...) on which a step makes something, else the CPU. What a step makes on
            other devices is kept and does not count.
        group: a process group, or True for the default one, whose ranks plan and refuse alike.
            Entering the budget is then a collective of that group, so every rank must enter it
            equally often. Default, and False: each rank decides for itself.

    Returns:
        The budget, a context manager to enter once for each step.

    Raises:
        UsageError: the limit or the device cannot be used; the group does not exist; or, on
            entering, the budget is already entered, here or on another thread, or another budget
            or region is open on this thread.
        UnsupportedError: on entering, inside a transform of ``torch.func`` or while a CUDA graph is
            captured; or by a higher-order operator whose body reads tensors that require grad and
            are not among its operands.
        BudgetError: the limit cannot be met. It is raised where that shows: by an operation of the
            forward, at the end of the ``with``, when backward begins, or on entering the next step,
            if it was found while this one was measured. The error names the smallest limit known to
            suffice; for a forward that is refused halfway, the rest of which is not known yet, an
            estimate.
    """
    return Budget(limit, device=device, group=group)
