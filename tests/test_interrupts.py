"""Interrupts that arrive while lowtide opens or closes a recording (rule 10).

Ctrl-C is noticed between any two instructions of Python. A trace function raises one at each event
of the modules that open and close recordings, in one run after the other.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
from collections.abc import Callable, Container
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import Way, bits, budgeted, check, gradients, leaf
from lowtide import engine
from lowtide._compat import profiling
from lowtide.learning.choosing import Choosing
from lowtide.learning.settling import Settling
from lowtide.loop import Loop
from lowtide.memory import events, profiler
from lowtide.memory.events import MemoryEvents
from lowtide.step import current_recorder
from lowtide.tape.known import Entry
from lowtide.tape.recorder import Recorder

HOME = Path(lowtide.__file__).parent
FILES = {
    *(str(HOME / name) for name in ("step.py", "loop.py", "budget.py", "fitting.py")),
    *(str(HOME / "_compat" / name) for name in ("autograd.py", "dispatch.py")),
    str(HOME / "checkpoint.py"),
    str(Path(torch.__file__).parent / "utils" / "_python_dispatch.py"),
}
Run = Callable[[], Tensor]


def regions() -> Run:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)

    def inner(x: Tensor) -> Tensor:
        return lowtide.checkpoint(model, x).exp()

    return lambda: lowtide.checkpoint(inner, x).sum()


def fitted() -> Run:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    budget = lowtide.fit(model, "1 GB")

    def run() -> Tensor:
        assert budget.active
        loss: Tensor = model(x).exp().sum()
        return loss

    return run


def budgets() -> Run:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    budget = lowtide.budget("1 GB")

    def run() -> Tensor:
        with budget:
            loss: Tensor = model(x).exp().sum()
        return loss

    return run


class Interrupts:
    """A trace function that raises at the event of this number, in the files above or in these."""

    def __init__(self, at: int, files: Container[str] = FILES) -> None:
        self.left, self.files = at, files
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        code = frame.f_code
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event == "line" and line in ("try:", "with _lock:"):
            return self  # no interrupt is noticed there, unlike a trace function's error
        if event == "call" and code.co_qualname == "Budget.__exit__":
            # Not yet inside its `try`. If the program itself has written the `with`, nothing around
            # that is lowtide's.
            around = frame.f_back
            if around is not None and around.f_code.co_filename == __file__:
                return self
        if event in ("call", "line"):
            self.left -= 1
            if self.left < 0:
                self.where = f"{code.co_qualname}, line {frame.f_lineno}, {event}"
                raise KeyboardInterrupt
        return self


def interrupted(run: Callable[[], object], at: int, files: Container[str] = FILES) -> str | None:
    """Where a run was interrupted at this event; None if it has fewer."""
    interrupt = Interrupts(at, files)
    sys.settrace(interrupt)
    try:
        run()
    except KeyboardInterrupt:
        return interrupt.where
    finally:
        sys.settrace(None)
    return None


def settled() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    shut = torch._C._dispatch_tls_is_dispatch_key_excluded(
        torch._C.DispatchKey.AutogradFunctionality
    )
    on = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    return (current_recorder(), hooks, modes, shut, on) == (None, None, [], False, False)


@pytest.mark.parametrize("make", [regions, fitted, budgets])
def test_an_interrupt_anywhere_leaves_nothing_open(make: Callable[[], Run]) -> None:
    run = make()
    expected = bits(run())
    run().backward()
    for at in itertools.count():
        where = interrupted(run, at)
        if where is None:
            break
        assert settled(), where
        loss = run()
        assert bits(loss) == expected, where
        loss.backward()
        assert settled(), where
    assert at > 50


def test_an_interrupt_of_a_measurement_leaves_no_profiler_behind() -> None:
    """Starting and stopping torch's profiler takes long, so an interrupt often comes right after. A
    profiler that nobody knows of stays on: nothing is measured any more, and torch crashes when the
    process ends."""

    def measured() -> int:
        recording = MemoryEvents()
        assert recording.start(), recording.obstacle
        torch.ones(256)
        timeline = recording.stop()
        assert timeline is not None, recording.obstacle
        return timeline.peak

    assert measured() == 1024
    files = [events.__file__, profiler.__file__, profiling.__file__]
    for at in itertools.count():
        where = interrupted(measured, at, files)
        if where is None:
            break
        assert measured() == 1024, where
        assert not profiling.profiler_on_this_thread(), where
    assert at > 50


def test_a_profiler_that_was_prepared_before_an_interrupt_keeps_no_other_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt most often comes between the two calls that start torch's profiler, as the first
    takes long. Torch 2.10 then prepared none again, neither lowtide's nor the program's own."""
    prepare = profiling._bindings._prepare_profiler
    errors = [KeyboardInterrupt(), RuntimeError("it is prepared, says torch 2.10")]

    def prepared(*args: Any) -> None:
        with contextlib.suppress(RuntimeError):
            prepare(*args)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(profiling._bindings, "_prepare_profiler", prepared)
    with pytest.raises(KeyboardInterrupt):
        MemoryEvents().start()
    assert lowtide.measure(lambda: torch.ones(256), device="cpu").peak_bytes == 1024
    monkeypatch.undo()
    with torch.profiler.profile() as own:
        torch.ones(4)
    assert own.events()


class Interrupted(BaseException):
    """As a signal's handler may raise it; of a `KeyboardInterrupt`, pytest would end."""


def test_no_interrupt_comes_between_the_two_calls_that_start_torchs_profiler() -> None:
    """Torch would say on stderr, when the next one is prepared, that the first was cancelled."""

    def interrupt(_frame: FrameType, event: str, called: Any) -> None:
        if event == "c_return" and called.__name__ == "_prepare_profiler":
            raise Interrupted

    events = MemoryEvents()
    sys.setprofile(interrupt)
    try:
        started = events.start()
    finally:
        sys.setprofile(None)
    assert started
    assert events.stop() is not None


def test_an_interrupt_while_the_recorder_is_chosen_leaves_the_choice_to_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step of a process loads the compiled core, which takes long enough to be hit."""
    chosen = engine.name()
    run = budgets()
    expected = bits(run())
    monkeypatch.setenv("LOWTIDE_ENGINE", chosen)
    monkeypatch.setattr(torch._ops, "_higher_order_ops", torch._ops._higher_order_ops)
    for at in itertools.count():
        monkeypatch.setattr(engine, "_choice", engine._Choice())
        where = interrupted(run, at, {engine.__file__})
        assert bits(run()) == expected, where
        assert engine.name() == chosen, where
        if where is None:
            break
    assert at > 10


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.parametrize(
    ("part", "at"),
    [(Settling, "settle"), (Choosing, "for_this_backward"), (Loop, "asked_first")],
    ids=["settle", "for_this_backward", "asked_first"],
)
def test_a_backward_that_was_interrupted_before_it_began_is_planned_the_second_time(
    monkeypatch: pytest.MonkeyPatch, part: type, at: str
) -> None:
    """Rule 13: what backward keeps is planned at its first request, which may take a while. A
    second call went on without a plan."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model, x = nn.Sequential(*layers, Mean()), torch.randn(256, 64)
    budget, step = budgeted(model, x, 0.6)
    for _ in range(0 if at == "settle" else 3):  # planned only when backward begins, or before
        step()
    planned, met = getattr(part, at), list[str]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not met:
            met.append(at)
            raise KeyboardInterrupt
        return planned(*args, **kwargs)

    monkeypatch.setattr(part, at, interrupted)

    def again() -> None:
        model.zero_grad()
        with budget:
            loss = model(x)
        try:
            loss.backward()
        except KeyboardInterrupt:  # whose traceback is there as long as it is handled
            loss.backward()

    peak = lowtide.measure(again, device="cpu").peak_bytes
    assert met
    limit = budget.report().limit
    assert limit is not None
    assert peak <= limit + x.nbytes  # the gradient with which the first call began


def test_an_interrupt_that_python_swallows_leaves_no_storage_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 1: an interrupt in the callback of a weak reference is only printed. The entry of the
    freed storage stays, and must not be taken for that of another storage at the same address."""
    plain, met = Recorder.new_count, set[int]()

    def new_count(table: dict[int, Entry]) -> tuple[list[int], Callable[[Any], None]]:
        live, forget = plain(table)

        def interrupted(entry: Entry) -> None:
            if id(entry) not in met:
                met.add(id(entry))
                raise KeyboardInterrupt
            forget(entry)

        return live, interrupted

    monkeypatch.setattr(Recorder, "new_count", staticmethod(new_count))
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    weight = torch.randn(8, 8)

    def chain(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ weight).tanh().exp().sin()
        return x

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4, 8)
        return gradients(way(chain, x).sum(), x)

    with engine.use("python"):
        check(scenario)
    assert met


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("at", ["_finish", "_next_decisions", "_started"])
def test_an_interrupt_between_two_steps_of_a_context_arrives_as_itself(
    monkeypatch: pytest.MonkeyPatch, at: str, caught: bool
) -> None:
    """Where one step has been learned from and the next has not begun, which planning may make
    long. The program may go on inside the context, or leave it with the interrupt."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    budget = lowtide.budget("1 GB")

    def run() -> list[Any]:
        model.zero_grad()
        with budget:
            model(x).exp().sum().backward()
            try:
                model(x + 1).exp().sum().backward()
            except KeyboardInterrupt:
                if not caught:
                    raise
            model(x + 2).exp().sum().backward()
        return [bits(parameter.grad) for parameter in model.parameters()]

    expected, called = run(), getattr(Loop, at)

    def interrupted(self: Loop, *args: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "next_step" and not met:
            met.append(self)
            raise KeyboardInterrupt
        return called(self, *args)

    met: list[Loop] = []
    with monkeypatch.context() as patched:
        patched.setattr(Loop, at, interrupted)
        with contextlib.nullcontext() if caught else pytest.raises(KeyboardInterrupt):
            run()
    assert met
    assert settled()
    assert run() == expected
    assert budget.report().steps > 3
