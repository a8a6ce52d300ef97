"""`lowtide.fit`: a budget for every training forward of a model.

Problem: people who train through a framework have no place to put a ``with``. Invariant: the model
stays the object it was (rule 11); off means off (rule 12): in eval and without grad its forward is
the plain one. `FittedBudget` has the budget that the forward enters, and is none itself: a ``with``
around it ends in `remove()`, as with everything else that switches a model over. Imports budget,
dryrun, plans, ranks, region, decide, override, passed, selection and uncalled. Rejected: a wrapper
module, which renames parameters; running the first batch on fake tensors unasked, which would run
user code twice (rule 2).
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowtide import _compat
from lowtide.budget import Budget
from lowtide.dryrun.run import dry_run
from lowtide.errors import (
    BudgetError,
    CompiledWarning,
    UncountedWarning,
    UnsupportedError,
    UsageError,
    users_frame,
)
from lowtide.learning.ranks import Ranks, ranks_of
from lowtide.limits import parse_limit
from lowtide.models.foreign import refuse_active_checkpointing
from lowtide.models.override import Restore, find_layer, override_forward
from lowtide.models.passed import with_a_graph
from lowtide.models.removable import Removable
from lowtide.models.uncalled import Uncalled, may_be_called_unseen
from lowtide.modules import check_model
from lowtide.plans import Plan, plan_alone
from lowtide.region import RegionDecisions
from lowtide.report import BudgetReport
from lowtide.running.decide import StepDecisions
from lowtide.selection import is_container
from lowtide.step import called_inside, current_recorder, recordable
from lowtide.tape.tape import Decisions

_KIND = "lowtide.fit"
_REPLACED = (
    "the forward of a model was replaced after lowtide.fit, by one that does not call the forward "
    "that was there, so steps run as if the model had no budget. Replace it first and call "
    "lowtide.fit afterwards."
)


class _ForwardBudget(Budget):
    """What a fitted forward enters. It knows whose gradients are still to come."""

    _yielded = False  # whether it was said that another recording was open

    def for_model(self, model: weakref.ref[torch.nn.Module]) -> None:
        self._loop.model = model

    @property
    def begun(self) -> bool:
        """Whether a step has run."""
        return self._loop.steps > 0

    @property
    def nothing_saved(self) -> bool:
        """Whether autograd has nothing left of the forward that ran last."""
        return self._loop.nothing_saved

    def yields_to(self, decisions: Decisions, model: torch.nn.Module) -> None:
        """The model's forward runs inside of another recording: if that is a budget or a region of
        the program's, say once that this limit is of no use there, as both may be wanted."""
        if isinstance(decisions, StepDecisions):
            # A module may call itself, as trees and fixed points do: it is its own limit then.
            told = decisions.owner is not self._loop and not decisions.owner.on_trial
        else:
            told = isinstance(decisions, RegionDecisions)  # else a dry run is watching
        if self._yielded or not told:
            return
        self._yielded = True
        warnings.warn(
            f"lowtide.fit: the forward of {type(model).__name__} runs inside of a budget or a "
            "checkpointed region, which decides for all that runs in it. The limit of this model, "
            f"{self._loop.allowance}, holds for nothing there: take it off (`remove()`), or leave "
            "out what is around it.",
            UncountedWarning,
            stacklevel=users_frame(),
        )


def budget_on(model: torch.nn.Module) -> Restore | None:
    """The layer that a budget has put around the model's forward."""
    return find_layer(model, _KIND)


class FittedBudget(Removable):
    """The budget around the training forward of a model, made by `fit`; `remove()` takes it off.

    Also a context manager that calls `remove()` at the end.
    """

    def __init__(
        self,
        limit: int | float | str | Plan,
        device: torch.device | str | None,
        group: Any,
    ) -> None:
        self._asked = limit, device, group
        self._budget = _ForwardBudget(limit, device=device, group=group)
        self._restore: Restore | None = None
        self._uncalled: Uncalled | None = None

    def attach(self, model: torch.nn.Module) -> None:
        reference = weakref.ref(model)
        self._budget.for_model(reference)
        self._uncalled = Uncalled(model)
        make = functools.partial(_inside, self._budget, reference, self._uncalled)
        self._restore = override_forward(
            model, make, kind=_KIND, for_replica=functools.partial(_on_a_replica, reference)
        )
        self._restore.about = self._asked, self._budget, self._uncalled

    @classmethod
    def of(cls, model: torch.nn.Module) -> FittedBudget | None:
        """Return the budget that a model has, if what `fit` returned is lost, as when a cell of a
        notebook runs again; None if it has none."""
        check_model(model, "lowtide.FittedBudget.of", "`with lowtide.budget(limit):`")
        present = budget_on(model)
        if present is None:
            return None
        asked, budget, uncalled = present.about
        found = cls(*asked)
        found._budget, found._uncalled, found._restore = budget, uncalled, present
        return found

    def owned_by(self, owner: Any) -> None:
        """Tell others who meet this budget on the model whose it is, as `str(owner)` says."""
        if self._restore is not None:
            self._restore.owner = owner

    @property
    def displaced(self) -> bool:
        """Whether another than `remove()` has taken it off the model."""
        return self._restore is not None and not self._restore.active

    @property
    def active(self) -> bool:
        """Whether the model still has this budget: not after `remove()`, nor once its forward was
        replaced by one that does not lead to the budget."""
        return self._restore is not None and self._restore.active and not self._restore.bypassed

    def report(self) -> BudgetReport:
        """Return what the last finished step did, as a `BudgetReport`."""
        if self._restore is not None and self._restore.bypassed:
            warnings.warn(_REPLACED, UncountedWarning, stacklevel=users_frame())
        return self._budget.report()

    def remove(self) -> None:
        """Restore the model's plain forward. A second call does nothing."""
        restore, self._restore = self._restore, None
        if self._uncalled is not None:
            self._uncalled.over()
        if restore is not None:
            restore.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (say, of a model that holds it) has the limit, but is on no model."""
        return FittedBudget, self._asked

    def __repr__(self) -> str:
        state = "on a model" if self.active else "on no model"
        return f"<lowtide.FittedBudget, {state}: {self._budget!r}>"


def _inside(
    budget: _ForwardBudget,
    reference: weakref.ref[torch.nn.Module],
    uncalled: Uncalled,
    forward: Callable[..., Any],
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        model = reference()
        if model is None or not model.training:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            _budget_lost()
            return forward(*args, **kwargs)
        if torch.is_grad_enabled():
            uncalled.over()
        if not recordable():
            return forward(*args, **kwargs)
        around = current_recorder()
        if around is not None:  # a budget or region decides already, or a dry run watches
            budget.yields_to(around.decisions, model)
            return forward(*args, **kwargs)
        first = not budget.begun
        if first:  # a trainer may have switched the model's own checkpointing on since
            refuse_active_checkpointing(model, "lowtide.fit")
        result = called_inside(budget, functools.partial(forward, *args, **kwargs))
        if first and budget.nothing_saved:
            _nothing_counts(model, with_a_graph(result))
        return result

    return run


def _nothing_counts(model: torch.nn.Module, results: list[torch.Tensor]) -> None:
    """Say that a limit holds for nothing, if the model is one that learns, unless its forward has
    nothing to save, nor its backward any memory to take."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    why = "nothing that it returned requires grad"
    then = "What it returned is probably evaluated later."
    instead = (
        "Leave lowtide.fit out, and put `with lowtide.budget(limit):` around forward and loss."
    )
    if any(map(_only_a_hook, results)):  # gradients cached by parts, as sentence-transformers does
        why = "what it returned has a hook and no graph"
        then = "What the hook runs has no budget."
        instead = "If it calls a model, call lowtide.fit with that model instead of this one."
    elif results:
        if not _compat.runs_python(results):
            return
        why = "a torch.autograd.Function in it has a backward of its own"
        then = "What that takes, and what the Function keeps in attributes of ctx, is not seen."
    warnings.warn(
        f"lowtide.fit: the forward of {type(model).__name__} has saved nothing for backward, and "
        f"{why}, so the limit holds for nothing. {then} {instead}",
        UncountedWarning,
        stacklevel=users_frame(),
    )


def _only_a_hook(result: torch.Tensor) -> bool:
    made = result.grad_fn is None and not isinstance(result, torch.nn.Parameter)
    return made and any(_compat.hooks_of(result))


def _on_a_replica(
    reference: weakref.ref[torch.nn.Module], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """The forward of a copy that `nn.DataParallel` made for one of several devices."""

    def run(*args: Any, **kwargs: Any) -> Any:
        model = reference()
        if model is None or not model.training or not recordable():
            return forward(*args, **kwargs)
        raise UnsupportedError(
            "nn.DataParallel runs copies of this model on several devices at once, in threads of "
            "one process, and one budget cannot count for all of them. Use "
            "nn.parallel.DistributedDataParallel, with lowtide.fit in each process, or "
            "lowtide.checkpoint_modules, whose regions nn.DataParallel copies too."
        )

    return run


@_compat.constant_while_compiling
def _budget_lost() -> None:
    """Called once each time torch.compile traces a fitted forward."""
    may_be_called_unseen()
    warnings.warn(
        "a model that has a budget from lowtide.fit is being compiled with torch.compile. Compiled "
        "code is not recorded, so the model runs as if it had no budget. Do not compile it; or "
        "compile it with backend=lowtide.CompileBudget(limit), from torch 2.13 on, or with "
        "lowtide.checkpoint in its blocks, which torch.compile understands.",
        CompiledWarning,
        stacklevel=2,
    )


def fit(
    model: torch.nn.Module,
    limit: int | float | str | Plan,
    *,
    device: torch.device | str | None = None,
    group: Any = None,
    example: Any = None,
) -> FittedBudget:
    """Keep every training step of `model` inside a limit, without a ``with`` block::

        budget = lowtide.fit(model, "6 GiB")
        ...  # train as before
        budget.remove()

    The limit covers the same as that of a `lowtide.budget` entered where the model's forward
    begins. What a loss outside the forward stores, and takes for itself, is counted but not
    recomputed. In the first step, before anything was measured, it is not known: twelve times the
    largest result, or twice what the forward saves, is left free for it, as far as the limit
    allows.
    ``model`` stays the object it was: its type, parameter names, ``state_dict``, copies and pickles
    are those of the plain model. In eval and with grad disabled the forward is the plain one. The
    same holds inside a budget or region that is open already (that of a fitted model around this
    one, for instance): that one decides, and this limit holds for nothing, which an
    `UncountedWarning` says once.

    Args:
        model: any module.
        limit: as for `lowtide.budget`. A `Plan` is one of the model's forward alone, as `example`
            makes it: for a plan of model and loss, the first step ends in a `PlanWarning`.
        device: as for `lowtide.budget`.
        group: as for `lowtide.budget`. With an `example`, this call is a collective too.
        example: a batch like those to come: a tensor, or a tuple or dict of the forward's
            arguments. A dry run of the model on it then makes a plan at once, as `lowtide.plan`
            does: nothing is computed or allocated, but the model's Python code runs once more.
            The first step follows that plan.

    Returns:
        The budget, whose ``report()`` tells what the last step took and whose ``remove()`` takes it
        off again. In a ``with`` statement it takes itself off at the end of the block.

    Raises:
        UsageError: the limit cannot be read; ``model`` is not a module, has no forward, has a
            budget already, was compiled with ``model.compile()``, or checkpoints parts of itself by
            its own flag (now, or when its first step runs); or an example is given for a model in
            eval mode, with parameters that have no size yet, or together with a plan.
        BudgetError: the limit cannot be met: raised here if there is an `example`, else in a step,
            as for `lowtide.budget`.
        UnsupportedError: in a step, inside a transform of ``torch.func``, while a CUDA graph is
            captured, or in a copy that ``nn.DataParallel`` has made for another device.
    """
    check_model(model, "lowtide.fit", "`with lowtide.budget(limit):` around its call")
    if is_container(model):
        raise UsageError(
            f"lowtide.fit: a {type(model).__name__} has no forward to put a budget around. Fit the "
            "model that calls its modules, or put `with lowtide.budget(limit):` around the step."
        )
    present = budget_on(model)
    if present is not None:
        raise UsageError(_has_one(model, present))
    if _compat.is_compiled_in_place(model):
        raise UsageError(
            f"lowtide.fit: this {type(model).__name__} was compiled in place with model.compile(), "
            "and its compiled call would bypass the budget. Leave model.compile() out; or leave "
            "lowtide.fit out and compile with backend=lowtide.CompileBudget(limit), from torch "
            "2.13 on, or with lowtide.checkpoint in its blocks, which torch.compile understands."
        )
    refuse_active_checkpointing(model, "lowtide.fit")
    if example is not None:
        if isinstance(limit, Plan):
            raise UsageError(
                "lowtide.fit: a plan already is for the step that it was made from, and needs no "
                "example. Leave example= out, or give a limit instead of the plan."
            )
        parse_limit(limit)  # `lowtide.plan` may go without a limit, a budget may not
        limit = _planned_alike(model, limit, example, ranks_of(group))
    budget = FittedBudget(limit, device, group)
    budget.attach(model)
    return budget


def _planned_alike(
    model: torch.nn.Module, limit: int | float | str, example: Any, ranks: Ranks | None
) -> Plan:
    """The plan for this example, unless some rank has none: then all of them refuse together, as
    one that did not come would leave the others waiting in their next collective."""
    if ranks is None:
        return _planned(model, limit, example)
    try:
        found = _planned(model, limit, example)
    except BudgetError as error:
        ranks.refuse_together(error)
        raise
    ranks.refuse_together(None)
    return found


def _has_one(model: torch.nn.Module, present: Restore) -> str:
    if present.owner is not None:
        return (
            f"this {type(model).__name__} has a budget already, from {present.owner}. Call "
            "budget.remove() on that callback before giving the model another."
        )
    return (
        f"this {type(model).__name__} has a budget already. Call remove() on what lowtide.fit "
        "or lowtide.transformers.enable returned, or lowtide.FittedBudget.of(model).remove(), "
        "before giving the model another."
    )


def _planned(model: torch.nn.Module, limit: int | float | str, example: Any) -> Plan:
    if not model.training:
        raise UsageError(
            "lowtide.fit: the example is planned as a training step, but this "
            f"{type(model).__name__} is in eval mode. Call its train() first."
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        _compat.dry_run.outputs.append(output)  # a caller holds it while backward runs
        return output

    if isinstance(example, Mapping):  # also what tokenizers and collators return
        return plan_alone(dry_run(forward, (), dict(example)), parse_limit(limit))
    args = example if isinstance(example, tuple) else (example,)
    return plan_alone(dry_run(forward, args, {}), parse_limit(limit))
