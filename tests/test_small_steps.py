"""Rule 13 for steps of a few kilobytes, in which what lowtide itself allocates would show."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import lowtide
from instructions import exact_workspaces
from lowtide import engine
from lowtide.kernels import scratchpad, workspace
from lowtide.tape import generators

pytestmark = pytest.mark.usefixtures("one_thread")

_STATE = 5056
"""Bytes of the tensor from which torch's Python interface reads a CPU generator's state."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(),
        nn.Linear(32, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def run(share: float | None, steps: int = 4) -> tuple[list[int], list[Tensor | None]]:
    """Measured peaks of some steps, and the last gradients; the batch is drawn in the forward."""
    model = net()
    peak = 26136  # of the plain step
    limit = None if share is None else lowtide.budget(int(share * peak))
    peaks = []

    def step() -> None:
        if limit is None:
            loss = model(torch.randn(32, 8)).square().mean()
        else:
            with limit:
                loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()

    for _ in range(steps):
        model.zero_grad()
        peaks.append(lowtide.measure(step, device="cpu").peak_bytes)
    return peaks, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("share", [0.8, 0.9])
def test_random_states_do_not_take_a_small_step_over_its_limit(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a program without other threads: with them, a draw takes more in Python (rule 3)."""
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    plain, expected = run(None)
    peaks, found = run(share)
    assert max(peaks) <= int(share * max(plain))
    assert all(
        one is not None and two is not None and torch.equal(one, two)
        for one, two in zip(expected, found, strict=True)
    )


def test_a_random_state_is_read_and_put_back_without_an_allocation() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.randn(5, generator=generator)  # leaves a second normal number in the state
    expected = generator.get_state()

    def read_and_put_back() -> None:
        ((_, state),) = draws = generators.states_before((generator,), {}) or []
        torch.randn((), generator=generator)
        generators.put(generator, state)
        with generators.drawing(draws):
            pass

    peak = lowtide.measure(read_and_put_back, device="cpu").peak_bytes
    assert torch.equal(generator.get_state(), expected)
    # Python alone has to copy one into another through a tensor.
    assert peak <= (_STATE + 8 if engine.name() == "python" else 8)


def test_the_copy_of_a_state_draws_what_the_state_would() -> None:
    torch.manual_seed(1)
    torch.randn(3)
    ((generator, state),) = generators.states_before((torch.zeros(1),), {}) or []
    expected = torch.randn(7)
    after = torch.get_rng_state()
    with generators.drawing([(generator, state)]):
        assert torch.equal(torch.randn(7), expected)
    assert torch.equal(torch.get_rng_state(), after)


def first_step(model: nn.Module, batch: Tensor, limit: int) -> int:
    """The measured peak of a first step under a limit."""
    budget = lowtide.budget(limit)

    def step() -> None:
        with budget:
            loss = model(batch).square().mean()
        loss.backward()

    return lowtide.measure(step, device="cpu").peak_bytes


def of_convolutions(batch: int) -> tuple[nn.Module, Tensor]:
    """Convolutions of a few KiB, of which torch runs those of a single image itself."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(),
        nn.Conv2d(8, 8, 1), nn.Tanh(), nn.Conv2d(8, 2, 3, padding=1),
    ]  # fmt: skip
    return nn.Sequential(*layers), torch.randn(batch, 3, 8, 8)


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=exact_workspaces)])
@pytest.mark.parametrize("more", [0, 2])
def test_small_convolutions_fit_in_what_they_take(batch: int, more: int) -> None:
    """No scratchpad of oneDNN's is counted where none is taken: a limit is not refused for it."""
    model, images = of_convolutions(batch)
    plain = lowtide.measure(lambda: model(images).square().mean().backward(), device="cpu")
    model.zero_grad()
    limit = plain.peak_bytes + more * 1024
    assert first_step(model, images, limit) <= limit


def test_a_scratchpad_that_may_not_be_taken_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is not known, the largest one counts: values are dropped for it, but the step is
    refused only if it does not fit without it."""
    monkeypatch.setattr(scratchpad, "_on_each_thread", lambda *call: scratchpad.LARGEST)
    monkeypatch.setattr(workspace, "_known", {})
    model, images = of_convolutions(1)
    plain = lowtide.measure(lambda: model(images).square().mean().backward(), device="cpu")
    model.zero_grad()
    assert plain.peak_bytes < scratchpad.LARGEST
    assert first_step(model, images, plain.peak_bytes) <= plain.peak_bytes
    with pytest.raises(lowtide.BudgetError, match=r"another 20\.0 KiB"):
        first_step(model, images, plain.peak_bytes // 2)
