"""Accelerate with a fitted model: nothing but `lowtide.fit` is needed.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from once import on_one_recorder

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import find_executable_batch_size

pytestmark = on_one_recorder  # as the other frameworks

LIMIT = 0.7


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.inside(self.norm(x)))
        return out


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Part(), Part(), Part(), nn.Linear(16, 1))


def no_fit(model: nn.Module) -> None:
    pass


def train(
    precision: str, before: Callable[[nn.Module], Any], after: Callable[[nn.Module], Any]
) -> list[Tensor]:
    """Three updates of two micro-steps each; returns every loss, and the state at the end."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(6 * 64, 16, generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    before(model)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    after(wrapped)
    torch.manual_seed(1)
    left = []
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = wrapped(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        left.append(loss.detach())
    plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    return [*left, *(t.clone() for t in plain.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loop(precision: str, when: str, replayed: Callable[[], int]) -> None:
    """Accumulation, clipping and autocast, with the budget given before or after `prepare`."""
    expected = train(precision, no_fit, no_fit)

    def fitted(model: nn.Module) -> None:
        lowtide.fit(model, LIMIT)

    assert replayed() == 0
    found = train(precision, *((fitted, no_fit) if when == "before" else (no_fit, fitted)))
    assert replayed() > 0
    assert same(found, expected)


def test_an_unwrapped_model_keeps_its_budget(replayed: Callable[[], int]) -> None:
    model = net()
    budget = lowtide.fit(model, LIMIT)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    unwrapped = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    assert unwrapped is model
    for _ in range(2):
        model(torch.randn(64, 16)).square().mean().backward()
    assert replayed() > 0
    assert budget.report().steps == 2
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each(torch.randn(64, 16)).square().mean().backward()
    assert budget.report().steps == 2  # a copy is a plain model (rule 11)
    budget.remove()
    before = replayed()
    model(torch.randn(64, 16)).square().mean().backward()
    assert replayed() == before


def test_regions_under_accelerate(replayed: Callable[[], int]) -> None:
    expected = train("bf16", no_fit, no_fit)
    found = train("bf16", lambda model: lowtide.checkpoint_modules(model, Part), no_fit)
    assert replayed() > 0
    assert same(found, expected)


@pytest.mark.usefixtures("one_thread")
def test_a_batch_that_is_refused_is_made_smaller() -> None:
    """It is known by what the error says."""
    peaks: dict[int, int] = {}
    model = net()

    def training(batch_size: int, limit: int) -> int:
        peaks[batch_size], x = 0, torch.randn(batch_size, 16)

        def step() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        with lowtide.fit(model, limit):
            for _ in range(4):
                peak = lowtide.measure(step, device="cpu").peak_bytes
                peaks[batch_size] = max(peaks[batch_size], peak)
        return batch_size

    training(64, 1 << 40)
    limit = int(0.8 * peaks.pop(64))
    search = find_executable_batch_size(training, starting_batch_size=256)
    found = search(limit)  # type: ignore[call-arg]
    assert 64 < found < 256
    assert found == min(peaks)
    assert len(peaks) > 2
    assert peaks[found] <= limit
