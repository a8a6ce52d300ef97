"""Hugging Face transformers: a budget or regions for its models, in one line.

Problem: the library's own checkpointing runs each layer twice, switches the cache off, and needs a
hook on frozen embeddings; and its Trainer has no place for a ``with``. Invariant: the model stays
the object it was, `remove()` makes it plain again, and a model whose own checkpointing is on is
refused. Imports transformers, and lowtide's public parts. Rejected: a subclass of Trainer, of which
a script can have only one.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch import nn

from lowtide.budget import Budget
from lowtide.checkpoint import checkpoint
from lowtide.errors import UsageError
from lowtide.fitting import FittedBudget, budget_on, fit
from lowtide.limits import whole_number
from lowtide.models.foreign import refuse_active_checkpointing
from lowtide.models.removable import Removable
from lowtide.modules import CheckpointedModules, check_model, switch_on
from lowtide.plans import Plan, limit_of
from lowtide.policies import PolicyLike, check_policy
from lowtide.report import BudgetReport, logged
from lowtide.selection import every, select
from lowtide.texttable import count_of

try:
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError as error:
    raise ImportError(
        "lowtide.transformers needs transformers 5.0 or later, which is not installed or does not "
        "import: pip install 'transformers>=5.0'"
    ) from error

__all__ = ["Enabled", "MemoryBudget", "enable", "set_checkpointing_function"]


class Enabled(Removable):
    """What `enable` or `set_checkpointing_function` switched on; `remove()` switches it off again.

    Also a context manager that calls `remove()` at the end.

    Attributes:
        budget: the budget around the model's forward; None without a limit.
        names: the qualified names of the modules that are regions; empty with a limit.
    """

    def __init__(self, what: FittedBudget | CheckpointedModules | _OwnFunction) -> None:
        self._what: FittedBudget | CheckpointedModules | _OwnFunction | None = what
        self.budget = what if isinstance(what, FittedBudget) else None
        self.names: tuple[str, ...] = () if isinstance(what, FittedBudget) else what.names

    @property
    def active(self) -> bool:
        """Whether any of it is still on the model."""
        return self._what is not None and self._what.active

    def remove(self) -> None:
        """Make the model's forward plain again. A second call does nothing."""
        what, self._what = self._what, None
        if what is not None:
            what.remove()

    def report(self) -> BudgetReport:
        """Return what the last finished step did under the limit, as a `BudgetReport`: sizes in
        bytes, times in seconds.

        Raises:
            UsageError: there is no limit, but regions.
        """
        if self.budget is None:
            raise UsageError(
                "report() tells of a limit, and this model has regions and no limit: call "
                "enable(model, limit=...), or lowtide.measure(step) for what a step takes."
            )
        return self.budget.report()

    def __repr__(self) -> str:
        what = f"{count_of(len(self.names), 'module')} checkpointed"
        if self.budget is not None:
            what = repr(self.budget)
        return f"<lowtide.transformers.Enabled: {'removed' if self._what is None else what}>"


def enable(
    model: nn.Module,
    limit: int | float | str | Plan | None = None,
    *,
    policy: PolicyLike | None = None,
    every_n_layers: int = 1,
    device: torch.device | str | None = None,
    group: Any = None,
) -> Enabled:
    """Train a model of transformers or peft in less memory::

        enable(model, limit="6 GiB")
        Trainer(model=model, ...).train()

    With a ``limit``, lowtide chooses what to recompute, as in `lowtide.fit`. Without one, each
    layer is a region, and ``policy`` says what is kept inside it. That is like the library's own
    checkpointing, but each layer runs once, the cache works, and frozen embeddings need no hook.

    Args:
        model: a model of transformers, or a peft model around one, before or after it is wrapped.
        limit: as for `lowtide.fit`.
        policy: as for `lowtide.checkpoint`. Default: nothing is kept.
        every_n_layers: make every n-th layer a region, beginning with the first.
        device: as for `lowtide.budget`; only with a limit.
        group: as for `lowtide.budget`; only with a limit.

    Returns:
        A handle, whose ``remove()`` switches it off again.

    Raises:
        UsageError: a limit together with a policy or ``every_n_layers``; a limit that cannot be
            read; without a limit, a device or group, ``every_n_layers`` below 1, or a model with no
            layers that transformers can checkpoint; or a model that is checkpointed or compiled
            already.
        BudgetError: in a step, if the limit cannot be met.
    """
    check_model(model, "lowtide.transformers.enable")
    if limit is not None:
        if policy is not None or every_n_layers != 1:
            raise UsageError(
                "enable takes either limit=, with which lowtide chooses what to keep, or policy= "
                "and every_n_layers=, with which you choose."
            )
        return Enabled(fit(model, limit, device=device, group=group))
    if device is not None or group not in (None, False):
        raise UsageError(
            "enable got device= or group=, which say how a limit is kept, and no limit. Add "
            "limit=, or leave them out: the layers are regions on every device and rank alike."
        )
    check_policy(policy, "enable")
    _check_every(every_n_layers, "enable")
    _check_layers(model, "enable")
    chosen = select(model, every(every_n_layers, GradientCheckpointingLayer))
    return Enabled(switch_on(model, chosen, policy=policy, in_eval=False, caller="enable"))


def _check_every(every_n_layers: int, caller: str) -> None:
    number = whole_number(every_n_layers)
    if number is None or number < 1:
        raise UsageError(
            f"{caller}: every_n_layers is an int, 1 or more, not {every_n_layers!r}; 2 takes "
            "layers 0, 2, 4 and so on."
        )


def _check_layers(model: nn.Module, caller: str) -> None:
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise UsageError(
            f"{caller}: this {type(model).__name__} has no layers that transformers can "
            "checkpoint (no GradientCheckpointingLayer). Call lowtide.transformers.enable with a "
            "limit=, which needs none, or choose modules with lowtide.checkpoint_modules(model, "
            "...)."
        )


class _OwnFunction(Removable):
    """A model whose own checkpointing calls lowtide's function."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.names: tuple[str, ...] = tuple(
            name
            for name, module in model.named_modules()
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
        )

    @property
    def active(self) -> bool:
        return bool(self.model.is_activation_checkpointing)

    def remove(self) -> None:
        self.model.activation_checkpointing_disable()


def set_checkpointing_function(
    model: nn.Module,
    *,
    policy: PolicyLike | None = None,
    every_n_layers: int = 1,
) -> Enabled:
    """Switch on the library's own checkpointing, with `lowtide.checkpoint` in place of torch's.

    For code that reads ``model.is_activation_checkpointing`` or calls
    ``model.activation_checkpointing_disable()``, which both work as before. The layers then behave
    as under the library's own checkpointing: in training they pass no cache on, and say so once. If
    no code needs this, `enable` is the better choice. Do not set
    ``TrainingArguments(activation_checkpointing=True)``, which would put torch's function back.

    Args:
        model: a model of transformers, or a peft model around one.
        policy: as for `lowtide.checkpoint`. Default: nothing is kept.
        every_n_layers: checkpoint every n-th layer, beginning with the first.

    Returns:
        A handle, whose ``remove()`` switches it off again.

    Raises:
        UsageError: the model is not one of these, has no layers that transformers can checkpoint,
            or is checkpointed already; or this version of transformers has no ``every_n_layers``.
    """
    check_model(model, "lowtide.transformers.set_checkpointing_function")
    get_base = getattr(model, "get_base_model", None)
    base = get_base() if callable(get_base) else model
    if not isinstance(base, PreTrainedModel):
        raise UsageError(
            f"set_checkpointing_function takes a model of transformers or peft, not a "
            f"{type(model).__name__}; for other modules use lowtide.checkpoint_modules."
        )
    check_policy(policy, "set_checkpointing_function")
    _check_every(every_n_layers, "set_checkpointing_function")
    refuse_active_checkpointing(model, "set_checkpointing_function")
    _check_layers(model, "set_checkpointing_function")
    function = functools.partial(checkpoint, policy=policy)
    # The only private name of transformers used here: its public `activation_checkpointing_enable`
    # takes no function, and puts a hook on the embeddings that torch's reentrant mode needed.
    own = base._set_gradient_checkpointing
    options: dict[str, Any] = {}
    if every_n_layers != 1:
        if "every_n_layers" not in inspect.signature(own).parameters:
            raise UsageError(
                "this version of transformers has no every_n_layers; use "
                "lowtide.transformers.enable(model, every_n_layers=...), which does not need it."
            )
        options["every_n_layers"] = every_n_layers
    own(enable=True, gradient_checkpointing_func=function, **options)
    return Enabled(_OwnFunction(base))


class _Training:
    """What a `MemoryBudget` gave a model its budget for.

    Trainer tells its callbacks neither of an error nor of an interrupt, so a budget may outlive its
    training. That is over at the latest when another one begins, which has a state of its own.
    """

    def __init__(self, callback: MemoryBudget, state: Any, budget: FittedBudget) -> None:
        self.limit = callback.limit
        self.state = weakref.ref(state)
        # Held here, by the model: without its callback, nobody could take the budget off.
        self._callback = weakref.ref(callback, lambda _: budget.remove())

    def __str__(self) -> str:
        return (
            f"lowtide.transformers.MemoryBudget({self.limit!r}), a Trainer's callback whose "
            "training has not ended, or was interrupted"
        )


class MemoryBudget(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Keep every training step of a Trainer inside a memory limit::

        Trainer(model=model, args=args, callbacks=[MemoryBudget("6 GiB")], ...).train()

    A callback that calls `lowtide.fit` when a training begins and detaches the budget when it ends.
    Trainer does not tell its callbacks of an error or an interrupt. After one, the budget stays on
    the model until another training with such a callback begins, the callback is deleted, or
    ``callback.budget.remove()`` is called; evaluation and copies are plain all the same.
    Adds ``lowtide/limit``, ``lowtide/planned_peak``, ``lowtide/measured_peak`` and
    ``lowtide/highest_peak``, in bytes, to what Trainer logs, as far as they are known;
    `lowtide.BudgetReport` explains them.

    Args:
        limit: as for `lowtide.fit`.
        device: as for `lowtide.fit`.
        group: as for `lowtide.fit`.

    Attributes:
        budget: the budget of the last training; None before the first one.

    Raises:
        UsageError: the limit cannot be read; or, when training begins, the Trainer has two of
            these callbacks, or the model cannot be fitted (see `lowtide.fit`).
        BudgetError: in a step, if the limit cannot be met.
    """

    def __init__(
        self,
        limit: int | float | str | Plan,
        *,
        device: torch.device | str | None = None,
        group: Any = None,
    ) -> None:
        limit_of(limit)  # report a mistake here, not when training begins
        self.limit = limit
        self.device = device
        self.group = group
        self.budget: FittedBudget | None = None

    def __getattr__(self, name: str) -> Any:
        """Called for what it does not have, such as what another library's Trainer asks for."""
        raise AttributeError(
            f"{type(self).__module__}.MemoryBudget has no {name!r}: it is a callback of "
            "transformers' Trainer. That of Lightning's takes lowtide.lightning.MemoryBudget."
        )

    def __repr__(self) -> str:
        return f"<lowtide.transformers.MemoryBudget of {self.limit!r}>"

    def report(self) -> BudgetReport:
        """Return what the last finished step of the last training did, as a `BudgetReport`: sizes
        in bytes, times in seconds. Before the first training it knows the limit alone."""
        return (Budget(self.limit) if self.budget is None else self.budget).report()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self._detach()  # a training that failed never called on_train_end
        present = budget_on(model)
        if present is not None and isinstance(present.owner, _Training):
            present.remove()
            if present.owner.state() is state:
                raise UsageError(
                    "MemoryBudget: this Trainer has two of these callbacks (limits "
                    f"{present.owner.limit!r} and {self.limit!r}), but a step has only one budget. "
                    "Keep one of the callbacks."
                )
        self.budget = fit(model, self.limit, device=self.device, group=self.group)
        self.budget.owned_by(_Training(self, state, self.budget))

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if self.budget is not None and self.budget.displaced:
            # By another training of the same model, which began and ended during this one.
            self.on_train_begin(args, state, control, model=model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._detach()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.budget is None or logs is None:
            return
        figures = logged(self.budget.report())
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def _detach(self) -> None:
        if self.budget is not None:
            self.budget.remove()
