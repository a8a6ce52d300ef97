"""Dry runs of steps that write to tensors which were there before: queues, centers, counters.

What is read and then overwritten is copied in a step if a replay may read it. A plan knows that
before the first step, whoever has the tensor. What is not known is a write to a part of a tensor
that no module has, of which torch makes a fake one for the call alone.
"""

import pytest
import torch
from torch import Tensor, nn

import lowtide
from once import on_one_recorder, search_less

pytestmark = on_one_recorder


class _Contrasted(nn.Module):
    """Compares with a queue of earlier results, and moves it."""

    def __init__(self, write: str, *, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 128)
        self.write = write
        queue = torch.randn(128, 256)
        if buffer:
            self.register_buffer("queue", queue)
        else:
            self.queue = _Hidden(queue)

    def forward(self, x: Tensor) -> Tensor:
        queue = self.queue if isinstance(self.queue, Tensor) else self.queue.tensor
        made = self.layer(x).tanh()
        loss = (made @ queue.clone()).logsumexp(1).mean()
        with torch.no_grad():
            if self.write == "part":
                queue[:, :32] = made[:32].T
            elif self.write == "all":
                queue.copy_(queue.roll(32, 1))
            else:
                queue.mul_(0.9)
        return loss


class _Hidden:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("write", "buffer"),
    [("part", True), ("all", True), ("scaled", True), ("all", False), ("scaled", False)],
)
def test_what_is_read_and_then_overwritten(
    write: str, buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    search_less(monkeypatch)
    model, x = _Contrasted(write, buffer=buffer), torch.randn(128, 64)
    plan = lowtide.plan(model, x)
    assert plan.plain_peak == lowtide.measure(lambda: model(x).backward()).peak_bytes
    limit = plan.minimum_peak
    budget = lowtide.budget(lowtide.plan(model, x, limit=limit))
    for _ in range(2):
        model.zero_grad()
        with budget:
            loss = model(x)
        loss.backward()
        report = budget.report()
        assert report.planned
        assert report.measured_peak is not None
        assert report.measured_peak <= limit


def test_a_write_returns_what_was_written() -> None:
    """A tensor that no module has is made fake for a call: that is no memory of the step."""
    layer, mean, x = nn.Linear(32, 64), torch.zeros(128, 64), torch.randn(128, 32)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            mean.copy_(layer(x))
            torch.add(mean, 1, out=mean)
        return layer(x).sub(mean).tanh().square().mean()

    plan = lowtide.plan(step, x)
    assert plan.plain_peak == lowtide.measure(lambda: step(x).backward()).peak_bytes


@torch.library.custom_op("lowtide_dryrun_writes::counted", mutates_args={"count"})
def _counted(count: Tensor, x: Tensor) -> Tensor:
    count.add_(1)
    return 2 * x


@_counted.register_fake
def _(count: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_that_writes_may_return_something_else() -> None:
    """What was written was taken for its result, of whatever shape."""
    layer, count, x = nn.Linear(32, 64), torch.zeros(128, 64), torch.randn(128, 32)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            made = _counted(count, layer(x))
            assert made is not count
        return layer(x).sub(made).tanh().square().mean()

    plan = lowtide.plan(step, x)
    assert plan.source == "fake"
    assert plan.plain_peak == lowtide.measure(lambda: step(x).backward()).peak_bytes


def test_a_result_that_is_resized_is_memory_of_the_step() -> None:
    layer, x = nn.Linear(32, 64), torch.randn(128, 32)

    def step(x: Tensor, into: Tensor) -> Tensor:
        with torch.no_grad():
            made = torch.mul(layer(x), 2, out=into)
        return layer(x).sub(made).tanh().square().mean()

    outside = [torch.empty(0), torch.empty(0)]
    plan = lowtide.plan(lambda x: step(x, outside[0]), x)
    assert plan.source == "fake"
    peak = lowtide.measure(lambda: step(x, outside[1]).backward()).peak_bytes
    assert plan.plain_peak == peak


def test_lists_of_tensors_are_written() -> None:
    """As averages of parameters are updated."""
    layer, x = nn.Linear(32, 64), torch.randn(128, 32)
    average = [torch.zeros_like(p) for p in layer.parameters()]

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(average, list(layer.parameters()), 0.1)
        return layer(x).tanh().square().mean()

    plan = lowtide.plan(step, x)
    assert plan.source == "fake"
    assert plan.plain_peak == lowtide.measure(lambda: step(x).backward()).peak_bytes
