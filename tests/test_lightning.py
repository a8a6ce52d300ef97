"""lowtide.lightning: fits of a LightningModule, bit for bit equal to the plain fit.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import absent, same
from lowtide.budget import Budget
from lowtide.errors import BudgetError, CompiledWarning, UsageError
from lowtide.step import current_recorder
from once import on_one_recorder

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner

from lowtide.lightning import MemoryBudget, _TrainingStep

pytestmark = [
    on_one_recorder,  # what frameworks do differs in no recorder
    pytest.mark.usefixtures("one_thread"),
    # Lightning's own advice and torch's notices about what Lightning calls
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.inside(self.norm(x)))
        return out


class Net(LightningModule):
    """Makes its layers in `configure_model`; its training step does not call `forward`."""

    def __init__(self, late: bool = True) -> None:
        super().__init__()
        self.parts: nn.Sequential | None = None
        self.seen: list[Tensor] = []
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.parts is None:
            torch.manual_seed(0)
            self.parts = nn.Sequential(Part(), Part(), Part(), nn.Linear(16, 1))

    def loss(self, batch: Tensor) -> Tensor:
        assert self.parts is not None
        return self.parts(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch))
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def batches(self, seed: int) -> torch.utils.data.DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        data: Any = torch.randn(4 * 64, 16, generator=generator)
        return torch.utils.data.DataLoader(data, batch_size=64)

    def train_dataloader(self) -> torch.utils.data.DataLoader[Tensor]:
        return self.batches(3)

    def val_dataloader(self) -> torch.utils.data.DataLoader[Tensor]:
        return self.batches(4)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, **options}
    return Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=list(callbacks), **settings,
    )  # fmt: skip


def fit(folder: Path, *callbacks: Any, module: Any = None, **options: Any) -> list[Tensor]:
    """Every loss of a fit, and the final state."""
    module = Net() if module is None else module
    seed_everything(1, verbose=False)
    trainer(folder, *callbacks, **options).fit(module)
    assert module.seen
    return [*module.seen, *module.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.5}, {"val_check_interval": 2}],
    ids=["plain", "bf16", "clipped", "validated often"],
)
def test_a_fit(options: dict[str, Any], tmp_path: Path, replayed: Callable[[], int]) -> None:
    """Layers from `configure_model`, accumulation, validation before, during and after."""
    expected = fit(tmp_path, **options)
    assert replayed() == 0
    callback = MemoryBudget(0.7)
    assert repr(callback) == "<lowtide.lightning.MemoryBudget of 0.7>"
    assert same(fit(tmp_path, callback, **options), expected)
    assert replayed() > 0
    assert callback.budget is not None
    assert callback.budget.report().steps == 8  # validation is not counted (rule 12)


class Figures(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.logged_metrics.items()})


class Adversaries(Net):
    """A GAN as Lightning's own examples write it: two optimizers, each with its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic: nn.Sequential | None = None

    def configure_model(self) -> None:
        super().configure_model()
        if self.critic is None:
            self.critic = nn.Sequential(Part(), Part(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.parts is not None
        assert self.critic is not None
        made, real = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(made)
        loss = -self.critic(self.parts[:3](batch)).mean()
        made.zero_grad()
        self.manual_backward(loss)
        made.step()
        self.untoggle_optimizer(made)
        self.toggle_optimizer(real)
        told = self.critic(self.parts[:3](batch).detach()).mean() - self.critic(batch).mean()
        real.zero_grad()
        self.manual_backward(told)
        real.step()
        self.untoggle_optimizer(real)
        self.seen += [loss.detach(), told.detach()]

    def configure_optimizers(self) -> Any:
        assert self.parts is not None
        assert self.critic is not None
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (self.parts, self.critic)]


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=["plain", "bf16"])
def test_manual_optimization(
    options: dict[str, Any], tmp_path: Path, replayed: Callable[[], int]
) -> None:
    """Each backward in the training step ends a step of the budget (rule 13)."""
    options = {"accumulate_grad_batches": 1, **options}
    expected = fit(tmp_path, module=Adversaries(), **options)
    callback, figures = MemoryBudget(0.7), Figures()
    assert same(fit(tmp_path, callback, figures, module=Adversaries(), **options), expected)
    assert replayed() > 0
    assert callback.budget is not None
    assert callback.budget.report().steps == 16
    measured = [s for s in figures.steps if not math.isnan(s["lowtide/measured_peak"])]
    assert measured
    assert all(s["lowtide/measured_peak"] <= s["lowtide/limit"] for s in measured)


def test_the_figures_are_logged(tmp_path: Path) -> None:
    module, callback = Net(), MemoryBudget(0.7)
    run = trainer(tmp_path, callback)
    run.fit(module)
    figures = {name: int(value) for name, value in run.logged_metrics.items() if "/" in name}
    assert set(figures) == {f"lowtide/{name}" for name in
                            ("limit", "planned_peak", "measured_peak", "highest_peak")}  # fmt: skip
    assert 0 < figures["lowtide/measured_peak"] <= figures["lowtide/highest_peak"]
    assert figures["lowtide/highest_peak"] <= figures["lowtide/limit"]
    assert 0 < figures["lowtide/planned_peak"] <= figures["lowtide/limit"]
    run = trainer(tmp_path, MemoryBudget(0.7, log=False))
    run.fit(Net())
    assert not any("/" in name for name in run.logged_metrics)


class Uneven(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[:40] if batch_idx == 3 else batch, batch_idx)


def test_the_last_batch_may_take_what_the_others_were_granted(tmp_path: Path) -> None:
    figures = Figures()
    options = {"max_epochs": 1, "accumulate_grad_batches": 1}
    fit(tmp_path, MemoryBudget(0.7), figures, module=Uneven(), **options)
    before, last = figures.steps[2:]
    assert 0 < before["lowtide/measured_peak"] <= before["lowtide/limit"]
    assert last["lowtide/limit"] == before["lowtide/limit"]
    # Its own, or that of the other step if it was not measured.
    assert 0 < last["lowtide/measured_peak"] <= before["lowtide/measured_peak"]


def test_nothing_stays_on_the_module(tmp_path: Path, replayed: Callable[[], int]) -> None:
    """Rules 11 and 12."""
    module, callback = Net(), MemoryBudget(0.7)
    copies: list[LightningModule] = []

    class Copy(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            copies.append(copy.deepcopy(pl_module))

    fit(tmp_path, callback, Copy(), module=module, max_epochs=1)
    assert "training_step" not in vars(module)
    before = replayed()
    assert before > 0
    module.trainer = None
    for each in (module, copies[0]):
        each.loss(torch.randn(64, 16)).backward()
    assert replayed() == before
    assert vars(copies[0])["training_step"].__self__ is copies[0]


def resumed(folder: Path, *limits: float) -> list[Tensor]:
    """A fit interrupted after an epoch, and a second one that resumes from its checkpoint."""
    first, second = Net(), Net()
    seed_everything(1, verbose=False)
    run = trainer(folder, *map(MemoryBudget, limits), max_epochs=1)
    run.fit(first)
    run.save_checkpoint(folder / "first.ckpt")
    run = trainer(folder, *map(MemoryBudget, limits))
    run.fit(second, ckpt_path=folder / "first.ckpt", weights_only=False)
    assert second.seen
    return [*first.seen, *second.seen, *second.state_dict().values(), torch.get_rng_state()]


def test_resuming(tmp_path: Path, replayed: Callable[[], int]) -> None:
    expected = resumed(tmp_path)
    assert replayed() == 0
    assert same(resumed(tmp_path, 0.7), expected)
    assert replayed() > 0


def test_a_fit_by_a_plan(tmp_path: Path, replayed: Callable[[], int]) -> None:
    expected = fit(tmp_path, max_epochs=1)
    module = Net(late=False)
    plan = lowtide.plan(module.loss, torch.randn(64, 16), limit=0.7)
    callback = MemoryBudget(plan)
    assert (callback.report().limit, callback.report().steps) == (plan.limit, 0)
    assert same(fit(tmp_path, callback, max_epochs=1), expected)
    assert replayed() > 0
    assert callback.budget is not None
    assert callback.report() == callback.budget.report()
    assert callback.report().limit == plan.limit
    assert callback.report().steps > 0


def test_a_fit_that_was_refused_leaves_nothing(tmp_path: Path) -> None:
    module, callback = Net(), MemoryBudget("30 KiB")
    with pytest.raises(BudgetError, match=r"does not fit in 30\.0 KiB"):
        fit(tmp_path, callback, module=module)
    assert "training_step" not in vars(module)
    callback.limit = 0.7
    fit(tmp_path, callback, module=module)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the limit 'much'"):
        MemoryBudget("much")
    late = Net()
    with pytest.raises(
        UsageError, match=r"has 2 of these callbacks \(limits 0.7, '1 MiB'\), but a"
    ):
        fit(tmp_path, MemoryBudget(0.7), MemoryBudget("1 MiB"), module=late)
    assert late.parts is None  # before anything was set up
    flagged = Net(late=False)
    assert flagged.parts is not None
    flagged.parts[1].use_checkpoint = True
    with pytest.raises(UsageError, match=r"use_checkpoint is True.*: parts\.1"):
        fit(tmp_path, MemoryBudget(0.7), module=flagged)


class BatchOnly(Net):
    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_a_training_step_that_takes_only_the_batch(tmp_path: Path) -> None:
    """Lightning looks at its parameters."""
    expected = fit(tmp_path, module=BatchOnly())
    assert same(fit(tmp_path, MemoryBudget(0.7), module=BatchOnly()), expected)


class FullDisk(Callback):
    def on_exception(self, *args: Any) -> None:
        raise OSError("no space left on device")


def test_an_entry_that_was_left_is_replaced(tmp_path: Path) -> None:
    """Lightning runs no further ``on_exception`` if one of them fails."""
    expected, module = fit(tmp_path, module=Net(late=False)), Net(late=False)
    start = copy.deepcopy(module.state_dict())
    with pytest.raises(OSError, match="no space"):
        fit(tmp_path, FullDisk(), MemoryBudget("30 KiB"), module=module)
    module.seen.clear()
    module.load_state_dict(start)
    assert same(fit(tmp_path, MemoryBudget(0.7), module=module), expected)
    assert "training_step" not in vars(module)


def test_an_interrupt_as_the_training_step_ends_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 10: before any code of the budget's own `__exit__`. A notebook goes on after it."""

    class Module(nn.Linear):
        def training_step(self, batch: Tensor) -> Tensor:
            return self(batch).square().mean()  # type: ignore[no-any-return]

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    module, batch = Module(16, 16), torch.randn(8, 16)
    step = _TrainingStep(module, lowtide.budget("1 MiB"))
    with monkeypatch.context() as patched:
        patched.setattr(Budget, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(batch)
    assert current_recorder() is None
    assert torch.equal(step(batch), module.training_step(batch))


class Sized(Net):
    """Whose batches may be of any size."""

    batch_size, lr = 16, 0.01

    def train_dataloader(self) -> torch.utils.data.DataLoader[Tensor]:
        data: Any = torch.randn(1024, 16)
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)


class Manual(Sized):
    """Whose backward runs inside the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("make", [Sized, Manual])
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_batch_size_is_searched_for_inside_the_limit(
    make: type[Sized], mode: Any, tmp_path: Path, replayed: Callable[[], int]
) -> None:
    """Lightning takes the callbacks of the Trainer away meanwhile."""
    module = make()
    found = BatchSizeFinder(mode, init_val=16, max_trials=6)
    options = {"max_epochs": 1, "accumulate_grad_batches": 1}
    trainer(tmp_path, MemoryBudget("300 KiB", log=False), found, **options).fit(module)
    assert replayed() > 0
    assert 64 <= module.batch_size < 512
    assert not {"training_step", "backward"} & set(vars(module))


def test_a_learning_rate_is_searched_for_inside_the_limit(
    tmp_path: Path, replayed: Callable[[], int]
) -> None:
    for limit in (None, "100 KiB"):
        seed_everything(1, verbose=False)
        module = Sized()
        module.batch_size = 64
        callbacks = [] if limit is None else [MemoryBudget(limit, log=False)]
        Tuner(trainer(tmp_path, *callbacks)).lr_find(module, num_training=4)
        if limit is None:
            expected = module.seen
    assert same(module.seen, expected)
    assert replayed() > 0
    assert not {"training_step", "backward"} & set(vars(module))


def test_a_compiled_module_runs_eagerly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replayed: Callable[[], int]
) -> None:
    from lowtide import step

    monkeypatch.setattr(step, "_warned", False)
    expected = fit(tmp_path, module=Net(late=False), max_epochs=1)
    torch._dynamo.reset()
    module = Net(late=False)
    seed_everything(1, verbose=False)
    compiled = torch.compile(module, backend="eager")
    with pytest.warns(CompiledWarning, match="runs eagerly"):
        trainer(tmp_path, MemoryBudget(0.7), max_epochs=1).fit(compiled)
    torch._dynamo.reset()
    assert replayed() > 0
    assert same([*module.seen, *module.state_dict().values()], expected[:-1])


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        absent("lightning", monkeypatch),
        pytest.raises(ImportError, match=r"pip install 'lightning>=2\.5'"),
    ):
        importlib.import_module("lowtide.lightning")
