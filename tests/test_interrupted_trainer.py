"""The callback of lowtide.transformers after a training of Trainer that was interrupted.

Trainer tells its callbacks neither of an error nor of an interrupt.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from by_hand import same
from lowtide.errors import UsageError

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments

from lowtide.transformers import MemoryBudget, enable
from once import on_one_recorder
from test_transformers import VOCABULARY, llama, step, train

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


class Stop(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Ends a training in its first step, as Ctrl-C in a notebook does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def interrupted(model: nn.Module, folder: Path, *callbacks: Any, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(model, folder, (*callbacks, Stop()), **options)


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_new_callback_replaces_the_budget(
    options: dict[str, Any], tmp_path: Path, replayed: Callable[[], int]
) -> None:
    """Also when Accelerate has wrapped the forward anew each time."""
    plain, model = llama(), llama()
    first = MemoryBudget(0.9)
    for callbacks in ((first,), (MemoryBudget(0.8),)):
        interrupted(plain, tmp_path, **options)
        interrupted(model, tmp_path, *callbacks, **options)
    _, expected = train(plain, tmp_path, **options)
    before = replayed()
    _, found = train(model, tmp_path, (MemoryBudget(0.7),), **options)
    assert same(found, expected)
    assert replayed() > before
    assert first.budget is not None
    assert not first.budget.active
    assert b"lowtide" not in pickle.dumps(model)


def test_evaluation_and_copies_are_plain(tmp_path: Path, replayed: Callable[[], int]) -> None:
    """Rules 11 and 12."""
    plain, model = llama(), llama()
    interrupted(plain, tmp_path)
    callback = MemoryBudget(0.7)
    interrupted(model, tmp_path, callback)
    before = replayed()
    with torch.no_grad():
        ids = torch.arange(24).reshape(2, 12)
        assert torch.equal(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    expected = step(plain.train(), use_cache=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(step(copied.train(), use_cache=False), expected)
    assert replayed() == before
    assert pickle.loads(pickle.dumps(callback)).limit == 0.7


def test_a_callback_that_is_gone_leaves_a_plain_model(tmp_path: Path) -> None:
    """Nobody else could take its budget off."""
    model = llama()
    interrupted(model, tmp_path, MemoryBudget(0.7))
    gc.collect()
    assert "forward" not in vars(model)
    lowtide.fit(model, 0.7).remove()


def test_a_budget_of_ones_own_is_not_replaced(tmp_path: Path) -> None:
    model = llama()
    enabled = enable(model, limit=0.7)
    with pytest.raises(UsageError, match=r"what lowtide.fit or lowtide.transformers.enable retu"):
        train(model, tmp_path, (MemoryBudget(0.7),))
    assert enabled.active
    enabled.remove()
    callback = MemoryBudget("1 GiB")
    interrupted(model, tmp_path, callback)
    with pytest.raises(UsageError, match=r"MemoryBudget\('1 GiB'\).*or was interrupted. Call bud"):
        lowtide.fit(model, 0.7)
    assert callback.budget is not None
    callback.budget.remove()
    lowtide.fit(model, 0.7).remove()


def test_two_callbacks_in_one_trainer(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(UsageError, match=r"two of these callbacks \(limits 0.7 and '1 GiB'\)"):
        train(model, tmp_path, (MemoryBudget(0.7), MemoryBudget("1 GiB")))
    assert "forward" not in vars(model)
    train(model, tmp_path, (MemoryBudget(0.7),))


def test_a_training_inside_another_one(tmp_path: Path, replayed: Callable[[], int]) -> None:
    """Of the same model: the outer one gets its budget back."""

    class Inner(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def __init__(self, *callbacks: Any) -> None:
            self.callbacks = callbacks

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                train(kwargs["model"], tmp_path, self.callbacks, max_steps=1)

    _, expected = train(llama(), tmp_path, (Inner(),))
    model, outer = llama(), MemoryBudget(0.7)
    _, found = train(model, tmp_path, (outer, Inner(MemoryBudget(0.8))))
    assert same(found, expected)
    assert replayed() > 0
    assert outer.budget is not None
    assert outer.budget.report().steps == 6  # of 8, two of which came before
    assert "forward" not in vars(model)


def test_a_batch_size_that_is_refused_is_made_smaller(tmp_path: Path) -> None:
    """The Trainer goes on with the same callback."""
    rows = torch.randint(0, VOCABULARY, (96, 40), generator=torch.Generator().manual_seed(7))

    def trainer(limit: int) -> tuple[Trainer, MemoryBudget]:
        callback = MemoryBudget(limit)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True,
            per_device_train_batch_size=24, auto_find_batch_size=True, max_steps=4,
            save_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        made = Trainer(model=llama(), args=arguments, train_dataset=data, callbacks=[callback])
        made.train()
        return made, callback

    def highest(callback: MemoryBudget) -> int:
        assert callback.budget is not None
        peak = callback.budget.report().highest_peak
        assert peak is not None
        return peak

    plain, callback = trainer(1 << 40)
    assert plain._train_batch_size == 24
    limit = highest(callback) // 7
    smaller, callback = trainer(limit)
    assert 1 < smaller._train_batch_size < 24
    assert smaller.state.global_step == 4
    assert highest(callback) <= limit
