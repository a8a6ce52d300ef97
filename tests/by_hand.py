"""Small models that count their calls, and the step in which they are compared.

Shared by the tests of regions by module. Imports torch and lowtide; knows no test.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import replay
from lowtide.errors import UsageError
from lowtide.modules import checkpoint_modules


@contextmanager
def absent(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the library were not installed, and lowtide's file for it not imported yet."""
    with monkeypatch.context() as without:
        for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
            without.setitem(sys.modules, name, None)
        without.delitem(sys.modules, f"lowtide.{library}", raising=False)
        yield


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.drop(self.second(self.first(self.norm(x)).relu()))


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        out: Tensor = self.head(x)
        return out


class OwnCopy(nn.Linear):
    """Copies and pickles its dictionary by hand."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for key, value in vars(self).items():
            new.__dict__[key] = copy.deepcopy(value, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"inside": dict(vars(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["inside"])


def net(depth: int = 4) -> Net:
    torch.manual_seed(0)
    return Net(depth)


def step(model: nn.Module) -> list[Tensor]:
    """Loss, gradients and buffers of one step."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


def same(one: Iterable[Any], two: Iterable[Any]) -> bool:
    """Whether both have the same tensors, and any: `map` alone would end with the shorter one."""
    first, second = list(one), list(two)
    return 0 < len(first) == len(second) and all(map(torch.equal, first, second))


@contextmanager
def counted_replays() -> Iterator[Callable[[], int]]:
    """A function that returns how many operations have been replayed since it was made."""
    counts: list[int] = []

    def listener(operations: list[Any]) -> None:
        counts.append(len(operations))

    replay.listeners.append(listener)
    try:
        yield lambda: sum(counts)
    finally:
        replay.listeners.remove(listener)


class Flagged(nn.Module):
    def __init__(self, **flags: Any) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)
        self.__dict__.update(flags)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out


def fails(which: Any, model: nn.Module | None = None) -> str:
    """The error text of a `checkpoint_modules` that refuses; it must leave the model unchanged."""
    target = net() if model is None else model
    before = [set(vars(m)) for m in target.modules()]
    with pytest.raises(UsageError) as caught:
        checkpoint_modules(target, which)
    assert [set(vars(m)) for m in target.modules()] == before, "a refusal left something behind"
    return str(caught.value)


class Residual(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.two = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.two(self.norm(self.one(x)).relu())
        return out


class ResNet(nn.Module):
    """Stages as numbered attributes, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.layer2 = nn.Sequential(Residual(), Residual(), Residual())
        self.layer3 = nn.Sequential(Residual())
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        return out


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Encoder(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class Transformer(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.encoder = Encoder(depth, width)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(tokens)))
        return out
