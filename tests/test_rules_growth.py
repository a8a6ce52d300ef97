"""Rules 8 and 10 over time: a thousand steps leave no growth in objects or in live tensors.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import tape_records
from lowtide.tape import watch
from lowtide.tape.regions import Region
from lowtide.tape.values import Value


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())


def checkpointed(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: lowtide.checkpoint(net, x)


def budgeted(net: nn.Module) -> Callable[[Tensor], Tensor]:
    limit = lowtide.budget(0.9)

    def run(x: Tensor) -> Tensor:
        with limit:
            out: Tensor = net(x)
            return out

    return run


def fitted(net: nn.Module) -> Callable[[Tensor], Tensor]:
    lowtide.fit(net, 0.9)
    return net


def census() -> tuple[Counter[str], int, int]:
    """Live objects by type, live tensors, watched storages."""
    watch.sweep()  # which otherwise happens now and then
    gc.collect()
    types = Counter(type(o).__qualname__ for o in gc.get_objects())
    types["tape records"] = tape_records()
    tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    return types, tensors, len(watch.counts())


@pytest.mark.parametrize(
    ("apply", "ends"),
    [
        (checkpointed, "backward"), (checkpointed, "never"), (checkpointed, "error"),
        (budgeted, "backward"), (budgeted, "never"), (fitted, "error"),
    ],
)  # fmt: skip
def test_steps_leave_no_growth(
    apply: Callable[[nn.Module], Callable[[Tensor], Tensor]], ends: str
) -> None:
    net = model()
    run = apply(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)
    x = torch.randn(64, 16)

    def one(number: int) -> None:
        optimizer.zero_grad()
        if ends == "error" and number % 2:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                run(x[:, :3])
            return
        loss = run(x).square().mean()
        if ends == "never" and number % 2:
            return
        loss.backward()
        optimizer.step()

    # A few more objects may be caches of torch and Python, or what other tests of this process left
    # to the collector; a leak of one per step is far more.
    steps = 1000 if ends == "backward" else 200
    for number in range(60):
        one(number)
    before, tensors, watched = census()
    for number in range(60, 60 + steps):
        one(number)
    after, tensors_after, watched_after = census()
    assert tensors_after <= tensors
    assert watched_after <= watched
    grown = {
        name: n - before[name]
        for name, n in after.items()
        if n - before[name] > max(60, steps // 4)
    }
    assert not grown, f"after {steps} steps there are more of {grown}"


def test_what_another_thread_adds_to_a_storage_that_is_swept_stays_watched() -> None:
    table, values = watch.Watched(), [Value(None, 0, Region(None, None)) for _ in range(2)]

    class Racing(list[Any]):
        """Another thread adds a value as soon as this was gone through."""

        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            if len(values) == 2:
                table.add(1, values.pop())

    table._storages[1] = Racing()
    late = values[1]
    table.sweep()
    assert table.pop(1) == [late]
