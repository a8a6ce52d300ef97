"""Wrapper subclasses: they are saved part by part, and the operations inside are replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import lowtide
from against_plain import counted
from by_hand import same
from lowtide import ReplayError, engine
from lowtide.compiled import build
from once import on_one_recorder

COMPILED = build.target().exists() or build.possible() is None
NEEDS_COMPILED = pytest.mark.skipif(not COMPILED, reason="no compiled recorder here")

pytestmark = [
    on_one_recorder,  # runs on both
    pytest.mark.usefixtures("one_thread", "way"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
]


@pytest.fixture(params=["python", pytest.param("compiled", marks=NEEDS_COMPILED)])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with engine.use(request.param):
        if request.function is not test_the_first_recording_keeps_them_whole:
            know_of_wrappers()
        yield request.param


def know_of_wrappers() -> None:
    """From here on the Python recorder is used."""
    pair = TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()
    lowtide.checkpoint(lambda: pair.sin())
    assert engine.name() == "python"


class Rows:
    """A batch of rows of several lengths."""

    parts = 1  # how many tensors with memory a wrapper consists of

    def __init__(self) -> None:
        torch.manual_seed(0)
        rows = [torch.randn(count, 32) for count in (700, 40, 300)]
        self.batch: Tensor = torch.nested.nested_tensor(rows, layout=torch.jagged)
        layers = [(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.model = nn.Sequential(*[layer for three in layers for layer in three])
        self.call: Callable[[Tensor], Tensor] = self.model

    def loss(self) -> Tensor:
        out: Tensor = self.call(self.batch).values().square().mean()
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mixed, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)
        self.drop, self.act = nn.Dropout(0.1), nn.SiLU(inplace=True)

    def heads(self, row: Tensor) -> Tensor:
        return row.unflatten(-1, (4, 8)).transpose(0, 1).unsqueeze(0)

    def forward(self, x: Tensor) -> Tensor:
        rows = zip(*[part.unbind() for part in self.mixed(self.first(x)).chunk(3, -1)], strict=True)
        attended = [
            nn.functional.scaled_dot_product_attention(*map(self.heads, row))[0] for row in rows
        ]
        joined = torch.cat([row.transpose(0, 1).flatten(-2) for row in attended])
        y = torch.nested.nested_tensor_from_jagged(joined, offsets=x.offsets())  # type: ignore[operator]
        x = x + self.drop(self.out(y))
        inner: Tensor = self.narrow(self.act(self.wide(self.second(x))))
        return x + self.drop(inner)


class Attention(Rows):
    """A ragged transformer under autocast."""

    def __init__(self) -> None:
        super().__init__()
        rows = [torch.randn(count, 32) for count in (300, 40, 133)]
        self.batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
        self.model = nn.Sequential(*[Layer() for _ in range(3)])
        self.call = self.model

    def loss(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.call(self.batch).values().float().square().mean()
        return out


class Pairs(Rows):
    """Wrappers that consist of two tensors."""

    parts = 2

    def __init__(self) -> None:
        super().__init__()
        self.batch = TwoTensor(torch.randn(1000, 32), torch.randn(1000, 32))
        for name, parameter in list(self.model.named_parameters()):
            both = TwoTensor(parameter.detach().clone(), parameter.detach() * 0.5)
            module, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(module), own, nn.Parameter(both))

    def loss(self) -> Tensor:
        out: Tensor = self.call(self.batch).square().mean()
        return out


CASES = {"rows": Rows, "attention": Attention, "pairs": Pairs}


def plain_parts(tensor: Tensor) -> list[Tensor]:
    return [tensor.a, tensor.b] if isinstance(tensor, TwoTensor) else [tensor]


def outcome(case: Rows, context: Any = None) -> tuple[int, list[Tensor]]:
    """The peak of a step, and its results."""
    found: list[Tensor] = []

    def step() -> None:
        with context or contextlib.nullcontext():
            loss = case.loss()
        loss.backward()
        found.extend(plain_parts(loss.detach()))

    parameters = list(case.model.parameters())
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(1)
    peak = lowtide.measure(step, device="cpu").peak_bytes
    grads = [p.grad for p in parameters if p.grad is not None]
    assert len(grads) == len(parameters)
    return peak, found + [part.clone() for grad in grads for part in plain_parts(grad)]


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("kind", CASES)
def test_a_budget_over_wrappers(kind: str, share: float) -> None:
    case = CASES[kind]()
    plain, expected = outcome(case)
    budget = lowtide.budget(int(share * plain))
    for number in range(4):
        with counted() as replayed:
            peak, found = outcome(case, budget)
        assert same(expected, found)
        assert replayed.operations
        if number:  # what a first step's backward takes is not known
            report = budget.report()
            assert peak <= share * plain
            assert report.planned
            assert report.planned_peak is not None
            assert abs(report.planned_peak - peak) < 8 << 10  # allows for a generator's state


@pytest.mark.parametrize("kind", CASES)
def test_a_region_over_wrappers(kind: str) -> None:
    case = CASES[kind]()
    plain, expected = outcome(case)
    case.call = lambda batch: lowtide.checkpoint(case.model, batch)
    with counted() as replayed:
        peak, found = outcome(case)
    assert same(expected, found)
    assert peak < 0.95 * plain
    # Of the rows the last dropout's mask reads the last GELU too; elsewhere nothing does.
    assert replayed["gelu"] + replayed["silu_"] == 3 * case.parts + (kind == "rows")


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_the_first_recording_keeps_them_whole(kind: str, limited: bool, way: str) -> None:
    """The compiled recorder sees the tensors inside, but not which wrapper they belong to."""
    case = CASES[kind]()
    plain, expected = outcome(case)
    budget = lowtide.budget(int(0.6 * plain)) if limited else None
    if not limited:
        model = case.model
        case.call = lambda batch: lowtide.checkpoint(model, batch)
    assert engine.name() == way
    peak, found = outcome(case, budget)
    assert same(expected, found)
    assert engine.name() == "python"
    assert way == "python" or "consist of others" in engine.reason()
    assert way == "python" or 0.9 * plain < peak < 1.01 * plain  # nothing is there twice
    if budget is not None and kind != "pairs":  # of those no backward asks for anything
        assert budget.report().measured_peak is not None
        assert abs(budget.report().measured_peak - peak) < 8 << 10  # as above
    for _ in range(3):
        peak, found = outcome(case, budget)
        assert same(expected, found)
    assert peak < 0.95 * plain
    assert not limited or peak <= 0.6 * plain


@pytest.mark.parametrize("kind", CASES)
def test_backward_twice_and_again_differentiable(kind: str) -> None:
    case = CASES[kind]()
    torch.manual_seed(1)
    parameters = list(case.model.parameters())

    def twice(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        case.call = call
        loss = case.loss()
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
        return [part for grad in (*first, *second) for part in plain_parts(grad)]

    expected = twice(case.model)
    found = twice(lambda batch: lowtide.checkpoint(case.model, batch))
    assert same(expected, found)


def test_lengths_that_are_computed_inside() -> None:
    """Offsets could be replayed; but nested tensors identify their lengths by that tensor."""
    torch.manual_seed(0)
    layer, lengths = nn.Linear(16, 16), torch.tensor([3, 50, 7])
    values = torch.randn(60, 16)

    def inside(values: Tensor) -> Tensor:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths * 1).cumsum(0)])
        rows = torch.nested.nested_tensor_from_jagged(layer(values), offsets)
        return nn.functional.gelu(nn.functional.gelu(rows) * rows).values()

    expected = torch.autograd.grad(inside(values).sum(), list(layer.parameters()))
    with counted() as replayed:
        found = torch.autograd.grad(
            lowtide.checkpoint(inside, values).sum(), list(layer.parameters())
        )
    assert same(expected, found)
    assert replayed["gelu"]


def test_the_mask_of_a_dropout_is_dropped() -> None:
    """It is no integer, though no floating-point number either: only offsets stay."""
    batch = Rows().batch

    def held(dropouts: int) -> int:
        model = nn.Sequential(*[nn.Dropout(0.5) for _ in range(dropouts)])
        weight = nn.Parameter(torch.ones(32))
        model(batch * weight)  # so that only the measured call is measured
        out: list[Tensor] = []

        def call() -> None:
            out.append(lowtide.checkpoint(lambda: model(batch * weight)))

        return lowtide.measure(call, device="cpu").allocated_bytes

    assert held(4) < held(1) + batch.numel() // 2


def test_a_wrapper_that_was_changed_before_backward_is_refused() -> None:
    """A write to a wrapper does not move the versions of its parts (rule 4)."""
    pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    out = lowtide.checkpoint(lambda: (pair * weight).sin())
    with torch.no_grad():
        pair.mul_(2)
    with pytest.raises(ReplayError, match="that was modified by an in-place"):
        out.sum().backward()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_what_a_collective_still_fills_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd saves it before the operator that reads it has waited for it."""
    from torch.distributed import _functional_collectives as functional

    def arrives(tensor: Tensor) -> Tensor:
        with torch.no_grad(), contextlib.suppress(KeyError):
            tensor.copy_(on_the_way.pop(tensor.data_ptr()))
        return tensor

    monkeypatch.setattr(functional, "wait_tensor", arrives)
    on_the_way: dict[int, Tensor] = {}
    torch.manual_seed(0)
    layer, weight, sent = nn.Linear(16, 16), nn.Parameter(torch.randn(16)), torch.randn(8, 16)

    def inside(x: Tensor) -> Tensor:
        x = layer(x).sin()
        received = torch.zeros_like(sent)
        on_the_way[received.data_ptr()] = sent
        return x * (functional.AsyncCollectiveTensor(received) * weight).cos()

    def grads(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        x = torch.ones(8, 16)
        return torch.autograd.grad(call(inside, x).sum(), [*layer.parameters(), weight])

    expected = grads(lambda function, x: function(x))
    with counted() as replayed:
        found = grads(lowtide.checkpoint)
    assert same(expected, found)
    assert replayed["sin"] == 1


class Loose(TwoTensor):
    """Becomes something else when it is detached."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.detach.default:
            return TwoTensor(func(args[0].a), func(args[0].b))
        return TwoTensor.__torch_dispatch__(func, types, args, kwargs)


class Shared(TwoTensor):
    """Has its parts in a dictionary that its aliases share, behind setters."""

    def __init__(self, a: Tensor, b: Tensor, parts: Any = None) -> None:
        self.parts = {"a": a, "b": b} if parts is None else parts

    def put(self, name: str, to: Tensor) -> None:
        if not isinstance(to, Tensor):
            raise TypeError(f"{name} is a tensor")
        self.parts[name] = to

    a = property(lambda self: self.parts["a"], lambda self, to: self.put("a", to))
    b = property(lambda self: self.parts["b"], lambda self, to: self.put("b", to))

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor, parts: Any = None) -> Shared:
        return TwoTensor.__new__(cls, a, b)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.detach.default:
            return Shared(args[0].a, args[0].b, args[0].parts)
        return TwoTensor.__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", [Loose, Shared])
def test_what_a_wrapper_consists_of_stays_the_programs(kind: type[TwoTensor]) -> None:
    """A wrapper that becomes another class is kept whole; one that shares its parts keeps them."""
    pair = kind(torch.randn(4, 4), torch.randn(4, 4))
    weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    (expected,) = torch.autograd.grad((pair * weight).sin().sum(), weight)
    (found,) = torch.autograd.grad(lowtide.checkpoint(lambda: (pair * weight).sin()).sum(), weight)
    assert same(plain_parts(expected), plain_parts(found))
    assert isinstance(pair.a, Tensor)
    assert isinstance(pair.b, Tensor)


def test_what_a_nested_tensor_knows_of_its_lengths_stays() -> None:
    """It is in a dictionary that `detach` shares, behind setters."""
    case = Rows()
    shape = case.batch.to_padded_tensor(0.0).shape
    out = lowtide.checkpoint(case.model, case.batch)
    assert case.batch.to_padded_tensor(0.0).shape == shape
    assert out.to_padded_tensor(0.0).shape == shape


def written(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def stepped(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 0.1).step()


@pytest.mark.parametrize("write", [written, stepped])
@pytest.mark.parametrize("context", ["checkpoint", "budget"])
def test_a_wrapper_that_autograd_did_not_save_is_checked_too(
    context: str, write: Callable[[Tensor], None]
) -> None:
    """A replay reads the parts, whose own versions do not move (rule 4)."""
    for nested in (False, True):
        pair = TwoTensor(torch.randn(64, 64), torch.randn(64, 64))
        weight = nn.Parameter(TwoTensor(pair, pair.clone()) if nested else pair)

        def inside(weight: Tensor = weight) -> Tensor:
            return (weight * 0.1).tanh().sin().cos()

        if context == "checkpoint":
            out = lowtide.checkpoint(inside)
        else:
            with lowtide.budget(0.4):
                out = inside()
        write(weight)
        with pytest.raises(ReplayError, match="modified by an in-place operation after the"):
            out.sum().backward()
