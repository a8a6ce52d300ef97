"""CUDA without a GPU: fakes show which stream a replay uses and what a budget counts (rule 3, 13).

What a real device does is checked by tests/cuda/check_cuda.py, on a machine that has one.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide import _compat, engine, marks
from lowtide._memory_events import Timeline
from lowtide.tape.operators import facts_of


class FakeStream:
    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append((self.name, "waits for", other.name))


class FakeStreams:
    """The part of torch.cuda that knows streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, ...]] = []
        self.main = FakeStream("main", self.log)
        self.side = FakeStream("side", self.log)
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(_compat, "cuda_in_use", lambda: True)
        monkeypatch.setattr(_compat, "stream_of", lambda args: self.current)

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    with engine.use("python"):  # the compiled engine asks the device, which cannot be faked
        yield FakeStreams(monkeypatch)


@pytest.fixture
def replayed_on(streams: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(operator, stream that was current when it was replayed)."""
    seen: list[tuple[str, str]] = []

    def watching(facts: Any, run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((facts.name, streams.current.name))
            return run(*args, **kwargs)

        return call

    for operator in (torch.ops.aten.sin, torch.ops.aten.exp, torch.ops.aten.cos):
        facts = facts_of(operator.default)  # replay calls this one, the forward torch's own
        monkeypatch.setattr(facts, "func", watching(facts, facts.func))
    return seen


def test_replay_uses_the_recorded_stream(
    streams: FakeStreams, replayed_on: list[tuple[str, str]]
) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        with streams.use(streams.side):
            y = y.exp()
        return y.cos()

    x = torch.randn(4, requires_grad=True)
    plain = torch.autograd.grad(f(x).sum(), x)[0]
    y = lowtide.checkpoint(f, x)
    streams.log.clear()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)
    assert ("aten::sin", "main") in replayed_on
    assert ("aten::exp", "side") in replayed_on
    # What it reads was made on the main stream, and what it makes is read there.
    first, last = ("side", "waits for", "main"), ("main", "waits for", "side")
    assert streams.log == [first, last]


def test_nothing_waits_on_the_same_stream(
    streams: FakeStreams, replayed_on: list[tuple[str, str]]
) -> None:
    x = torch.randn(4, requires_grad=True)
    with streams.use(streams.side):
        y = lowtide.checkpoint(lambda v: v.sin().exp().cos(), x)
        y.sum().backward()  # autograd, too, goes back on the stream of the forward
    assert {stream for _, stream in replayed_on} == {"side"}
    assert streams.log == []


def test_an_error_leaves_the_stream_as_it_was(streams: FakeStreams) -> None:
    def interrupted() -> None:
        with _compat.on_stream(streams.side):
            assert streams.current is streams.side
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert streams.current is streams.main


def test_random_state_of_cuda_is_read_without_a_device() -> None:
    """A CUDA generator is not asked for where there is none (rule 3)."""
    from lowtide.tape.generators import default_generator

    assert default_generator(torch.device("cpu")) is torch.default_generator
    assert default_generator(torch.device("meta")) is None
    if not torch.cuda.is_available():
        assert default_generator(torch.device("cuda", 0)) is None


# ----------------------------------------------------------------------------------- memory


class FakeAllocator:
    """The caching allocator's three counters, one set a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = {0: 0, 1: 0}
        self.peak = {0: 0, 1: 0}
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: self.now[d.index])
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: self.peak[d.index])
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def reset(self, device: torch.device) -> None:
        self.peak[device.index] = self.now[device.index]

    def change(self, nbytes: int, device: int = 0) -> None:
        self.now[device] += nbytes
        self.peak[device] = max(self.peak[device], self.now[device])


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator(monkeypatch)


def timeline_of(measured: marks.Marks) -> Timeline:
    arrived: list[Timeline | None] = []
    measured.stop(arrived.append)
    assert arrived
    assert arrived[0] is not None
    return arrived[0]


def test_levels_and_peaks_are_the_allocators(allocator: FakeAllocator) -> None:
    allocator.change(1000)  # there before: not counted
    counters = marks.start_marks(torch.device("cuda", 0))
    assert isinstance(counters, marks.CudaCounters)
    allocator.change(+300)
    allocator.change(-200)
    assert counters.mark() == 1
    allocator.change(+50)
    allocator.change(7000, device=1)  # somebody else's device
    assert counters.mark() == 2
    allocator.change(+600)
    allocator.change(-700)
    timeline = timeline_of(counters)
    assert timeline.levels == [0, 100, 150]
    assert timeline.peaks == [300, 150, 750]
    assert timeline.final == 50
    assert timeline.peak == 750


def test_a_measurement_sees_peaks_from_before_a_budgets_marks(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget resets the allocator's statistics; what `measure` counts around it is kept."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = torch.device("cuda", 0)
    allocator.change(1000)

    def step() -> None:
        allocator.change(+500)
        allocator.change(-500)
        counters = marks.start_marks(device)
        assert counters is not None
        allocator.change(+900)
        allocator.change(-800)
        counters.mark()
        allocator.change(+100)
        assert timeline_of(counters).peaks == [900, 200]
        inner = lowtide.measure(lambda: allocator.change(+50), device=device)
        assert inner.peak_bytes == 50

    took = lowtide.measure(step, device=device)
    assert took.peak_bytes == 900
    assert took.allocated_bytes == 250


def test_the_current_device_is_counted_by_default(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat, "cuda_in_use", lambda: True)
    assert isinstance(marks.start_marks(None), marks.CudaCounters)
    assert isinstance(marks.start_marks(torch.device("cuda", 1)), marks.CudaCounters)


def test_without_cuda_the_cpu_is_counted() -> None:
    if _compat.cuda_in_use():
        pytest.skip("this process uses CUDA")
    measured = marks.start_marks(None)
    assert isinstance(measured, marks.OwnEvents | marks.SharedEvents)
    timeline_of(measured)


def test_the_script_for_a_real_device_says_so_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device: run tests/cuda/check_cuda.py")
    script = Path(__file__).parent / "cuda" / "check_cuda.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "needs a CUDA device" in done.stdout
