"""Steps whose parts run on another device, at another current device, or on the CPU beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from by_hand import counted_replays, same
from lowtide import engine
from lowtide.tape.recorder import Recorder

ZERO, ONE = "emulated:0", "emulated:1"
Program = Callable[..., Tensor]


def leaf(device: str = ZERO, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(64, 64, device=device).requires_grad_()


def gradients(program: Program, *leaves: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    for x in leaves:
        x.grad = None
    program(*leaves).sum().backward()
    for index in range(2):
        torch.accelerator.synchronize(index)
    return [x.grad.cpu().clone() for x in leaves if x.grad is not None]


def assert_same(program: Program, *leaves: Tensor) -> None:
    """The gradients of the plain step, with operations that were replayed for them."""
    plain = gradients(program, *leaves)
    with counted_replays() as replayed:
        for _ in range(2):
            found = gradients(lambda *x: lowtide.checkpoint(program, *x), *leaves)
            assert same(found, plain)
    assert replayed() > 0


def test_what_names_no_index_is_made_again_on_the_device_that_was_current() -> None:
    """Autograd asks for it on a thread that is at another one."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.accelerator.device_index(1):
            noise = torch.rand(64, 64, device="emulated")
            ramp = torch.ones(64, 64, device="emulated").cumsum(0) / 64
            y = (w * noise * ramp + torch.full((64, 64), 0.5, device="emulated")).sin()
        return (x * y.to(ZERO)).exp().sin()

    assert_same(program, leaf(), leaf(ONE, 1))


def test_noise_like_a_tensor_elsewhere() -> None:
    """It is drawn from the generator of the device that is named, not of the tensor's."""

    def on_the_device(x: Tensor) -> Tensor:
        return (x * torch.rand_like(torch.zeros(64, 64), device=ZERO)).sin().exp()

    def on_the_cpu(x: Tensor) -> Tensor:
        return (x * torch.rand_like(x, device="cpu").to(ZERO)).sin().exp()

    assert_same(on_the_device, leaf())
    assert_same(on_the_cpu, leaf())


@pytest.mark.skipif(engine.name() != "compiled", reason="the Python recorder runs in Python")
def test_draws_on_a_device_are_recorded_and_made_again_without_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of a transformer's operations draw: each took longer than all others together."""
    in_python: list[str] = []

    def note(recorder: Recorder, facts: Any, *call: Any) -> Any:
        in_python.append(facts.name)
        return recorded(recorder, facts, *call)

    recorded = Recorder._run_recorded
    monkeypatch.setattr(Recorder, "_run_recorded", note)

    def program(x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(x.sin(), 0.3) * torch.empty_like(x).bernoulli_(0.5)
        return (y + torch.randn_like(y)).exp().sin()

    assert_same(program, leaf())
    assert in_python == []
    own = torch.Generator(ZERO)
    assert_same(
        lambda x: (x * x.detach().clone().normal_(generator=own.manual_seed(1))).exp(), leaf()
    )
    assert in_python  # a generator of one's own is looked at there


def test_two_threads_replay_draws_from_one_generator() -> None:
    """A region on each device, both of which draw on the CPU: each draws from its own states."""

    def part(x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x * torch.rand(64, 64).to(x.device)).sin()
        return x

    def program(x: Tensor, w: Tensor, call: Any = lambda part, x: part(x)) -> Tensor:
        for _ in range(3):
            x, w = call(part, x), call(part, w)
        return x + w.to(ZERO)

    leaves = leaf(), leaf(ONE, 1)
    plain = gradients(program, *leaves)
    for _ in range(20):
        found = gradients(lambda *x: program(*x, lowtide.checkpoint), *leaves)
        assert same(found, plain)


@pytest.mark.parametrize("buffered", [False, True])
def test_a_copy_to_the_cpu_that_the_program_has_waited_for(buffered: bool) -> None:
    """A replay does not run the program's wait: what reads the copy finds it there all the same."""

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        if buffered:
            copied = torch.empty(64, 64).copy_(y, non_blocking=True)
        else:
            copied = y.to("cpu", non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        return (copied.exp().tanh().to(ZERO) * y).cos() * y

    assert_same(program, leaf())


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream")  # of torch, plain too
def test_a_value_that_went_to_another_device(core: ModuleType) -> None:
    """What was copied there is read on a side stream, and copied back from one."""
    side = torch.Stream(ONE)

    def program(x: Tensor, w: Tensor) -> Tensor:
        there = torch.accelerator.current_stream(torch.device(ONE))
        y = x.sin()
        side.wait_stream(there)
        with side:
            z = y.to(ONE) * w
            z = z.exp().sin() * z
        there.wait_stream(side)
        z.record_stream(there)
        q = (z * w).cos()
        side.wait_stream(there)
        q.record_stream(side)
        with side:
            q = (q * z).sin()
        there.wait_stream(side)
        q.record_stream(there)
        return (q * w).to(ZERO) * y

    assert_same(program, leaf(), leaf(ONE, 1))
    assert sorted(set(core.races())) == []
