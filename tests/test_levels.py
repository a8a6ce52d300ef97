"""What each level switches on (rules 1, 9, 11)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from by_hand import Transformer, counted_replays, same
from lowtide.errors import UsageError
from lowtide.levels import Levels, checkpoint_levels, find_levels
from lowtide.measure import measure
from lowtide.modules import is_checkpointed


def test_every_level_up_to_the_one_asked_for() -> None:
    model = Transformer()
    layers = [f"encoder.layers.{n}" for n in range(3)]
    blocks = {f"{n}.{part}" for n in layers for part in ("attention", "mlp")}
    outside = {"encoder.norm", "head"}
    norms = {f"{n}.norm{k}" for n in layers for k in (1, 2)}
    assert set(checkpoint_levels(model, 2).names) == blocks | norms | outside
    with pytest.raises(UsageError, match="already checkpointed by lowtide"):
        checkpoint_levels(model, 3)
    model = Transformer()
    with checkpoint_levels(model, 3) as handle:
        assert set(handle.names) == {*layers} | blocks | outside
    with checkpoint_levels(model, 4) as handle:
        assert set(handle.names) == {*layers} | blocks | outside
    with checkpoint_levels(model, 5) as handle:
        assert set(handle.names) == {"encoder", *layers} | blocks | {"head"}
    with checkpoint_levels(model, 5, nested=False) as handle:
        assert set(handle.names) == {"encoder", "head"}
    assert not any(is_checkpointed(module) for module in model.modules())


def test_level_0_is_off() -> None:
    model = Transformer()
    handle = checkpoint_levels(model, 0)
    assert handle.names == ()
    assert "level 0, nothing is checkpointed" in handle.describe()
    assert repr(handle) == "<lowtide.CheckpointedModules: 0 modules checkpointed>"
    handle.remove()


def peak_and_replays(
    model: nn.Module, level: int, *, nested: bool = True
) -> tuple[int, int, list[Tensor]]:
    def step() -> None:
        model.zero_grad()
        torch.manual_seed(1)
        model(torch.randint(0, 11, (4, 48))).square().mean().backward()

    with checkpoint_levels(model, level, nested=nested):
        step()
        with counted_replays() as count:
            peak = measure(step, device="cpu").peak_bytes
    return peak, count(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_higher_level_takes_less_memory_and_more_work() -> None:
    """Rules 1 and 9: the bits stay; nested regions free their insides during a replay."""
    torch.manual_seed(0)
    model = Transformer(depth=4, width=32)
    results = [peak_and_replays(model, level) for level in range(6)]
    peaks = [peak for peak, _, _ in results]
    work = [count for _, count, _ in results]
    for _, _, gradients in results:
        assert same(gradients, results[0][2])
    assert peaks == sorted(peaks, reverse=True)
    assert work == sorted(work)
    assert peaks[3] < 0.5 * peaks[0]
    assert work[0] == 0
    assert work[5] > work[3] > work[2] > 0


class ConvNorm(nn.Sequential):
    def __init__(self, inputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


class Stacks(nn.Module):
    """Most of the memory is in one block, at full resolution."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*(ConvNorm(8 if at else 3) for at in range(layers)))
        self.tail = nn.Sequential(*(ConvNorm(8) for _ in range(layers)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(self.stem(x), 4)
        out: Tensor = self.head(self.tail(x).mean((2, 3)))
        return out


class Cells(nn.Module):
    """A small block of two recurrent cells, which is one call for the whole sequence."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 32)
            steps = []
            for at in range(x.shape[1]):
                state = self.cell(x[:, at], state)
                steps.append(self.out(state))
            return torch.stack(steps, 1)

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Cells.Block(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x))
        return out


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: Stacks(4), (2, 3, 32, 32)),  # the stem is a small block
        (lambda: Stacks(10), (2, 3, 32, 32)),  # a stage
        (Cells, (16, 30, 8)),
    ],
)
def test_no_level_takes_more_than_the_one_before(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Layers that save more than their input stay regions while a block of them is replayed."""
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    peaks, gradients = [], []
    for level in range(6):
        with checkpoint_levels(model, level):
            step()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            peaks.append(measure(step, device="cpu").peak_bytes)
    assert all(later <= before * 1.01 for before, later in itertools.pairwise(peaks)), peaks
    assert peaks[1] < 0.85 * peaks[0]
    assert all(same(found, gradients[0]) for found in gradients)


def test_only_the_largest_regions_recompute_each_operation_once() -> None:
    torch.manual_seed(0)
    model = Transformer(depth=4, width=32)
    peak, work, _ = peak_and_replays(model, 5)
    flat_peak, flat_work, _ = peak_and_replays(model, 5, nested=False)
    assert flat_work < work
    assert flat_peak > peak


def test_the_description_says_what_and_why() -> None:
    model = Transformer()
    handle = checkpoint_levels(model, 3)
    text = handle.describe()
    assert text.splitlines()[0] == "Transformer, level 3: 11 modules checkpointed"
    assert (
        "  3 transformer layers, decoder blocks: 3\n"
        "    encoder.layers.0 to encoder.layers.2 (3)  Layer  (one small block and layers)"
    ) in text
    assert "  4 stages: none" not in text
    whole = find_levels(model).describe()
    assert whole.startswith("Transformer, by level:\n  1 single layers: ")
    assert "  4 stages: none" in whole
    assert "by its name a whole encoder or decoder" in whole
    assert str(find_levels(model)) == whole


def test_levels_are_values() -> None:
    levels = find_levels(Transformer())
    assert levels == find_levels(Transformer())
    assert hash(levels) == hash(find_levels(Transformer()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        levels.choices = ()  # type: ignore[misc]
    assert isinstance(levels, Levels)


@pytest.mark.parametrize("level", [-1, 6])
def test_a_level_out_of_range(level: int) -> None:
    with pytest.raises(UsageError, match=f"level is {level}, outside 0 to 5"):
        checkpoint_levels(Transformer(), level)


def test_a_level_from_numpy() -> None:
    handle = checkpoint_levels(Transformer(), np.int64(2))  # type: ignore[arg-type]
    assert handle.names == checkpoint_levels(Transformer(), 2).names


@pytest.mark.parametrize("level", [True, 2.0, "3", None])
def test_a_level_of_the_wrong_type(level: Any) -> None:
    with pytest.raises(UsageError, match="level is a whole number from 0 to 5"):
        checkpoint_levels(Transformer(), level)


@pytest.mark.parametrize("nested", ["no", 0, None])
def test_nested_is_a_bool(nested: Any) -> None:
    with pytest.raises(UsageError, match="nested is True or False"):
        checkpoint_levels(Transformer(), 2, nested=nested)


def test_one_module_is_one_module() -> None:
    assert "level 2: 1 module checkpointed" in checkpoint_levels(nn.Linear(4, 4), 2).describe()


@pytest.mark.parametrize("level", [0, 2])
def test_a_bad_policy_is_refused_at_every_level(level: int) -> None:
    with pytest.raises(UsageError, match="checkpoint_levels: policy must be callable"):
        checkpoint_levels(Transformer(), level, policy="KeepProducts")


@pytest.mark.parametrize("model", [nn.Module(), nn.ReLU(), nn.Sequential(), nn.ModuleList()])
def test_a_model_without_layers(model: nn.Module) -> None:
    assert find_levels(model).choices == ()
    with pytest.raises(UsageError, match="it has no layer with parameters"):
        checkpoint_levels(model, 5)


def test_a_model_checkpointed_by_its_own_flag() -> None:
    model = Transformer()
    model.encoder.use_checkpoint = True  # type: ignore[assignment]
    with pytest.raises(UsageError, match="checkpoint_levels: this Transformer is already check"):
        checkpoint_levels(model, 3)


def test_not_a_module() -> None:
    with pytest.raises(UsageError, match=r"checkpoint_levels takes a torch\.nn.Module, not str"):
        checkpoint_levels("model", 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"find_levels takes a torch\.nn.Module, not str"):
        find_levels("model")  # type: ignore[arg-type]
