"""Dry runs: what a step writes or keeps while it is only planned is gone then, or is named."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide._compat import fakes
from lowtide.errors import DryRunWarning
from once import on_one_recorder

VERBS: dict[str, Callable[..., Any]] = {
    "plan": lowtide.plan,
    "curve": lowtide.curve,
    "explain": lowtide.explain,
    "saved_tensors": lowtide.saved_tensors,
    "fit": lambda model, x: lowtide.fit(model, 1.0, example=x).remove(),
}
pytestmark = on_one_recorder  # a dry run has a recorder of its own, whatever the engine is

# What keeps a tensor is looked for among the objects that the collector knows, frozen ones not.
among_all = pytest.mark.usefixtures("thawed")

every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)

_steps = torch.zeros(())
_kept: list[Tensor] = []


class Counting(nn.Module):
    """Counts its calls in tensors that are neither buffers nor arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = torch.zeros(3)
        self.parts = [torch.ones(3)]

    def forward(self, x: Tensor) -> Tensor:
        _steps.add_(1)
        self.calls += 1
        self.parts[0].mul_(2)
        return (self.layer(x) * self.calls.mean()).tanh()


@every_verb
def test_a_tensor_that_torch_writes_for_real_is_put_back(verb: Callable[..., Any]) -> None:
    model = Counting()
    watched = [_steps, model.calls, model.parts[0]]
    before = [(tensor.clone(), tensor._version) for tensor in watched]
    verb(model, torch.ones(2, 4))
    assert [model.calls is watched[1], model.parts[0] is watched[2]] == [True, True]
    for tensor, (content, version) in zip(watched, before, strict=True):
        assert torch.equal(tensor, content)
        assert tensor._version == version  # between a forward and its backward, it may be saved


def caching() -> Any:
    """Its class, made anew: not frozen, it is found without a walk over all that was imported."""

    class Caching(nn.Module):
        """Keeps what it makes in caches, and in containers and objects inside its attributes."""

        class Memory:
            def __init__(self) -> None:
                self.keys: list[Tensor] = []
                self.last: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.memory = self.Memory()
            self.recent: deque[Tensor] = deque(maxlen=2)
            self.nested: dict[str, list[Tensor]] = {"seen": []}
            self.sizes: set[int] = set()

        @staticmethod
        @functools.cache
        def mask(size: int) -> Tensor:
            return torch.ones(size, size).tril()

        @staticmethod
        @functools.lru_cache(maxsize=4)
        def tables(size: int) -> tuple[Tensor, list[Tensor]]:
            return torch.arange(size) + 1.0, [torch.full((size,), 0.5)]

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.memory.keys.append(y.detach())
            self.memory.last = y
            self.recent.append(y.detach())
            self.nested["seen"].append(y.detach())
            self.sizes.add(len(x))
            scale, (shift,) = self.tables(4)
            return (self.mask(4) @ (y * scale + shift)).tanh()

    return Caching


@every_verb
def test_what_a_step_keeps_is_not_fake_afterwards(verb: Callable[..., Any]) -> None:
    Caching = caching()
    model, x = Caching(), torch.ones(4, 4)
    verb(model, x)
    assert (model.memory.keys, model.memory.last, model.sizes) == ([], None, set())
    assert (list(model.recent), model.nested) == ([], {"seen": []})
    output = model(x)
    assert not fakes.is_fake(output)
    assert not fakes.is_fake(Caching.mask(4))
    output.sum().backward()
    assert not fakes.is_fake(model.layer.weight.grad)


def test_a_cache_that_kept_nothing_fake_stays() -> None:
    Caching = caching()
    model, x = Caching(), torch.ones(4, 4)
    mask = Caching.mask(4)
    lowtide.plan(model, x)
    assert Caching.mask(4) is mask


@among_all
def test_fake_tensors_that_cannot_be_removed_are_named() -> None:
    layer = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        _kept.append(layer(x).detach())
        return layer(x).tanh()

    with pytest.warns(
        DryRunWarning, match=r"keeps 1 of its tensors, one of shape \(2, 4\) in a list"
    ):
        lowtide.plan(step, torch.ones(2, 4))
    _kept.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.plan(layer, torch.ones(2, 4))


@among_all
def test_what_another_thread_is_about_to_release_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd's thread of a device drops its last references after the backward has returned."""
    layer = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        y = layer(x).tanh()
        _kept.append(y)
        return y

    def sleep(seconds: float) -> None:
        if seconds:
            _kept.clear()

    monkeypatch.setattr("time.sleep", sleep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.plan(step, torch.ones(2, 4))
    assert not _kept


@among_all
def test_a_real_step_between_forward_and_backward_leaves_no_trace() -> None:
    def trained(between: Callable[[nn.Module, Tensor], Any]) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        x = torch.randn(8, 4)
        model(x).sum().backward()
        # Autograd saves the statistics, and a gradient.
        loss = model(x).square().sum() + (model[0].weight.grad * model[0].weight).sum()
        between(model, x)
        loss.backward()
        return [loss, torch.rand(2), *(p.grad for p in model.parameters()), *model.buffers()]

    def planned(model: nn.Module, x: Tensor) -> None:
        with pytest.warns(DryRunWarning, match="one real forward and backward"):
            lowtide.plan(lambda x: model(x) * model(x).sum().item(), x)

    for one, two in zip(trained(_nothing), trained(planned), strict=True):
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)


def _nothing(model: nn.Module, x: Tensor) -> None:
    pass


@among_all
@pytest.mark.filterwarnings("ignore::lowtide.errors.DryRunWarning")
def test_a_buffer_that_a_real_step_resizes_has_its_size_again() -> None:
    """An observer of the ranges of channels has no channels before its first step."""

    class Ranges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("highest", torch.tensor([]))

        def forward(self, x: Tensor) -> Tensor:
            found = x.detach().abs().amax(0)
            if not self.highest.numel():
                self.highest.resize_(found.shape)
                self.highest.copy_(found)
            return x / self.highest * float(x.detach().sum() > -1e9)

    model = nn.Sequential(nn.Linear(8, 8), Ranges(), nn.Linear(8, 8))
    lowtide.plan(model, torch.randn(16, 8))
    assert model[1].highest.shape == (0,)
    model(torch.randn(16, 8)).sum().backward()
    assert model[1].highest.shape == (8,)


@among_all
@pytest.mark.filterwarnings("ignore::lowtide.errors.DryRunWarning")
def test_what_keeps_many_tensors_is_found_in_a_few_walks_over_the_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One walk takes a tenth of a second and more where many libraries are loaded."""
    asked: list[int] = []
    referrers = gc.get_referrers

    def counted(*objects: object) -> list[object]:
        asked.append(len(objects))
        return referrers(*objects)

    kept: list[Tensor] = []
    layer = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        for _ in range(40):
            kept.append(layer(x))
        return torch.stack(kept).sum()

    monkeypatch.setattr(gc, "get_referrers", counted)
    lowtide.plan(step, torch.ones(2, 4))
    assert max(asked) >= 40
    assert len(asked) <= 20
