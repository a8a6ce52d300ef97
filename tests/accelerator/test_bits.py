"""On an accelerator: the bits of the plain step, on whatever thread and stream (rules 1 and 3)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import counted_replays

DEVICE = "emulated:0"
STEPS = 3
Step = Callable[[nn.Module, Tensor], Tensor]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.Dropout(0.3)
                )
                for _ in range(4)
            )
        )
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x).flatten(1))
        return out

    @staticmethod
    def example() -> Tensor:
        return torch.randn(4, 8, 8, 8, device=DEVICE)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out

    @staticmethod
    def example() -> Tensor:
        return torch.randn(4, 12, 16, device=DEVICE)


class Recurrent(nn.Module):
    """Noise from a generator of its own, values and tensors of the CPU, an index, an item."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.cell = nn.Linear(48, 24)
        self.wide = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24))
        self.drawn: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator(device=DEVICE)
        generator.manual_seed(3)
        self.drawn = generator
        state = torch.zeros(x.shape[0], 24, device=DEVICE)
        for place in range(x.shape[1]):
            noise = torch.randn(state.shape, device=DEVICE, generator=generator)
            both = torch.cat([self.embed(x[:, place]), state + 0.1 * noise], 1)
            state = self.wide(self.cell(both).tanh())
            state = state * torch.rand(24).to(DEVICE) + torch.bernoulli(torch.full_like(state, 0.5))
            if state.sum().item() > 1e9:
                state = state * 0
        return state

    @staticmethod
    def example() -> Tensor:
        return torch.randint(50, (64, 5), device=DEVICE)


class TwoStreams(nn.Module):
    """Two branches, one of them on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
        self.two = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32))
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        current, side = torch.accelerator.current_stream(), SIDE[0]
        shared = x.sin()
        side.wait_stream(current)
        with side:
            two = self.two(shared * 2)
            two = two * two.sigmoid()
        one = self.one(shared.cos())
        current.wait_stream(side)
        shared.record_stream(side)
        two.record_stream(current)
        out: Tensor = self.head(one * two)
        return out

    @staticmethod
    def example() -> Tensor:
        return torch.randn(64, 32, device=DEVICE)


class TwoDevices(nn.Module):
    """Branches on two devices, whose backward runs on two threads at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleList(block() for _ in range(3))
        self.two = nn.ModuleList(block() for _ in range(3))

    def to(self, *args: Any, **kwargs: Any) -> Any:  # as a model that was spread is moved no more
        self.one.to("emulated:0")
        self.two.to("emulated:1")
        return self

    def forward(self, x: Tensor) -> Tensor:
        left, right = x, x.to("emulated:1")
        for one, two in zip(self.one, self.two, strict=True):
            left, right = one(left), two(right)
        return left + right.to("emulated:0")

    @staticmethod
    def example() -> Tensor:
        return torch.randn(32, 32, device=DEVICE)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))


@lowtide.replayable
class Fused(torch.autograd.Function):
    """One operation of the record, which draws, and saves what it does not return."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        kept, slope = torch.rand_like(x) > share, x.sigmoid()
        ctx.save_for_backward(kept, slope)
        return x * slope * kept

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        kept, slope = ctx.saved_tensors
        return given * slope * kept, None


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + Fused.apply(layer(x), 0.2).tanh()  # type: ignore[no-untyped-call]
        return x

    @staticmethod
    def example() -> Tensor:
        return torch.randn(64, 32, device=DEVICE)


SIDE: list[Any] = []
MODELS = [ConvNet, Transformer, Recurrent, TwoStreams, TwoDevices, Kernels]


def forward_and_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def by_region() -> Step:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = lowtide.checkpoint(model, x).square().mean()
        loss.backward()
        return loss

    return step


def by_budget(share: float, *, inside: bool = False) -> Step:
    limit = lowtide.budget(share)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with limit:
            if inside:
                return forward_and_backward(model, x)
            loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return step


WAYS: dict[str, Callable[[], Step]] = {
    "region": by_region,
    "budget": lambda: by_budget(0.85),
    "smaller budget": lambda: by_budget(0.75),
    "backward inside": lambda: by_budget(0.85, inside=True),
}


def observed(model: Any, step: Step, **autocast: Any) -> list[list[Tensor]]:
    """What some steps leave behind."""
    torch.manual_seed(5)
    left = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        with torch.autocast("emulated", **autocast) if autocast else torch.enable_grad():
            loss = step(model, model.example())
        tensors = [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]
        tensors += [torch.get_rng_state()]
        tensors += [g.get_state() for g in torch.get_device_module("emulated").default_generators]
        drawn = getattr(model, "drawn", None)
        tensors += [] if drawn is None else [drawn.get_state()]
        left.append([tensor.cpu().clone() for tensor in tensors])
    return left


def of(kind: Any) -> Any:
    if not SIDE:
        SIDE.append(torch.Stream("emulated:0"))
    torch.manual_seed(1)
    return kind().to(DEVICE)


def assert_same(found: list[list[Tensor]], plain: list[list[Tensor]]) -> None:
    for mine, theirs in zip(found, plain, strict=True):
        for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(one, other), f"observation {place}"


# The smaller budget is below what the gradients and temporaries of the last two take.
CASES = [
    (kind, way)
    for kind in MODELS
    for way in WAYS
    if way != "smaller budget" or kind not in (TwoStreams, TwoDevices)
]


@pytest.mark.filterwarnings("ignore::lowtide.errors.DeviceWarning")
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_the_bits_of_the_plain_step(kind: Any, way: str) -> None:
    model = of(kind)
    begun = copy.deepcopy(model.state_dict())
    plain = observed(model, forward_and_backward)
    model.load_state_dict(begun)
    with counted_replays() as replayed:
        found = observed(model, WAYS[way]())
    assert_same(found, plain)
    assert replayed() > 0


def test_running_statistics_move_on_the_device() -> None:
    """The test tests something: those above compare them."""
    model = of(ConvNet)
    before = [b.cpu().clone() for b in model.buffers()]
    by_region()(model, model.example())
    assert all(not torch.equal(a, b.cpu()) for a, b in zip(before, model.buffers(), strict=True))


def test_autocast_of_the_device() -> None:
    for kind in (ConvNet, Transformer):
        model = of(kind)
        begun = copy.deepcopy(model.state_dict())
        plain = observed(model, forward_and_backward, dtype=torch.bfloat16)
        for way in ("region", "budget"):
            model.load_state_dict(begun)
            with counted_replays() as replayed:
                found = observed(model, WAYS[way](), dtype=torch.bfloat16)
            assert_same(found, plain)
            assert replayed() > 0


def test_a_gradient_penalty() -> None:
    """A differentiable backward inside the forward, on the thread of the device."""
    model = of(Transformer)
    x = model.example()

    def penalty(run: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        model.zero_grad(set_to_none=True)
        given = x.detach().clone().requires_grad_()
        out = run(model, given).square().mean()
        (grad,) = torch.autograd.grad(out, given, create_graph=True)
        (out + grad.square().sum()).backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    plain = penalty(lambda f, v: f(v))
    assert_same([penalty(lowtide.checkpoint)], [plain])


def test_replays_run_where_autograd_runs() -> None:
    """The test tests something: a device has a thread of its own."""
    model, threads = of(ConvNet), set[str]()

    def note(operations: list[Any]) -> None:
        threads.add(threading.current_thread().name)

    lowtide.replay.listeners.append(note)
    try:
        by_region()(model, model.example())
    finally:
        lowtide.replay.listeners.remove(note)
    assert threads
    assert threading.main_thread().name not in threads


@pytest.mark.parametrize("kind", [ConvNet, Transformer])
def test_a_planned_step_waits_for_the_device_no_more_than_a_plain_one(
    kind: Any, core: ModuleType
) -> None:
    """Nothing is synchronised once a budget has learned the step (no timing, no `.item()`)."""
    model = of(kind)
    x = model.example()

    def waits(step: Step) -> int:
        before = core.counts()["host_waits"]
        step(model, x)
        return int(core.counts()["host_waits"] - before)

    step = by_budget(0.8)
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        step(model, x)
    model.zero_grad(set_to_none=True)
    assert waits(step) == waits(forward_and_backward)
    assert waits(by_region()) == waits(forward_and_backward)


@pytest.mark.parametrize("kind", [ConvNet, Transformer])
def test_verify_compares_what_is_on_the_device(kind: type[ConvNet] | type[Transformer]) -> None:
    torch.manual_seed(0)
    model, x = kind().to(DEVICE), kind.example()
    before = copy.deepcopy(model.state_dict())
    found = lowtide.verify(lambda: model(x).square().mean(), steps=2)
    assert found.same, str(found)
    assert found.replayed
    assert found.compared["gradient"] == len(list(model.parameters()))
    assert found.compared["random state"] > 3  # the device has generators of its own
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
