"""Run a scenario plainly and in lowtide's ways, compare the bits, and count what was replayed.

Problem: a rule's test must say in a few lines what happens, and fail when one bit or one replayed
operation differs. Invariant: a scenario is a function of a way of calling; both runs start from one
seed and return every tensor that matters, compared as bytes (NaN equals itself, 0.0 is not -0.0).
Imports torch and lowtide; knows no test. Rejected: the catalogue's harness, made for whole models.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import engine, replay
from lowtide.tape.operators import facts_of
from lowtide.tape.recorder import Recorder
from lowtide.tape.values import Handle, Operation, Value

Way = Callable[..., Any]
Scenario = Callable[[Way], Iterable[Tensor | None]]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The way that does nothing."""
    return function(*args, **kwargs)


def half_the_peak(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A new budget for this one call, under which the first step drops what it can."""
    with lowtide.budget(0.5):
        return function(*args, **kwargs)


WAYS = {"checkpoint": lowtide.checkpoint, "budget": half_the_peak}


class Replayed:
    """The replays: one list of operations for each request of backward."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.nbytes = 0

    def names(self) -> Counter[str]:
        return Counter(name for request in self.requests for name in request)

    @property
    def operations(self) -> int:
        return sum(map(len, self.requests))

    def __getitem__(self, name: str) -> int:
        return self.names()[f"aten::{name}"]

    def __call__(self, operations: list[Any]) -> None:
        self.requests.append([op.facts.name for op in operations])
        self.nbytes += sum(value.nbytes for op in operations for value in op.made())


@contextmanager
def counted() -> Iterator[Replayed]:
    """Counts the operations replayed inside."""
    replayed = Replayed()
    replay.listeners.append(replayed)
    try:
        yield replayed
    finally:
        replay.listeners.remove(replayed)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Names of the operations that a recorder sees inside, without views.

    Uses the Python recorder, as the compiled one cannot be inspected.
    """
    seen: list[str] = []
    original = Recorder.__torch_dispatch__

    def run(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = facts_of(func)
        if not facts.view:
            seen.append(facts.name)
        return original(self, func, types, args, kwargs)

    Recorder.__torch_dispatch__ = run  # type: ignore[method-assign]
    try:
        with engine.use("python"):
            yield seen
    finally:
        Recorder.__torch_dispatch__ = original  # type: ignore[method-assign]


def bits(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Everything to compare about a tensor, as a comparable value."""
    if tensor is None:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    raw = plain.contiguous().reshape(-1)
    raw = raw.view(torch.uint8) if plain.numel() else raw  # an empty one has no bytes to view
    return (plain.dtype, tuple(plain.shape), tensor.requires_grad, bytes(raw.tolist()))


def observe(scenario: Scenario, way: Way) -> list[Any]:
    """The bits of what the scenario returns, and of the generator's state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = [bits(tensor) for tensor in scenario(way)]
        return [*found, bits(torch.get_rng_state())]


def check(scenario: Scenario, way: Way = lowtide.checkpoint) -> Replayed:
    """Fail unless the way gives the bits of the plain run; returns what was replayed."""
    expected = observe(scenario, plainly)
    with counted() as replayed:
        found = observe(scenario, way)
    assert len(found) == len(expected)
    for place, (one, two) in enumerate(zip(expected, found, strict=True)):
        assert one == two, f"tensor {place} differs from the plain run"
    return replayed


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    """The loss and the gradients that its backward leaves."""
    loss.backward()
    return [loss, *(leaf.grad for leaf in leaves)]


def leaf(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, **options).requires_grad_()


def tape_records() -> int:
    """Number of live values, operations and handles, of all tapes and both recorders."""
    core = engine.core()
    types = (Value, Operation, Handle)
    listed = sum(issubclass(type(o), types) for o in gc.get_objects())
    return listed + (0 if core is None else core.count_records())


def budgeted(model: nn.Module, x: Tensor, share: float) -> tuple[lowtide.Budget, Callable[[], int]]:
    """A budget of this share of the plain step's peak, and a function that takes a step under it
    and returns the step's peak in bytes. The plain step's gradients are there afterwards."""

    def plain() -> None:
        model.zero_grad()
        model(x).backward()

    plain()
    budget = lowtide.budget(int(share * lowtide.measure(plain, device="cpu").peak_bytes))

    def step() -> None:
        model.zero_grad()
        with budget:
            loss = model(x)
        loss.backward()

    return budget, lambda: lowtide.measure(step, device="cpu").peak_bytes


def unseen(into: Tensor, content: Tensor) -> None:
    """Fill memory as a kernel does that no dispatcher sees."""
    content = content.contiguous()
    ctypes.memmove(into.data_ptr(), content.data_ptr(), into.numel() * into.element_size())


def held(limit: lowtide.Budget, *, planned: bool) -> None:
    """The last step has replayed something; if it was `planned`, its limit was held."""
    report = limit.report()
    assert report.replayed_operations
    assert report.measured_peak is not None
    assert report.limit is not None
    if planned:
        assert report.planned
        assert report.measured_peak <= report.limit
