"""Steps whose backward never runs, and what may measure after them.

An abandoned step (a loss that is NaN, an optimizer step that is skipped) is measured until it is
released; torch has one memory recorder per process, and the next step needs it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import counted, held
from by_hand import same
from lowtide import UsageError
from lowtide.memory.events import MemoryEvents
from lowtide.observing.names import Names

LIMIT = 0.7


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """A measurement ends because its step is known to be over, not because garbage was collected.

    The very first step of a process leaves garbage that holds its frames, and so its loss.
    """
    forward(blocks(), lowtide.budget(LIMIT)).backward()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def blocks(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32))
            for _ in range(4)
        ]
    )


X = torch.randn(256, 32)


def forward(model: nn.Module, budget: lowtide.Budget) -> Tensor:
    with budget:
        loss: Tensor = model(X).square().mean()
    return loss


def measured_peak(steps: int = 3) -> int | None:
    """The measured peak of a few whole steps of another model, under another budget."""
    model, budget = blocks(1), lowtide.budget(LIMIT)
    for _ in range(steps):
        forward(model, budget).backward()
        model.zero_grad()
    return budget.report().measured_peak


def one_step(model: nn.Module) -> None:
    model(X).square().mean().backward()


@pytest.mark.parametrize("times", [1, 3])
def test_a_step_without_a_backward_gives_way_to_another_budget(times: int) -> None:
    budget, model = lowtide.budget(LIMIT), blocks()
    for _ in range(times):
        forward(model, budget)
    assert measured_peak() is not None
    assert budget.report().steps == times  # keeps the budget alive


def test_a_step_without_a_backward_gives_way_to_a_measurement() -> None:
    model = blocks()
    expected = lowtide.measure(lambda: one_step(model), device="cpu").peak_bytes
    budget = lowtide.budget(LIMIT)
    forward(model, budget)
    model.zero_grad()
    assert lowtide.measure(lambda: one_step(model), device="cpu").peak_bytes == expected
    for _ in range(3):
        model.zero_grad()
        forward(model, budget).backward()
    assert budget.report().measured_peak is not None  # and it is measured again


@pytest.mark.parametrize("planned", [False, True])
def test_a_backward_that_failed_gives_way(planned: bool) -> None:
    """Its loss may stay alive, as in a notebook, and backward may be tried again."""
    model, twin, budget = blocks(), blocks(), lowtide.budget(LIMIT)
    for _ in range(4 if planned else 0):
        forward(model, budget).backward()
        model.zero_grad()
    loss = forward(model, budget)
    broken = model[1][0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    broken.remove()
    assert measured_peak() is not None
    assert lowtide.measure(lambda: one_step(blocks(1)), device="cpu").peak_bytes > 0
    model.zero_grad()
    loss.backward()
    twin(X).square().mean().backward()
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert plain.grad is not None
        assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("fails", [True, False])
def test_a_second_backward_that_fails_or_asks_for_a_report(fails: bool) -> None:
    """A step is not learned from while its second backward runs, nor if that has failed, although
    the first one has ended. `fails`: it raises an error, which the program catches (rule 10)."""
    budget = lowtide.budget(LIMIT)

    def hook(_: Tensor) -> None:
        if fails:
            raise ArithmeticError
        budget.report()

    measured = []

    def trained(model: nn.Sequential, around: Any) -> list[Tensor]:
        left = []
        for step in range(5):
            measured.append(budget.report().measured_steps)
            model.zero_grad()
            with around:
                loss = model(X).square().mean()
            loss.backward(retain_graph=step < 2)
            if step < 2:
                broken = model[1][0].weight.register_hook(hook)
                with suppress(ArithmeticError):
                    loss.backward()
                broken.remove()
            left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return left

    expected = trained(blocks(), nullcontext())
    with counted() as replayed:
        found = trained(blocks(), budget)
    assert same(found, expected)
    held(budget, planned=True)
    assert replayed["addmm"] + replayed["gelu"]
    assert fails or measured[5:8] == [0, 1, 2]  # the first two were measured whole


def test_a_budget_that_began_meanwhile_is_measured_all_the_same() -> None:
    first, second = lowtide.budget(LIMIT), lowtide.budget(LIMIT)
    model, other = blocks(), blocks(1)
    dropped = forward(model, first)
    loss = forward(other, second)  # while the first is measured, as its backward is still to come
    del dropped
    loss.backward()
    del loss
    forward(other, second).backward()
    assert second.report().measured_peak is not None
    assert second.report().planned


@pytest.mark.parametrize("beside", [False, True])
def test_a_second_backward_after_the_recording_has_ended(beside: bool) -> None:
    """Of a step whose recording ended between two backwards only a part is known, which is no
    measurement. `beside`: the recording was that of another budget's step."""
    first, second = lowtide.budget(LIMIT), lowtide.budget(LIMIT)
    other, model, twin = blocks(1), blocks(), blocks()
    for _ in range(3):
        open_one = forward(other, first) if beside else None
        loss = forward(model, second)
        loss.backward(retain_graph=True)
        if open_one is not None:
            open_one.backward()
        assert lowtide.measure(lambda: None, device="cpu").peak_bytes == 0
        loss.backward()
        plain = twin(X).square().mean()
        plain.backward(retain_graph=True)
        plain.backward()
    grads = [[p.grad for p in net.parameters()] for net in (model, twin)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))
    report = second.report()
    assert report.measured_steps == 0
    assert report.measured_peak is None


def test_a_step_between_its_forward_and_its_backward_is_not_over() -> None:
    budget, model = lowtide.budget(LIMIT), blocks()
    for _ in range(2):  # these are measured; later ones follow the plan
        loss = forward(model, budget)
        with pytest.raises(UsageError, match="run its backward first, or let go of its loss"):
            lowtide.measure(lambda: None, device="cpu")
        loss.backward()
        model.zero_grad()
    assert budget.report().measured_peak is not None


def test_two_steps_that_are_open_at_once_are_measured_both() -> None:
    budgets, models = [lowtide.budget(LIMIT) for _ in range(2)], [blocks(), blocks(1)]
    for _ in range(3):
        losses = [forward(m, b) for m, b in zip(models, budgets, strict=True)]
        for loss in losses:
            loss.backward()
        del loss, losses
    assert None not in [budget.report().measured_peak for budget in budgets]


def test_nothing_gives_way_inside_the_forward() -> None:
    budget, model = lowtide.budget(LIMIT), blocks()
    for _ in range(2):
        with budget:
            with pytest.raises(UsageError, match="already records memory events"):
                lowtide.measure(lambda: None, device="cpu")  # before anything was saved
            loss = model(X).square().mean()
        loss.backward()
        model.zero_grad()
    assert budget.report().measured_peak is not None


def in_a_backward(function: Callable[[], object]) -> None:
    """Call a function from a gradient's hook."""
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda gradient: function() and None)
    y.sum().backward()


@pytest.mark.parametrize("ended", [True, False])
def test_nothing_gives_way_inside_a_backward(ended: bool) -> None:
    # What is stopped in a backward is on again after it, and nothing could measure any more.
    budget, refused = lowtide.budget(LIMIT), []
    loss = forward(blocks(), budget)
    if ended:
        loss.backward()
    del loss

    def refuse() -> None:
        with pytest.raises(UsageError, match="cannot end inside of this backward") as caught:
            lowtide.measure(lambda: None, device="cpu")
        refused.append(caught)

    in_a_backward(refuse)
    assert len(refused) == 1
    assert lowtide.measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


def test_a_recording_stopped_inside_a_backward_is_void() -> None:
    events, results = MemoryEvents(), []
    assert events.start()
    in_a_backward(lambda: results.append((events.stop(), MemoryEvents().start())))
    assert results == [(None, False)]
    assert events.obstacle == "the recording was stopped inside of a backward"
    assert lowtide.measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


def test_a_measurement_inside_a_backward() -> None:
    peaks = []

    def measure() -> None:
        peaks.append(lowtide.measure(lambda: torch.zeros(256), device="cpu").peak_bytes)

    measure()  # after this no profiler is on
    in_a_backward(measure)
    measure()
    assert peaks == [1024, 1024, 1024]


def test_a_step_ends_while_another_thread_frees_memory() -> None:
    """Device threads free a graph at any time, so the table may change meanwhile."""
    names, kept = Names(), [torch.zeros(4).untyped_storage() for _ in range(3)]

    class Entry:
        key, counted = 0, 16

        def __init__(self, storage: Any) -> None:
            self.storage = storage

        def __call__(self) -> Any:
            names.table.pop(2, None)  # as if a storage were freed on another thread
            return self.storage

    names.table = {place: Entry(storage) for place, storage in enumerate(kept)}  # type: ignore[misc]
    names.forward_ends()


def test_an_error_as_the_forward_ends_leaves_no_recording_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step runs as if nothing had happened (rule 10)."""
    model, budget = blocks(), lowtide.budget(LIMIT)
    with monkeypatch.context() as patched:

        def fails(self: Names) -> None:
            raise RuntimeError("as the forward ends")

        patched.setattr(Names, "forward_ends", fails)
        with pytest.raises(RuntimeError, match="as the forward ends"):
            forward(model, budget)
    forward(model, budget).backward()
