"""Several streams of an accelerator: nothing is read or written that another one still uses (rule
14).

The device writes down every access that no wait has ordered after a conflicting one, also where
memory was freed and handed on in between; see `device.cpp`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from by_hand import counted_replays

DEVICE = "emulated:0"
STREAMS: list[Any] = []
SEEDS = int(os.environ.get("LOWTIDE_SEEDS", "12"))  # of the programs that are drawn
Program = Callable[[Tensor], Tensor]


@pytest.fixture
def side() -> Any:
    return streams()[1]


def streams() -> list[Any]:
    if not STREAMS:
        STREAMS.append(torch.accelerator.current_stream(torch.device(DEVICE)))
        STREAMS.extend(torch.Stream(DEVICE) for _ in range(2))
    return STREAMS


def leaf() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 64, device=DEVICE).requires_grad_()


def gradient(run: Callable[[], Tensor], x: Tensor) -> Tensor:
    x.grad = None
    loss = run()
    loss.backward()
    del loss
    torch.accelerator.synchronize()
    assert x.grad is not None
    return x.grad.cpu().clone()


def ways(program: Program, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    limit = lowtide.budget(0.7)

    def in_a_budget() -> Tensor:
        with limit:
            return program(x).sum()

    return {"region": lambda: lowtide.checkpoint(program, x).sum(), "budget": in_a_budget}


def check(program: Program, core: ModuleType) -> int:
    """Bits and races of a program in every way; how many operations were replayed."""
    x = leaf()
    plain = gradient(lambda: program(x).sum(), x)
    assert core.races() == []
    with counted_replays() as replayed:
        for name, run in ways(program, x).items():
            for _ in range(3):
                try:
                    assert torch.equal(gradient(run, x), plain), name
                except lowtide.BudgetError:
                    break
                assert sorted(set(core.races())) == [], name
    return replayed()


def test_the_device_sees_a_race(side: Any, core: ModuleType) -> None:
    """The test tests something."""
    x = leaf().detach()
    with side:
        x * 2
    assert "reads what is being written on stream" in core.races()[0]
    torch.accelerator.synchronize()
    y = x * 2
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        z = y * 2
    del y
    x * 3  # gets the memory of y, which the other stream may not have read
    assert any("writes what is being read on stream" in race for race in core.races())
    torch.accelerator.synchronize()
    del z


def test_what_the_forward_lets_go_of_is_read_elsewhere(side: Any, core: ModuleType) -> None:
    """Autograd would hold `y` until backward, so that nobody has to tell the allocator."""

    def program(x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        y = x.sin()
        side.wait_stream(current)
        with side:
            z = y * y
        del y
        w = x.cos() * x
        w = w * w.exp()
        current.wait_stream(side)
        z.record_stream(current)
        return (z * w).exp()

    assert check(program, core)


def test_what_is_made_again_on_another_stream(side: Any, core: ModuleType) -> None:
    """A backward on one stream asks for what a chain on the other makes."""

    def program(x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        y = x.sin().exp().cos()
        side.wait_stream(current)
        with side:
            z = (y * y).tanh()
            z = z * z.sigmoid() * y
        current.wait_stream(side)
        y.record_stream(side)
        z.record_stream(current)
        w = y.exp() * z.cos()
        return w * w.sin()

    assert check(program, core)


@torch.library.custom_op("lowtide_streams::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("kind", ["custom", "list", "in place"])
def test_what_nobody_records_reads_elsewhere(kind: str, side: Any, core: ModuleType) -> None:
    """A kernel of the program's own is a reader like any other."""

    def program(x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        y = x.sin()
        w = y.cos()  # autograd has saved it, so that in a plain step it stays
        side.wait_stream(current)
        with side, torch.no_grad():
            if kind == "custom":
                z = doubled(y)
            elif kind == "list":
                z = doubled(torch.stack([y, y]))[0]
            else:
                z = torch.empty_like(y).set_(torch.zeros_like(y)).copy_(y)
        del y
        w = w * w.exp()
        w = w * w.exp()
        current.wait_stream(side)
        z.record_stream(current)
        return (z * w).exp()

    assert check(program, core)


def test_record_stream_is_no_write(side: Any) -> None:
    """What is only told to the allocator is made again like anything else."""

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        y.record_stream(side)
        return y.exp().cos()

    x = leaf()
    with counted_replays() as replayed:
        lowtide.checkpoint(program, x).sum().backward()
    assert replayed() >= 2


def test_lists_of_tensors_have_a_stream(side: Any, core: ModuleType) -> None:
    """`cat` and `stack` read no tensor but those in a list."""

    def program(x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        side.wait_stream(current)
        with side:
            y = torch.cat([x, x]).sin()
            z = torch.stack([y, y]).sigmoid()
            z = z[0] * z[1]
        current.wait_stream(side)
        y.record_stream(current)
        z.record_stream(current)
        w = y.cos() * z
        del y, z
        return w.exp() * w

    x = leaf()
    streams_of: list[Any] = []

    def note(operations: list[Any]) -> None:
        streams_of.extend(op.stream for op in operations if op.facts.name in ("aten::cat",))

    lowtide.replay.listeners.append(note)
    try:
        assert check(program, core)
        lowtide.checkpoint(program, x).sum().backward()
    finally:
        lowtide.replay.listeners.remove(note)
    assert streams_of
    assert all(stream == side for stream in streams_of)


def test_a_factory_has_a_stream(side: Any) -> None:
    """Memory that is made again belongs to the stream that it was made on."""

    def program(x: Tensor) -> Tensor:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            noise = torch.rand(64, 64, device=DEVICE)
            y = (x * noise).sin().exp()
        torch.accelerator.current_stream().wait_stream(side)
        y.record_stream(torch.accelerator.current_stream())
        return y.cos()

    found: list[Any] = []

    def note(operations: list[Any]) -> None:
        found.extend(op.stream for op in operations if op.facts.name == "aten::rand")

    lowtide.replay.listeners.append(note)
    try:
        lowtide.checkpoint(program, leaf()).sum().backward()
    finally:
        lowtide.replay.listeners.remove(note)
    assert found
    assert all(stream == side for stream in found)


def test_what_was_made_outside_goes_after_a_replay_has_read_it(side: Any, core: ModuleType) -> None:
    """The program lets go of it as soon as its forward has read it, and orders that; a replay reads
    it later."""

    def in_the_region(x: Tensor, made: list[Tensor]) -> Tensor:
        y = (x * 2 + made.pop()).sin()
        side.wait_stream(torch.accelerator.current_stream())
        return y.exp() * y

    class Next(torch.autograd.Function):
        """The next batch is loaded while backward runs."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with side:
                LOADED[:] = [torch.full((64, 64), 3.0, device=DEVICE)]
            return grad.clone()

    def run(call: Callable[..., Tensor]) -> Tensor:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            made = [torch.arange(64.0 * 64, device=DEVICE).view(64, 64)]
        torch.accelerator.current_stream().wait_stream(side)
        return call(in_the_region, Next.apply(x), made).sum()

    x = leaf()
    plain = gradient(lambda: run(lambda f, *a: f(*a)), x)
    assert core.races() == []
    with counted_replays() as replayed:
        assert torch.equal(gradient(lambda: run(lowtide.checkpoint), x), plain)
    assert replayed() > 0
    LOADED.clear()


LOADED: list[Tensor] = []


def test_an_external_that_is_overwritten_on_another_stream(side: Any, core: ModuleType) -> None:
    """The old content is copied there, before the write: a replay waits for that."""
    read = torch.ones(64, 64, device=DEVICE)

    def program(x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        y = (x * 2 + read).sin()
        side.wait_stream(current)
        with side:
            read.add_(1)
        return y.exp() * y

    x = leaf()
    plain = gradient(lambda: program(x).sum(), x)
    assert core.races() == []
    side.synchronize()  # torch 2.10 waits for the current stream only
    read.fill_(1)
    torch.accelerator.synchronize()
    with counted_replays() as replayed:
        assert torch.equal(gradient(lambda: lowtide.checkpoint(program, x).sum(), x), plain)
    assert replayed() > 0


def drawn(seed: int) -> Program:
    """A program that nobody would write by hand, ordered as torch asks for it."""
    choose = random.Random(seed)
    count = choose.randint(4, 14)
    steps = []
    for number in range(count):
        inputs = [choose.randrange(number + 1) for _ in range(2)]
        steps.append((choose.randrange(3), inputs, choose.randrange(4), choose.random() < 0.7))
    dropped = [choose.random() < 0.4 for _ in range(count)]

    def program(x: Tensor) -> Tensor:
        lanes, values = streams(), [(0, x)]
        for number, (lane, inputs, kind, told) in enumerate(steps):
            stream = lanes[lane]
            read = [values[i] for i in inputs]
            for home, tensor in read:
                if home != lane:
                    stream.wait_stream(lanes[home])
                    if told:
                        tensor.record_stream(stream)
            with stream:
                (_, a), (_, b) = read
                made = (a * b, (a + b).tanh(), a.sin() * b.cos(), (a * 0.5).sigmoid() - b)[kind]
                values.append((lane, made))
            if dropped[number] and number > 1:
                values[number] = values[0]
        total = x
        for home, tensor in values[1:]:
            lanes[0].wait_stream(lanes[home])
            tensor.record_stream(lanes[0])
            total = total + tensor.tanh()
        return total

    return program


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of torch, plain too
def test_programs_that_nobody_would_write(core: ModuleType) -> None:
    """Those of which the plain step has no race."""
    sound = replays = 0
    for seed in range(SEEDS):
        program, x = drawn(seed), leaf()
        for _ in range(2):
            gradient(lambda program=program, x=x: program(x).sum(), x)
        if core.races():
            continue
        sound += 1
        replays += check(program, core)
    assert sound > SEEDS // 4
    assert replays > SEEDS
