"""Lightning: a budget for the training steps of a `LightningModule`, as a callback.

Problem: Lightning calls ``training_step`` itself, so a script has no place for a ``with``, and the
layers may not exist before ``configure_model`` has run. Invariant: the budget is around
``training_step`` alone, that is forward and loss (under manual optimization, all that it does),
from the first batch of a fit to its end, and while Lightning's tuners try learning rates and batch
sizes; validation and the module itself are untouched. Imports lightning, budget, plans, step,
foreign, entries. Rejected: a budget around the module's ``forward``, which many training steps
never call.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.budget import Budget
from lowtide.errors import BudgetError, UsageError
from lowtide.models.entries import InstanceEntry
from lowtide.models.foreign import refuse_active_checkpointing
from lowtide.plans import Plan, limit_of
from lowtide.report import LOGGED, BudgetReport, logged
from lowtide.step import called_inside

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError(
        "lowtide.lightning needs Lightning 2.5 or later, which is not installed or does not "
        "import: pip install 'lightning>=2.5'"
    ) from error

__all__ = ["MemoryBudget"]


_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


class _Entry(InstanceEntry):
    """A method of a module that Lightning calls.

    It looks at the code of what it finds, and passes ``batch_idx`` if the parameters have it.
    """

    @property
    def __wrapped__(self) -> Any:
        plain = self.plain()
        return getattr(plain, "__wrapped__", plain)

    def install(self) -> None:
        present = self.module().__dict__.get(self.attribute)
        if isinstance(present, _Entry):
            # Left by another trainer that failed, if an ``on_exception`` before ours failed too.
            present.uninstall()
            self.shadowed = present.shadowed
        super().install()


class _TrainingStep(_Entry):
    """`training_step` of a module, inside a budget."""

    attribute = "training_step"

    def __init__(self, module: nn.Module, budget: Budget) -> None:
        super().__init__(module)
        self.budget = budget

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return called_inside(self.budget, functools.partial(self.plain(), *args, **kwargs))


@contextlib.contextmanager
def _as_out_of_memory() -> Iterator[None]:
    """Add to a refusal what Lightning's search for a batch size looks for in an error's text."""
    try:
        yield
    except BudgetError as error:
        if _OUT_OF_MEMORY not in str(error):
            error.args = (f"{error}\n(For Lightning's tuners: {_OUT_OF_MEMORY}.)",)
        raise


class _Trial(_TrainingStep):
    """`training_step` inside a budget, while Lightning looks for a learning rate or a batch
    size."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _as_out_of_memory():
            return super().__call__(*args, **kwargs)


class _TrialBackward(_Entry):
    """Under automatic optimization, a step may be refused here."""

    attribute = "backward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _as_out_of_memory():
            return self.plain()(*args, **kwargs)


class MemoryBudget(Callback):
    """Keep every training step of a Lightning module inside a memory limit::

        Trainer(callbacks=[MemoryBudget("6 GiB")]).fit(module)

    Logs ``lowtide/limit``, ``lowtide/planned_peak``, ``lowtide/measured_peak`` and
    ``lowtide/highest_peak``, in bytes, whenever the trainer logs; NaN if a figure is not known for
    that step. `lowtide.BudgetReport` explains them. After the fit nothing remains: checkpoints, the
    module and its copies are those of a training without the callback.

    Args:
        limit: as for `lowtide.budget`. Bytes are counted from where ``training_step`` is entered;
            Lightning frees the previous step's gradients only after that. Under manual optimization
            each backward inside it ends a step (rule 13).
        device: as for `lowtide.budget`.
        group: as for `lowtide.budget`.
        log: whether to log.

    Attributes:
        budget: the budget of the last fit; None before the first fit, and in a process that has
            others run it (the strategies ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``): what
            is logged arrives there.

    Raises:
        UsageError: the limit cannot be read; or, at the start of a fit, the trainer has two of
            these callbacks, or the module checkpoints parts of itself by its own flag.
        BudgetError: in a step, if the limit cannot be met.
    """

    def __init__(
        self,
        limit: int | float | str | Plan,
        *,
        device: torch.device | str | None = None,
        group: Any = None,
        log: bool = True,
    ) -> None:
        super().__init__()
        limit_of(limit)  # report a mistake here, not when training begins
        self.limit = limit
        self.device = device
        self.group = group
        self.log_figures = log
        self.budget: Budget | None = None
        self._entries: list[_Entry] = []

    def __getattr__(self, name: str) -> Any:
        """Called for what it does not have, such as what another library's Trainer asks for."""
        raise AttributeError(
            f"{type(self).__module__}.MemoryBudget has no {name!r}: it is a callback of "
            "Lightning's Trainer. That of transformers' takes lowtide.transformers.MemoryBudget."
        )

    def __repr__(self) -> str:
        return f"<lowtide.lightning.MemoryBudget of {self.limit!r}>"

    def report(self) -> BudgetReport:
        """Return what the last finished step of the last fit did, as a `BudgetReport`: sizes in
        bytes, times in seconds. Before the first fit it knows the limit alone."""
        return (Budget(self.limit) if self.budget is None else self.budget).report()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        budgets = [one for one in trainer.callbacks if isinstance(one, MemoryBudget)]
        if stage == "fit" and len(budgets) > 1:
            limits = ", ".join(repr(one.limit) for one in budgets)
            raise UsageError(
                f"MemoryBudget: this Trainer has {len(budgets)} of these callbacks (limits "
                f"{limits}), but a step has only one budget. Keep one of the callbacks."
            )
        if stage == "fit":
            # The tuners run steps before the training starts, without the trainer's callbacks.
            self._enter(_Trial(pl_module, self._anew()), _TrialBackward(pl_module))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._leave()
        # Not in `setup`, which runs before `configure_model` and the strategy are done.
        refuse_active_checkpointing(pl_module, "MemoryBudget")
        budget = self.budget
        # The largest batch size that was found may need what was learned while it was looked for.
        # A fraction would be one of the largest size that was tried.
        if budget is None or isinstance(budget.limit, float):
            budget = self._anew()
        self._enter(_TrainingStep(pl_module, budget))

    def _anew(self) -> Budget:
        self.budget = Budget(self.limit, device=self.device, group=self.group)
        return self.budget

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.log_figures and self.budget is not None:
            known = logged(self.budget.report())
            # NaN: Lightning would repeat the last value of a figure that is left out. float64: in
            # float32, the default, byte counts above 16 MiB are not exact.
            figures = {
                name: torch.tensor(known.get(name, math.nan), dtype=torch.float64)
                for name in (f"lowtide/{name}" for name in LOGGED)
            }
            pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def _enter(self, *entries: _Entry) -> None:
        for entry in entries:
            self._entries.append(entry)
            entry.install()

    def _leave(self) -> None:
        entries, self._entries = self._entries, []
        for entry in entries:
            entry.uninstall()
