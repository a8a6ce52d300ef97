"""`lowtide.measure` and the memory events below it: exact bytes, and no profiler disturbed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowtide
from apart import ran_apart
from lowtide import _compat
from lowtide.errors import LowtideError, UsageError
from lowtide.measure import Measurement, measure
from lowtide.memory.events import MemoryEvents
from lowtide.memory.timeline import Timeline, read_timeline
from once import on_one_recorder

CPU = torch.device("cpu")


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def run_profiler() -> int:
    """Run a user's profiler; returns how many operators it saw."""
    with torch.profiler.profile() as profile:
        torch.ones(3)
    return sum(row.count for row in profile.key_averages() if row.key == "aten::ones")


def recorded(step: Callable[[MemoryEvents], object]) -> Timeline:
    events = MemoryEvents()
    assert events.start(), events.obstacle
    try:
        step(events)
    finally:
        timeline = events.stop()
    assert timeline is not None, events.obstacle
    return timeline


# --- bytes ------------------------------------------------------------------------------------


def test_bytes_of_hand_made_allocations() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(torch.zeros(1000))
        torch.zeros(500, dtype=torch.float64)
        kept.append(torch.zeros(3, dtype=torch.uint8))

    result = measure(step, device="cpu")
    assert (result.peak_bytes, result.allocated_bytes) == (8000, 4003)
    assert result.seconds > 0
    assert result.device == CPU


def test_views_and_in_place_operations_cost_nothing() -> None:
    x = torch.zeros(64, 64)
    result = measure(lambda: x.t()[1:].zero_().unsqueeze(0).neg_(), device="cpu")
    assert (result.peak_bytes, result.allocated_bytes) == (0, 0)


def test_a_step_gets_its_arguments() -> None:
    """As in `lowtide.plan` and its siblings."""
    assert measure(torch.full, (256,), fill_value=2.0, device="cpu").peak_bytes == 1024

    def step(first: int, /, fn: int) -> None:
        torch.zeros(first + fn)

    assert measure(step, 6, device="cpu", fn=250).peak_bytes == 1024


def test_the_returned_value_is_dropped() -> None:
    assert measure(lambda: torch.zeros(256), device="cpu").allocated_bytes == 0


def test_backward_is_counted_with_its_gradients() -> None:
    weight = torch.ones(100, 100, requires_grad=True)

    def step() -> None:
        weight.exp().sum().backward()

    result = measure(step, device="cpu")
    assert result.allocated_bytes == 40_000
    # The saved result of `exp`, the gradient made from it, and a few scalars.
    assert 80_000 <= result.peak_bytes < 80_100


def test_memory_older_than_the_call_is_not_subtracted() -> None:
    held = [torch.zeros(1000)]

    def step() -> None:
        held.clear()
        held.append(torch.zeros(10))

    result = measure(step, device="cpu")
    assert (result.peak_bytes, result.allocated_bytes) == (40, 40)


def test_blocks_of_an_earlier_measurement_do_not_confuse_a_later_one() -> None:
    held: list[torch.Tensor] = []
    measure(lambda: held.append(torch.zeros(1000)), device="cpu")
    result = measure(lambda: held.clear() or torch.zeros(10), device="cpu")
    assert (result.peak_bytes, result.allocated_bytes) == (40, 0)


def test_measuring_twice_gives_the_same_bytes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    x = torch.randn(16, 32)

    def step() -> None:
        model(x).sum().backward()

    first = measure(step, device="cpu")
    model.zero_grad()
    second = measure(step, device="cpu")
    assert first.peak_bytes == second.peak_bytes > 0


# --- marks ------------------------------------------------------------------------------------


def test_levels_and_peaks_between_marks() -> None:
    def step(events: MemoryEvents) -> None:
        x = torch.empty(100)
        assert events.mark() == 1
        y = torch.empty(50)
        torch.empty(1000)
        assert events.mark() == 2
        del x
        assert events.mark() == 3
        assert events.mark() == 4
        del y

    assert recorded(step) == Timeline(
        levels=[0, 400, 600, 200, 200], rises=[400, 4600, 200, 200, 0], final=0
    )


def test_blocks_as_large_as_the_marker_are_not_marks() -> None:
    def step(events: MemoryEvents) -> None:
        for size in (61, 67, 61, 67):
            torch.empty(size, dtype=torch.uint8)
        events.mark()
        blocks = [torch.empty(size, dtype=torch.uint8) for size in (61, 67)]
        events.mark()
        del blocks

    assert recorded(step) == Timeline(levels=[0, 0, 128], rises=[67, 128, 0], final=0)


def test_marks_ignore_default_devices_and_modes() -> None:
    def step(events: MemoryEvents) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with torch.device("meta"), FakeTensorMode():
            events.mark()

    assert len(recorded(step).levels) == 2


def test_mark_outside_a_recording_does_nothing() -> None:
    assert MemoryEvents().mark() == 0
    assert MemoryEvents().stop() is None


def test_a_gradient_hook_may_mark() -> None:
    x = torch.ones(10, requires_grad=True)

    def step(events: MemoryEvents) -> None:
        y = x * 2
        y.register_hook(lambda gradient: events.mark() and None)
        y.sum().backward()

    assert len(recorded(step).levels) == 2


def event(size: int, address: int, device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(alloc_size=size, ptr=address, device=torch.device(device))


def test_other_devices_are_told_apart() -> None:
    gpu = "cuda:0"
    stream = [
        event(61, 900),
        event(512, 1, gpu),
        event(40, 2),
        event(67, 901),
        event(-61, 900),
        event(512, 3, "cuda:1"),
        event(-1024, 4, gpu),
        event(2048, 5, gpu),
        event(-67, 901),
    ]
    on_gpu = read_timeline(stream, torch.device(gpu), [900, 901])
    # A block older than the start is known by its size on CUDA, and subtracted.
    assert on_gpu == Timeline(levels=[0, 512], rises=[512, 1536], final=1536)


def test_a_gap_in_the_events_is_seen() -> None:
    whole = [event(61, 900), event(67, 901), event(-61, 900), event(-67, 901)]
    assert read_timeline(whole, CPU, [900, 901]) is not None
    for missing in range(4):
        stream = whole[:missing] + whole[missing + 1 :]
        assert read_timeline(stream, CPU, [900, 901]) is None


def test_a_free_that_was_not_seen_is_made_up_for() -> None:
    stream = [event(61, 900), event(100, 1), event(30, 1), event(-61, 900)]
    assert read_timeline(stream, CPU, [900]) == Timeline(levels=[0], rises=[100], final=30)


def test_which_storages_are_blocks_of_the_recording() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    older = torch.empty(30)

    def step(events: MemoryEvents) -> None:
        mine, foreign = torch.empty(20), torch.frombuffer(bytearray(40), dtype=torch.uint8)
        events.mark()
        for tensor in (older, mine, foreign, none, fake):
            events.note(tensor.untyped_storage())
        del mine
        events.mark()

    none = torch.empty(20, device="meta")
    with FakeTensorMode():
        fake = torch.empty(20)
    assert recorded(step).known == (False, True, False, False, False)


# --- refusals and errors ----------------------------------------------------------------------


def test_nested_measurements_are_refused_and_leave_the_outer_alone() -> None:
    def step() -> None:
        torch.zeros(256)
        with pytest.raises(UsageError, match="this thread already records memory events"):
            measure(lambda: None, device="cpu")

    assert measure(step, device="cpu").peak_bytes >= 1024


def test_a_second_thread_is_refused() -> None:
    def step() -> None:
        other = MemoryEvents()
        assert in_thread(other.start) is False
        assert other.obstacle == "another thread already records memory events"

    measure(step, device="cpu")


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.itself = self


def test_a_step_that_was_abandoned_does_not_keep_others_from_measuring() -> None:
    gc.disable()
    try:
        abandoned = MemoryEvents()
        assert abandoned.start()
        Cycle(abandoned)
        del abandoned
        assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024
    finally:
        gc.enable()


def test_garbage_is_looked_for_once_for_a_recording_that_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collections: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(None))
    held = MemoryEvents()
    assert held.start()
    for _ in range(3):
        assert not MemoryEvents().start()
    assert len(collections) == 1
    assert held.stop() is not None
    again = MemoryEvents()
    assert again.start()
    assert again.stop() is not None
    assert len(collections) == 1


def test_a_loss_that_is_kept_does_not_keep_other_budgets_from_learning() -> None:
    """What is measured while another budget's step waits for its backward is known once that comes.
    It may never come."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model, x = torch.nn.Sequential(*layers), torch.randn(512, 64)
    peak = measure(lambda: model(x).sum().backward(), device="cpu").peak_bytes
    plain = [parameter.grad for parameter in model.parameters()]
    with lowtide.budget(int(0.8 * peak)):
        kept = model(x).sum()
    budget, events = lowtide.budget(int(0.7 * peak)), []
    for _ in range(40):
        model.zero_grad()
        with budget:
            loss = model(x).sum()
        loss.backward()
        events.append(budget.report().measured_steps)
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(one, two) for one, two in zip(plain, found, strict=True))
    assert budget.report().planned
    assert events[5] == 0
    assert events[30] > 0
    assert 0 < (budget.report().highest_peak or 0) <= int(0.7 * peak)
    model.zero_grad()
    kept.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(one, two) for one, two in zip(plain, found, strict=True))


@pytest.mark.parametrize("error", [ValueError("from the step"), KeyboardInterrupt()])
def test_an_exception_passes_through_and_leaves_nothing_behind(error: BaseException) -> None:
    def step() -> None:
        torch.zeros(10)
        raise error

    with pytest.raises(type(error)) as caught:
        measure(step, device="cpu")
    assert caught.value is error
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024
    assert run_profiler() == 1


def test_devices_that_do_not_report_are_refused() -> None:
    with pytest.raises(UsageError, match="not on 'meta'"):
        measure(lambda: None, device="meta")
    with pytest.raises(UsageError, match=r"calls a step; got NoneType\. Pass the f"):
        measure(None, device="cpu")  # type: ignore[arg-type]
    assert issubclass(UsageError, LowtideError)


def test_a_dropped_recording_does_not_block_the_next() -> None:
    events = MemoryEvents()
    assert events.start()
    del events
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


def test_a_recording_stopped_on_another_thread_is_void() -> None:
    events = MemoryEvents()
    assert events.start()
    assert in_thread(events.stop) is None
    assert "another thread" in events.obstacle
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


def test_printing() -> None:
    measured = Measurement(3 * 2**20, -2048, 1.5, CPU)
    assert str(measured) == "peak 3.0 MiB, left allocated -2.0 KiB, 1.500 s on cpu"


# --- the first to use the profiler keeps it ----------------------------------------------------


def test_an_active_profiler_keeps_running() -> None:
    with torch.profiler.profile() as profile:
        with pytest.raises(UsageError, match="a torch profiler is active"):
            measure(lambda: None, device="cpu")
        assert in_thread(MemoryEvents().start) is False
        torch.ones(3)
    assert any(row.key == "aten::ones" for row in profile.key_averages())
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


def test_a_scheduled_profiler_is_left_alone_while_it_waits_and_warms_up() -> None:
    # Starting the recorder in the warm-up step makes torch crash at the end of the schedule.
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule, acc_events=True) as profile:
        for _ in range(3):
            assert MemoryEvents().start() is False
            torch.ones(3)
            profile.step()
    assert any(row.key == "aten::ones" for row in profile.key_averages())
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


def construct() -> None:
    torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1))


def start_and_stop() -> None:
    profile = torch.profiler.profile()
    profile.start()
    torch.ones(3)
    profile.stop()


def start_and_stop_scheduled() -> None:
    profile = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1), acc_events=True
    )
    profile.start()
    for _ in range(3):
        assert MemoryEvents().start() is False
        torch.ones(3)
        profile.step()
    profile.stop()


_open = pytest.mark.skipif(not _compat.torch_has((2, 13)), reason="a stopped profile looks open")


@pytest.mark.parametrize(
    "use", [construct, start_and_stop, pytest.param(start_and_stop_scheduled, marks=_open)]
)
def test_a_profiler_that_was_used_without_a_context_ends_no_measuring(
    use: Callable[[], None],
) -> None:
    """torch counts its steps for the rest of the process."""
    use()
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024
    budget = lowtide.budget("1 MB")
    with budget:
        loss = torch.ones(8, requires_grad=True).exp().sum()
    loss.backward()
    assert budget.report().measured_peak is not None


def on_another_thread() -> int:
    if not _compat.torch_has((2, 12)):
        pytest.skip("torch's profiler does not start twice on this torch")
    return int(in_thread(run_profiler))


@pytest.mark.parametrize("run", [run_profiler, on_another_thread])
def test_a_profiler_started_meanwhile_works_and_voids_the_measurement(
    run: Callable[[], int],
) -> None:
    # Stopping a recorder that another thread has taken over makes torch crash.
    def step() -> None:
        assert run() == 1

    with pytest.raises(UsageError, match="another profiler was started during the recording"):
        measure(step, device="cpu")
    assert run_profiler() == 1
    assert in_thread(run_profiler) == 1
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


def test_stopping_while_the_other_profiler_still_runs() -> None:
    events = MemoryEvents()
    assert events.start()
    with torch.profiler.profile() as profile:
        assert events.stop() is None
        torch.ones(3)
    assert any(row.key == "aten::ones" for row in profile.key_averages())
    assert measure(lambda: torch.zeros(256), device="cpu").peak_bytes == 1024


@on_one_recorder
@pytest.mark.parametrize("before", ["", """
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    torch.ones(3)
"""])  # fmt: skip
def test_the_terminal_stays_clean(before: str) -> None:
    """What a profiler of the program's own reports of itself is left: Kineto may say when it
    starts and when it stops."""
    program = f"""
import os, torch
{before}
from lowtide.measure import measure
held = [torch.zeros(10)]
for _ in range(3):
    measure(lambda: held.clear() or os.write(2, b"the step's own line\\n"), device="cpu")
assert "KINETO_LOG_LEVEL" not in os.environ
"""
    done = ran_apart(program)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[-3:] == ["the step's own line"] * 3
    assert before or len(lines) == 3
    assert sum("profiler_st" in line for line in lines) <= 2
