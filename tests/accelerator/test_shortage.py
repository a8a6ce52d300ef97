"""A device that is full before the limit is reached: something goes, and the operation runs again
(rules 10 and 13)."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from accelerator.test_bits import assert_same
from accelerator.test_limits import ConvNet as Normalized
from accelerator.test_limits import Transformer as Attending
from by_hand import counted_replays

ZERO = torch.device("emulated", 0)
PLENTY = 1 << 30


class Chained(nn.Module):
    """Segments, whose replays make more than one thing that backward will ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(24):
            x = (x * self.scale).tanh()
        return x

    @staticmethod
    def example() -> Tensor:
        return torch.randn(64, 64, device=ZERO)


compiled = pytest.mark.skipif(
    "lowtide.engine.name() != 'compiled'", reason="the recorder in Python records every step"
)
KINDS = [Normalized, Attending]
Around = Callable[[], Any]


@pytest.fixture(autouse=True)
def plenty(core: ModuleType) -> Iterator[None]:
    gc.collect()
    yield
    core.set_capacity(0, 2**62)


def of(kind: Any) -> Any:
    torch.manual_seed(1)
    return kind().to(ZERO)


def step(model: nn.Module, x: Tensor, limit: lowtide.Budget | None = None) -> Tensor:
    model.zero_grad(set_to_none=True)
    if limit is None:
        loss: Tensor = model(x).square().mean()
    else:
        with limit:
            loss = model(x).square().mean()
    loss.backward()
    return loss


def left_by(
    model: nn.Module, x: Tensor, limits: list[lowtide.Budget | None], *, seed: int | None = 5
) -> list[list[Tensor]]:
    """What each step leaves behind; without a seed, from where the generators stand."""
    if seed is not None:
        torch.manual_seed(seed)
    found = []
    for limit in limits:
        loss = step(model, x, limit)
        tensors = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
        tensors += [g.get_state() for g in torch.get_device_module("emulated").default_generators]
        found.append([tensor.detach().cpu().clone() for tensor in tensors])
        del loss
    return found


def room(core: ModuleType, model: nn.Module, x: Tensor, share: float) -> int:
    """Leave so much of a plain step's peak on the device; that peak."""
    step(model, x)
    model.zero_grad(set_to_none=True)
    peak = lowtide.measure(lambda: step(model, x), device=ZERO).peak_bytes
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.accelerator.synchronize()
    now = torch.accelerator.memory_stats()["allocated_bytes.all.current"]
    core.set_capacity(0, now + int(share * peak))
    return peak


def failures() -> int:
    return int(torch.accelerator.memory_stats()["num_ooms"])


@pytest.mark.parametrize("asked", [PLENTY, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_more_than_there_is(
    kind: Any, asked: int | float, core: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step runs out of memory in its forward, and goes on; the later ones are planned."""
    model, x = of(kind), kind.example()
    begun = copy.deepcopy(model.state_dict())
    plain = left_by(model, x, [None] * 4)
    model.load_state_dict(begun)
    peak = room(core, model, x, 0.7)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, x)
    model.load_state_dict(begun)
    limit = lowtide.budget(asked)
    before = failures()
    with counted_replays() as replayed, caplog.at_level(logging.WARNING, "lowtide"):
        found = left_by(model, x, [limit] * 2)
        assert failures() > before
        later = failures()
        found += left_by(model, x, [limit] * 2, seed=None)
    assert_same(found, plain)
    assert failures() == later  # planned for what there is
    assert replayed() > 0
    report = limit.report()
    assert report.planned
    assert report.limit is not None
    assert report.limit == PLENTY if asked == PLENTY else report.limit >= 0.95 * peak
    assert report.device_room is not None
    assert report.device_room < 0.8 * peak
    assert "the device had room for" in str(report)
    assert [r.message[:28] for r in caplog.records] == ["the device ran out of memory"]
    assert [r.name for r in caplog.records] == ["lowtide"]  # one logger for all of it


@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_step_for_which_less_is_left_than_before(kind: Any, core: ModuleType) -> None:
    """Somebody else takes memory in the middle of a training."""
    model, x = of(kind), kind.example()
    begun = copy.deepcopy(model.state_dict())
    plain = left_by(model, x, [None] * 8)
    model.load_state_dict(begun)
    limit = lowtide.budget(PLENTY)
    found = left_by(model, x, [limit] * 4)
    generators = [g.get_state() for g in torch.get_device_module("emulated").default_generators]
    state = copy.deepcopy(model.state_dict())
    room(core, model, x, 0.75)
    model.load_state_dict(state)
    for generator, kept in zip(
        torch.get_device_module("emulated").default_generators, generators, strict=True
    ):
        generator.set_state(kept)
    before = failures()
    found += left_by(model, x, [limit] * 4, seed=None)
    assert failures() > before
    assert_same(found, plain)
    assert limit.report().device_room is not None


def test_a_backward_that_fails_in_the_middle_of_a_context(core: ModuleType) -> None:
    """Of autograd's own kernels none runs again. The program goes on with the next batch, and what
    was found of the device is known at once."""
    model, x = of(Normalized), Normalized.example()
    limit, kernel = lowtide.budget(PLENTY), "aten::threshold_backward"
    with limit:
        for number in range(4):
            model.zero_grad(set_to_none=True)
            loss = model(x).square().mean()
            core.fail(kernel, int(number == 2))
            with contextlib.suppress(torch.OutOfMemoryError):
                loss.backward()
            core.fail(kernel, 0)
            assert (limit._loop.allowance.shortage.room is None) == (number <= 2)
    begun = copy.deepcopy(model.state_dict())
    plain = left_by(model, x, [None])
    model.load_state_dict(begun)
    assert_same(left_by(model, x, [limit]), plain)
    assert limit.report().device_room is not None


FAILING = [
    (Normalized, "aten::convolution"),
    (Normalized, "aten::native_batch_norm, late"),
    (Normalized, "aten::native_dropout, late"),
    (Attending, "aten::addmm, late"),
    (Attending, "aten::native_batch_norm"),  # by which a layer norm is computed there
    (Attending, "aten::native_dropout, late"),
]


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "planned"])
@pytest.mark.parametrize(("kind", "kernel"), FAILING)
def test_every_kernel_may_be_the_one_that_fails(
    kind: Any, kernel: str, watched: bool, core: ModuleType
) -> None:
    """Whatever it has moved before it failed is put back."""
    model, x = of(kind), kind.example()
    begun = copy.deepcopy(model.state_dict())
    limit = lowtide.budget(PLENTY)
    if not watched:
        room(core, model, x, 1.5)  # too little for a step that is not recorded
        for _ in range(8):
            step(model, x, limit)
        assert not limit.report().idle_steps
        model.load_state_dict(begun)
    plain = left_by(model, x, [None])
    model.load_state_dict(begun)
    failed = []

    def fail(*_: Any) -> None:
        before = failures()
        core.fail(kernel, 1)
        failed.append(lambda: failures() > before)

    handle = model[2].register_forward_pre_hook(fail)
    try:
        if (kind, kernel) == FAILING[1] and not watched:
            with pytest.raises(torch.OutOfMemoryError):  # its statistics may have moved
                left_by(model, x, [limit])
            return
        found = left_by(model, x, [limit])
    finally:
        handle.remove()
        core.fail(kernel, 0)
    assert_same(found, plain)
    assert failed[0]()


@compiled
@pytest.mark.parametrize("share", [1.5, 2.5])
def test_a_step_is_recorded_if_the_device_has_little_room(share: float, core: ModuleType) -> None:
    """What the limit allows is not all there; a step that is not recorded cannot make room."""
    model, x = of(Attending), Attending.example()
    limit = lowtide.budget(PLENTY)
    room(core, model, x, share)
    for _ in range(16):
        step(model, x, limit)
    assert (limit.report().idle_steps > 0) == (share > 2)


@compiled
def test_the_device_runs_out_in_a_step_that_is_not_recorded(core: ModuleType) -> None:
    """As in the plain step; the next one is recorded, and drops what it can."""
    model, x = of(Normalized), Normalized.example()
    limit = lowtide.budget(PLENTY)
    for _ in range(12):
        step(model, x, limit)
    before = limit.report().idle_steps
    room(core, model, x, 0.75)
    state = copy.deepcopy(model.state_dict())
    generators = torch.get_device_module("emulated").default_generators
    states = [generator.get_state() for generator in generators]
    with pytest.raises(torch.OutOfMemoryError):
        step(model, x, limit)
    assert limit.report().idle_steps == before + 1
    model.zero_grad(set_to_none=True)
    gc.collect()

    def again() -> None:
        model.load_state_dict(state)
        for generator, kept in zip(generators, states, strict=True):
            generator.set_state(kept)

    again()
    found = left_by(model, x, [limit] * 2, seed=None)
    assert limit.report().idle_steps == before + 1
    core.set_capacity(0, 2**62)
    again()
    assert_same(found, left_by(model, x, [None] * 2, seed=None))


@compiled
def test_the_device_runs_out_in_the_backward_of_such_a_step(core: ModuleType) -> None:
    model, x = of(Attending), Attending.example()
    limit = lowtide.budget(PLENTY)
    for _ in range(12):
        step(model, x, limit)
    model.zero_grad(set_to_none=True)
    with limit:
        loss = model(x).square().mean()
    idle = limit.report().idle_steps
    core.set_capacity(0, torch.accelerator.memory_stats()["allocated_bytes.all.current"])
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    gc.collect()
    core.set_capacity(0, 2**62)
    step(model, x, limit)
    assert limit.report().idle_steps == idle


def test_nothing_that_could_go(core: ModuleType) -> None:
    """It arrives as itself, and says what lowtide knows of it; the next step is right."""
    model, x = of(Attending), Attending.example()
    plain = left_by(model, x, [None])
    room(core, model, x, 0.05)
    limit = lowtide.budget(PLENTY)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        step(model, x, limit)
    assert any("the limit was not reached" in note for note in caught.value.__notes__)
    del caught
    core.set_capacity(0, 2**62)
    gc.collect()
    assert_same(left_by(model, x, [lowtide.budget(PLENTY)]), plain)


def test_without_a_limit_it_is_the_allocators_error_alone(core: ModuleType) -> None:
    model, x = of(Attending), Attending.example()
    room(core, model, x, 0.05)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        lowtide.checkpoint(model, x).square().mean().backward()
    assert not getattr(caught.value, "__notes__", [])
    del caught


def test_a_backward_that_ran_out_is_planned_for_less(core: ModuleType) -> None:
    """A loop that leaves out such a batch."""
    model, x = of(Attending), Attending.example()
    limit = lowtide.budget(PLENTY)
    for _ in range(4):
        step(model, x, limit)
    model.zero_grad(set_to_none=True)
    with limit:
        loss = model(x).square().mean()
    now = torch.accelerator.memory_stats()["allocated_bytes.all.current"]
    core.set_capacity(0, now)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    gc.collect()
    core.set_capacity(0, 2**62)
    planned = limit.report().planned_peak
    step(model, x, limit)
    report = limit.report()
    assert report.device_room is not None
    assert planned is not None
    assert report.planned_peak is not None
    assert report.planned_peak <= report.device_room < planned


def test_a_replay_that_runs_out(core: ModuleType) -> None:
    """What backward has made again before it asks for it goes, and is made once more. Where that is
    nothing yet, as at the first replay of some plans, the error arrives."""
    model, x = of(Chained), Chained.example()
    plain = left_by(model, x, [None])
    step(model, x)
    peak = lowtide.measure(lambda: step(model, x), device=ZERO).peak_bytes
    recovered = 0
    for number in range(1, 9):
        limit = lowtide.budget(int(0.24 * peak))
        for _ in range(4):
            step(model, x, limit)
        with counted_replays() as replayed:
            step(model, x, limit)
        undisturbed = replayed()
        if (found := _out_of_room_at(core, number, lambda: left_by(model, x, [limit]))) is None:  # noqa: B023
            gc.collect()
            continue
        left, again = found
        assert_same(left, plain)
        if limit.report().device_room is not None:
            recovered += 1
            assert again > undisturbed
    assert recovered


def _out_of_room_at(
    core: ModuleType, number: int, run: Callable[[], list[list[Tensor]]]
) -> tuple[list[list[Tensor]], int] | None:
    """What a run returns, and how much it replays, where the device is full in a replay; None if
    nothing can be let go of."""
    replays: list[int] = []

    def note(operations: list[Any]) -> None:
        replays.append(len(operations))
        if len(replays) == number:
            core.fail("aten::tanh", 1)  # nothing but a replay calls it in a backward

    lowtide.replay.listeners.append(note)
    try:
        with counted_replays() as replayed:
            return run(), replayed()
    except torch.OutOfMemoryError:
        return None
    finally:
        lowtide.replay.listeners.remove(note)
        core.fail("aten::tanh", 0)


def test_what_is_on_another_device_does_not_help(core: ModuleType) -> None:
    """A limit for one device is none of the other's business."""
    model = of(Attending)
    x = Attending.example().to("emulated:1")
    model.to("emulated:1")
    limit = lowtide.budget(PLENTY, device="emulated:0")
    core.set_capacity(1, 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(model, x, limit)
    core.set_capacity(1, 2**62)
    assert limit.report().device_room is None
    del caught
