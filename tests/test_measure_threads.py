"""Threads that measure: torch has one memory recorder per process, and its profiler is per thread.

The threads here run in turns, so that each test controls where the others are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from apart import ran_apart
from lowtide import UsageError
from lowtide.memory.events import MemoryEvents
from once import on_one_recorder


@contextmanager
def other_thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """A function that runs functions on one other thread, which lives until the context ends."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function on a new thread, and wait until that has ended."""
    with other_thread() as run:
        return run(function)


def whole_steps(budget: lowtide.Budget, count: int = 1) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
    for _ in range(count):
        with budget:
            loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()
        model.zero_grad()


def peak_here() -> int:
    return lowtide.measure(lambda: torch.zeros(256), device="cpu").peak_bytes


def test_a_thread_that_ends_ends_its_recording() -> None:
    events = MemoryEvents()

    def start() -> None:
        assert events.start()
        torch.zeros(100)
        with pytest.raises(UsageError, match="this thread already records memory events"):
            peak_here()

    in_thread(start)
    assert peak_here() == 1024
    timeline = events.stop()  # what it recorded is not lost
    assert timeline is not None
    assert timeline.peak == 400


def test_a_thread_that_ends_ends_a_recording_that_was_let_go() -> None:
    def start() -> None:
        assert MemoryEvents().start()

    in_thread(start)
    assert peak_here() == 1024


def test_a_budget_outlives_the_thread_that_it_was_used_on() -> None:
    budget = lowtide.budget(0.7)
    in_thread(lambda: whole_steps(budget, 2))
    assert peak_here() == 1024
    in_thread(lambda: whole_steps(budget))
    assert budget.report().measured_peak is not None
    assert peak_here() == 1024


def test_budgets_on_threads_that_ended_while_others_were_refused() -> None:
    budgets = [lowtide.budget(0.7) for _ in range(3)]
    with other_thread() as first:
        first(lambda: budgets[0].__enter__())
        for budget in budgets[1:]:
            in_thread(lambda budget=budget: whole_steps(budget))  # not measured: only the first is
            assert budget.report().measured_peak is None
        with pytest.raises(UsageError, match="another thread already records memory events"):
            peak_here()
        first(lambda: budgets[0].__exit__(None, None, None))
    assert peak_here() == 1024
    for budget in budgets:
        in_thread(lambda budget=budget: whole_steps(budget, 2))
        assert budget.report().measured_peak is not None
    assert peak_here() == 1024


def test_a_step_of_another_thread_that_is_over_gives_way() -> None:
    theirs, ours = lowtide.budget(0.7), lowtide.budget(0.7)
    with other_thread() as run:
        run(lambda: whole_steps(theirs))  # and it would take its measurement in the next step
        assert peak_here() == 1024
        run(lambda: whole_steps(theirs, 2))  # starts again, on a thread with its profiler still on
        assert theirs.report().measured_peak is not None
        run(lambda: whole_steps(theirs, 49))
        whole_steps(ours, 4)
        assert ours.report().measured_peak is not None
    assert peak_here() == 1024


def test_torch_has_nothing_to_say_about_a_recorder_that_is_taken_over(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As from a thread whose step was abandoned: torch takes that for a warm-up cut short."""
    assert peak_here() == 1024
    with other_thread() as run:
        events = MemoryEvents()
        assert run(events.start)
        events.over()
        assert peak_here() == 1024
        assert run(peak_here) == 1024  # its own profiler, still on there, is stopped first
    assert peak_here() == 1024
    assert "disableProfiler" not in capfd.readouterr().err


def test_a_step_of_another_thread_that_is_over_has_a_step_s_time() -> None:
    theirs, ours = lowtide.budget(0.7), lowtide.budget(0.7)
    with other_thread() as run:
        run(lambda: whole_steps(theirs))
        whole_steps(ours)
        run(lambda: whole_steps(theirs))
        assert theirs.report().measured_peak is not None
        whole_steps(ours)
        whole_steps(ours, 2)
    assert peak_here() == 1024


def test_a_step_of_another_thread_that_no_backward_can_come_to_gives_way() -> None:
    budget, model = lowtide.budget(0.7), nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward() -> torch.Tensor:
        with budget:
            loss: torch.Tensor = model(torch.ones(4, 8)).sum()
        return loss

    with other_thread() as run:
        loss = run(forward)
        with pytest.raises(UsageError, match="another thread already records memory events"):
            peak_here()
        del loss
        assert peak_here() == 1024
        run(forward).backward()
        assert run(peak_here) == 1024
    assert peak_here() == 1024


def test_a_thread_may_end_while_another_records() -> None:
    events, ours = MemoryEvents(), MemoryEvents()
    with other_thread() as run:
        assert run(events.start)
        events.over()
        assert ours.start()
    torch.zeros(100)
    timeline = ours.stop()
    assert timeline is not None
    assert timeline.peak == 400
    assert events.stop() is None
    assert events.obstacle == "another thread needed the recorder"
    assert peak_here() == 1024


@on_one_recorder
def test_the_terminal_stays_clean_where_threads_measure() -> None:
    program = """
import threading, torch
from lowtide.measure import measure
def run():
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024
for _ in range(2):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""
    done = ran_apart(program)
    assert (done.stdout, done.stderr) == ("", "")


def test_threads_that_come_and_go_at_once() -> None:
    gate, failed = threading.Barrier(4), []

    def train() -> None:
        gate.wait()
        try:
            whole_steps(lowtide.budget(0.7), 4)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert peak_here() == 1024


def test_a_step_whose_backward_is_on_another_thread_is_measured_as_far_as_it_is_here() -> None:
    # Its marks there would not be found, and the whole measurement would be lost.
    net, x = nn.Linear(64, 64), torch.randn(32, 64)
    budget = lowtide.budget("10 MB")

    def step(limit: Any = budget) -> None:
        with limit:
            loss = net(x).relu().square().mean()
        net.zero_grad()
        in_thread(loss.backward)

    plain = lowtide.measure(lambda: step(nullcontext()), device="cpu")
    first, second = (lowtide.measure(step, device="cpu") for _ in range(2))
    assert plain.peak_bytes <= first.peak_bytes <= plain.peak_bytes + 1024
    assert second.peak_bytes == first.peak_bytes


def test_whose_recording_is_in_the_way_on_another_thread() -> None:
    net = nn.Linear(8, 8)
    with lowtide.budget("1 MB"):
        loss = net(torch.randn(4, 8)).square().mean()
    with pytest.raises(
        UsageError, match=r"another thread already records .* of a step under a bud"
    ):
        in_thread(lambda: lowtide.measure(loss.backward, device="cpu"))
