"""The same step several times from one state: plain, plain again, and with lowtide.

Problem: a step with lowtide has to leave the bits of the plain one; what differs between two plain
steps says nothing of it. Invariant: every step starts from the same parameters, buffers, inputs,
optimizers and random states, without gradients, and at the end all is as it was. Imports state,
observed, origin, verification, export's trials, measure. Rejected: a copy of the model for each of
the two, which hooks, closures and optimizers do not follow.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide import _compat, engine, replay
from lowtide._compat import fakes
from lowtide.budget import Budget
from lowtide.checkpoint import checkpoint
from lowtide.dryrun.putback import without_gradients
from lowtide.dryrun.run import refuse_unsized
from lowtide.dryrun.watching import loss_of
from lowtide.errors import BudgetError, UsageError
from lowtide.export.document import Trial
from lowtide.export.trials import OnTrial, device_of
from lowtide.measure import measure
from lowtide.plans import Plan
from lowtide.step import nothing_recorded, recorded_by
from lowtide.tape.recorder import Recorder
from lowtide.tape.tape import Tape
from lowtide.texttable import count_of
from lowtide.verifying.observed import Difference, Observed, Read, differences, observe
from lowtide.verifying.origin import Origin, Watch
from lowtide.verifying.state import Reached
from lowtide.verifying.verification import ALL, Verification, VerifiedStep

_HALF = 0.5
_EARLIER = (
    "the step's backward goes on into a graph that was made before the step, and can run only "
    "once. Make all of it in the step, or pass what was made before as x.detach().requires_grad_()."
)
_GONE = "backward through the graph a second time"  # what torch says of a graph that was used up
_Alive = dict[int, weakref.ref[Any]]  # tensors by their ids
_TRIES = 6  # limits, as each refusal names a larger one, which may be refused too


class Steps:
    """Runs one step of the user's again and again.

    Args:
        function: the step. It returns its loss, or runs backward itself.
        count: how many steps with lowtide to compare with the plain one.
        tell: called with what comes next, in words.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int,
        tell: Callable[[str], object],
    ) -> None:
        self._call = lambda: function(*args, **kwargs)
        self._reached = Reached(function, args, kwargs)
        tensors = [*self._reached.state(), *self._reached.tensors]
        refuse_unsized(tensors)
        if any(tensor.device.type == "meta" or fakes.is_fake(tensor) for tensor in tensors):
            raise UsageError(
                "verify runs real steps, and this one reads tensors without memory (on the meta "
                "device, or fake ones). Give it a model and a batch that have some."
            )
        self._device = device_of(self._reached)
        self._count = count
        self._tell = tell
        self._own_backward = False
        self._plain: Observed = {}
        self._unrepeatable: list[Difference] = []

    def verify(self, limit: int | float | Plan | None) -> Verification:
        """Compare with the plain step. Without a limit: what the step itself uses of lowtide, else
        a budget of half its plain peak, or of the smallest limit that can be kept."""
        with nothing_recorded(), _eagerly():
            self._tell("a plain step")
            self._run_once()
            self._plain, trial = self._measured(None)
            self._tell("the plain step again")
            again, _ = self._measured(None)
        self._unrepeatable = differences(self._plain, again)
        allowed: int | Plan | None = None
        steps = None if limit is not None else self._as_it_is()
        if steps is None:
            steps, allowed = self._under(limit, trial.measured)
            if not self._own_backward:  # which no region can be around
                steps.append(self._step(0, None, whole=True))
        if any(step.differences for step in steps):
            steps = self._once_more(steps)
        origin = None
        if any(step.differences for step in steps):
            origin = self._origin(allowed)
        kept = allowed.limit if isinstance(allowed, Plan) else allowed
        counts: dict[str, int] = {}
        for (kind, _), tensor in self._plain.items():
            counts[kind] = counts.get(kind, 0) + (tensor is not None)
        return Verification(kept, trial, tuple(steps), counts, tuple(self._unrepeatable), origin)

    def _as_it_is(self) -> list[VerifiedStep] | None:
        """Steps as the user has written them; None if nothing of lowtide's runs in them."""
        with _recordings() as recordings:
            steps = [self._step(1, None)]
        if not recordings:
            return None
        return steps + [self._step(number, None) for number in range(2, self._count + 1)]

    def _under(
        self, limit: int | float | Plan | None, peak: int
    ) -> tuple[list[VerifiedStep], int | Plan]:
        share = _HALF if limit is None else limit
        allowed = max(1, int(share * peak)) if isinstance(share, float) else share
        for left in reversed(range(_TRIES)):
            budget = OnTrial(allowed, device=self._device)
            try:
                return [self._step(n, budget) for n in range(1, self._count + 1)], allowed
            except BudgetError as error:
                if limit is not None or not left or isinstance(allowed, Plan):
                    raise
                allowed = max(error.minimum, allowed + 1)
            except UsageError as error:
                error.add_note(
                    "lowtide.verify runs the step inside a budget of its limit. Without a limit, a "
                    "step that has a budget of its own is run as it is."
                )
                raise
        raise AssertionError("the last try has returned or raised")

    def _once_more(self, steps: list[VerifiedStep]) -> list[VerifiedStep]:
        """Without the differences that a last plain step has too: a state that is not put back may
        change what is left later than in the second."""
        self._tell("the plain step once more")
        with nothing_recorded(), _eagerly():
            last, _ = self._measured(None)
        known = {(one.kind, one.name) for one in self._unrepeatable}
        more = [d for d in differences(self._plain, last) if (d.kind, d.name) not in known]
        self._unrepeatable += more
        known = {(one.kind, one.name) for one in more}
        left = [tuple(d for d in s.differences if (d.kind, d.name) not in known) for s in steps]
        return [replace(s, differences=d) for s, d in zip(steps, left, strict=True)]

    def _step(self, number: int, budget: Budget | None, *, whole: bool = False) -> VerifiedStep:
        """One step. `whole`: with all of it recomputed, as far as that is possible."""
        self._tell(
            "a step with all of it recomputed"
            if whole
            else f"step {number} of {self._count} with lowtide"
        )
        with _replays() as replayed:
            left, trial = self._measured(budget, whole=whole)
        known = {(one.kind, one.name) for one in self._unrepeatable}
        found = differences(self._plain, left)
        others = tuple(one for one in found if (one.kind, one.name) not in known)
        return VerifiedStep(trial, sum(replayed), others)

    def _origin(self, limit: int | Plan | None) -> Origin | None:
        """Look for where a difference began, in steps that are recorded in Python."""
        self._tell("looking for where the difference began")
        watch = Watch(self._reached.names())
        budget = None if limit is None else OnTrial(limit, device=self._device)
        with engine.use("python"), watch.watching():
            for number in range(self._count + 1):
                whole = not number and budget is not None and not self._own_backward
                try:
                    with self._reached.from_here():
                        with nullcontext() if whole or budget is None else budget:
                            _, loss = self._forward(whole=whole)
                        _run_backward(loss)
                        del loss
                except BudgetError:  # this recorder takes more in places
                    break
                if watch.origin is not None:
                    break
        return watch.origin

    # ------------------------------------------------------------------ one step

    def _run_once(self) -> None:
        """A plain step, which also shows whether the function runs backward itself, and which
        leaves there are that nothing leads to."""
        asked: list[torch.Tensor] = []
        began: list[bool] = []
        before = _tensors()
        earlier = {t.grad_fn for t in self._reached.tensors if t.grad_fn is not None}
        with self._reached.from_here(), contextlib.ExitStack() as hooks:
            self._meet_optimizers(hooks)
            for leaf in self._reached.leaves():
                if leaf.requires_grad:
                    hook = leaf.register_post_accumulate_grad_hook(asked.append)
                    hooks.callback(hook.remove)
            with _compat.before_backwards(functools.partial(self._begins, began, before, earlier)):
                result = self._call()
            self._own_backward = bool(asked)
            asked.clear()
            loss = None if self._own_backward else loss_of(result)
            if loss is not None and _compat.goes_through([loss], earlier):
                raise UsageError(_EARLIER)
            missed = [] if loss is None else self._unknown(_compat.leaves_behind([loss]), before)
            with without_gradients(missed):
                try:
                    _run_backward(loss)
                except RuntimeError as error:
                    if not began or _GONE not in str(error):  # an error of the step's own
                        raise
                    self._own_backward = True  # by torch.autograd.grad: its graph is gone
        self._reached.tensors += missed

    def _meet_optimizers(self, hooks: contextlib.ExitStack) -> None:
        """Take in the optimizers that take a step while these hooks are on, and were not found."""
        thread = threading.get_ident()

        def stepping(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if threading.get_ident() != thread and not self._reached.shares_with(optimizer):
                return  # of something else, that another thread trains
            back = self._reached.meet(optimizer)
            if back is not None:
                hooks.callback(back)

        hooks.callback(register_optimizer_step_pre_hook(stepping).remove)

    def _begins(
        self,
        began: list[bool],
        before: _Alive | None,
        earlier: set[Any],
        roots: list[torch.Tensor],
        leaves: list[torch.Tensor],
        accumulates: bool,
    ) -> None:
        """The step begins a backward of its own: note it in `began`, and refuse one that could not
        be run again, or whose gradients could not be put back.

        Args:
            began: whether each of its backwards accumulates gradients in leaves.
            before: the tensors that there were before the step.
            earlier: autograd's nodes that there were before.
            roots: where the backward begins.
            leaves: where it ends.
            accumulates: whether it accumulates gradients there.
        """
        began.append(accumulates)
        if _compat.goes_through(roots, earlier):
            raise UsageError(_EARLIER)
        if accumulates and (missed := self._unknown(leaves, before)):
            raise UsageError(
                f"the step runs a backward for {count_of(len(missed), 'tensor')} that verify "
                f"does not find (the first of shape {tuple(missed[0].shape)}), so it can "
                "neither compare nor put back their gradients. Pass the model to the step as "
                "an argument, or have it in a variable that the step names."
            )

    def _unknown(self, leaves: list[torch.Tensor], before: _Alive | None) -> list[torch.Tensor]:
        """Those of the leaves that were there before the step, and that nothing has led to."""
        known = set(map(id, self._reached.leaves()))
        there = [leaf for leaf in leaves if leaf.requires_grad and id(leaf) not in known]
        return [leaf for leaf in there if _was_there(leaf, before)]

    def _forward(self, *, whole: bool) -> tuple[Any, torch.Tensor | None]:
        """What the step returns, and what its backward begins with, unless the step has run it.
        `whole`: as one region."""

        def forward() -> tuple[Any, torch.Tensor | None]:
            result = self._call()
            return result, None if self._own_backward else loss_of(result)

        return checkpoint(forward) if whole else forward()

    def _measured(self, budget: Budget | None, *, whole: bool = False) -> tuple[Observed, Trial]:
        """Take a step and measure it; returns what it has left."""
        left: list[Any] = []
        read = Read()

        def step() -> None:
            with budget or nullcontext():
                left.extend(self._forward(whole=whole))
            left.append(_run_backward(left.pop()))

        with self._reached.from_here():
            gc.collect()
            with read.reading():
                took = measure(step, device=self._device)
            observed = observe(self._reached, left[0], left[1], read)
            left.clear()
        label, predicted = ALL if whole else "as it is", 0
        if budget is not None:
            report = budget.report()
            label = "planned" if report.planned else "unplanned"
            predicted = report.planned_peak or 0
        return observed, Trial(label, predicted, took.peak_bytes, took.seconds)


def _run_backward(loss: torch.Tensor | None) -> list[torch.Tensor]:
    """Run backward, if there is one; returns the leaves that it reaches."""
    if loss is None or loss.grad_fn is None:
        return []
    leaves = _compat.leaves_behind([loss])
    loss.backward()
    return leaves


def _tensors() -> _Alive | None:
    """The tensors of the program, by their ids; none of its objects is asked for anything. None
    under torch.distributed, whose libraries hold leaves that stand for parameters."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    found = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    return {id(tensor): weakref.ref(tensor) for tensor in found}


def _was_there(tensor: torch.Tensor, before: _Alive | None) -> bool:
    """Whether it is one of those of before, or older: of those that `gc.freeze` hides."""
    if before is None:
        return False
    there = before.get(id(tensor))
    if there is not None and there() is tensor:
        return True
    return bool(gc.get_freeze_count()) and all(item is not tensor for item in gc.get_objects())


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    """What torch has compiled runs eagerly inside a recording, so that is the plain step's way."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _replays() -> Iterator[list[int]]:
    """How many operations each replay inside has run."""
    found: list[int] = []

    def listener(operations: list[Any]) -> None:
        found.append(len(operations))

    replay.listeners.append(listener)
    try:
        yield found
    finally:
        replay.listeners.remove(listener)


@contextmanager
def _recordings() -> Iterator[list[None]]:
    """Has an entry for each recording that is opened inside."""
    found: list[None] = []

    def counted(tape: Tape) -> Recorder:
        found.append(None)
        return engine.new_recorder(tape)

    with recorded_by(counted):
        yield found
