"""Run one program under one method, record everything that semantics rule 1 and 2 name, compare.

The problem: "the same bits" covers outputs, losses, gradients, buffers, inputs that were written,
generators, how often Python ran, and what is alive afterwards; a comparison that forgets one
passes when it should not.

The invariant: a record is made of copies (bytes), so that recording keeps no tensor of the step
alive, and the order of its entries depends on the program only. A program is a namespace with
`state`, `data`, `forward`, `backward` and some flags (see source.py); a pasted
reproduction passes its own globals.

It imports torch and functions.py; lowtide only where a method needs it, so that the harness can
be checked against torch's own checkpoint alone.

Rejected: torch.equal on live tensors. It holds both steps in memory, hides NaN and the sign of
zero, and makes the check for leaks impossible.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

# The first operation under any dispatch mode imports this; done here, or the frames of that
# import would keep tensors of the first program alive and look like a leak.
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import functions, modules, tools
from .verdict import Outcome, Verdict, array, bits, judge

# "both" is regions inside a budget, "policy" regions that keep about half of their operations;
# "idle" a budget with so much room that it stops recording, "alone" one that watches no step.
METHODS = ("plain", "torch", "checkpoint", "policy", "budget", "both", "idle", "alone")
BUDGETED = ("budget", "both", "idle", "alone")
ROOMY = ("idle", "alone")
# A budget with room idles from the eighth on.
STEPS = {"budget": 3, "both": 3, "idle": 11, "alone": 3}
FRACTIONS = (0.3, 0.5, 0.7, 0.85, 1.0)
Namespace = dict[str, Any]


def direct(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def torch_region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def keep_some(operation: Any) -> bool:
    """A policy without reason: plans are drawn up by chance, results must not notice."""
    return zlib.crc32(f"{operation.name} {operation.nbytes}".encode()) % 2 == 0


def region_of(method: str) -> Callable[..., Any]:
    """The callable that stands for a region under `method`."""
    if method == "torch":
        return torch_region
    if method in ("checkpoint", "both", "policy"):
        region: Callable[..., Any] = importlib.import_module("lowtide").checkpoint
        return functools.partial(region, policy=keep_some) if method == "policy" else region
    return direct


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Collector off: what only the collector would free is a leak (semantics rule 8)."""
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once only, in whichever run is first
            yield
    finally:
        gc.enable()


class _Run:
    """One run of a program: its tools for the program text, and the record it fills."""

    def __init__(self, program: Namespace, method: str, fraction: float) -> None:
        self.program, self.method = program, method
        self.out = Outcome(fraction=fraction)
        self.calls: list[Any] = []
        self.stash: dict[str, Any] = {}
        self.refs: list[StorageWeakRef] = []
        self.budget: Any = None
        if method in BUDGETED:
            limit = "1 GB" if method in ROOMY else fraction
            self.budget = importlib.import_module("lowtide").budget(limit)
        self.wakes = self.stumbled = False
        self.index = 0
        self.region = region_of(method)
        program.update(
            region=self.region,
            calls=self.calls,
            turn=self.turn,
            stumble=self.stumble,
            stash=self.stash,
            watch=self.watch,
            observe=self.observe,
        )

    def wake(self) -> None:
        """As if the step that is not recorded had turned out to be another one just now, or one
        that is not watched had come near its limit."""
        if self.method == "alone":
            importlib.import_module(".alone", __package__).watch_from_here()
            return
        recorder = importlib.import_module("lowtide.step").current_recorder()
        calls = getattr(recorder, "calls", None)
        if calls is not None and calls.idle:
            recorder.wake()

    def turn(self) -> int:
        """The number of the step, for what changes from step to step."""
        return self.index

    def stumble(self) -> None:
        """End the first attempt at each step here."""
        if not self.stumbled:
            self.stumbled = True
            raise tools.Stop

    def watch(self, *tensors: Tensor) -> None:
        if self.wakes:
            self.wake()
        self.refs += [StorageWeakRef(t.untyped_storage()) for t in tensors]  # type: ignore[no-untyped-call]

    def alive(self) -> list[int]:
        """Which of the watched storages are still in memory."""
        gone = [ref.expired() for ref in self.refs]  # type: ignore[no-untyped-call]
        return [i for i, expired in enumerate(gone) if not expired]

    def observe(self, value: Tensor) -> None:
        self.calls.append(bits(value))

    def note(self, label: str, value: object) -> None:
        self.out.record.append((label, bits(value)))
        if isinstance(value, Tensor) and value.is_floating_point():
            self.out.finite = self.out.finite and bool(np.isfinite(array(value)).all())

    def note_forward(self, state: dict[str, Any], result: dict[str, list[Tensor]]) -> None:
        known: dict[int, str] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                known.setdefault(value.untyped_storage()._cdata, name)
        for kind, tensors in result.items():
            for i, tensor in enumerate(tensors):
                label = f"{kind}[{i}]"
                self.note(label, tensor)
                self.note(f"{label}.stride", tensor.stride())
                shared = known.setdefault(tensor.untyped_storage()._cdata, label)
                self.note(f"{label} shares its storage with", shared)
        # Counted are tensors that only autograd may still need.
        held = [t.untyped_storage()._cdata for t in self.stash.values()]
        inside = [i for i, ref in enumerate(self.refs) if ref.cdata not in {*known, *held}]
        self.out.watched += len(inside)
        self.out.freed += len(set(inside) - set(self.alive()))

    def note_state(self, state: dict[str, Any], extra: list[Any]) -> None:
        for name, value in state.items():
            if isinstance(value, torch.Generator):
                self.note(f"generator {name}", value.get_state())
            elif isinstance(value, torch.nn.Module):
                self.note_module(name, value)
            else:
                self.note(name, value)
                if value.is_leaf:
                    self.note(f"{name}.grad", value.grad)
        for i, value in enumerate(extra):
            self.note(f"extra[{i}]", value)
        self.note("default generator", torch.get_rng_state())
        self.note("calls", tuple(self.calls))

    def note_module(self, name: str, module: torch.nn.Module) -> None:
        for part, parameter in module.named_parameters():
            self.note(f"{name}.{part}", parameter)
            self.note(f"{name}.{part}.grad", parameter.grad)
        for part, buffer in module.named_buffers():
            self.note(f"{name}.{part}", buffer)
        for part, child in module.named_modules():
            for key, value in vars(child).items():
                if isinstance(value, int | float):
                    self.note(f"{name}.{part}.{key}", value)

    def step(self, index: int, state: dict[str, Any]) -> None:
        """One step; one that stumbles is tried again, as after a batch that did not load."""
        self.index, self.stumbled = index, False
        try:
            self.attempt(index, state)
        except tools.Stop:
            self.calls.append("stumbled")
            self.attempt(index, state)

    def attempt(self, index: int, state: dict[str, Any]) -> None:
        program = self.program
        context = contextlib.nullcontext() if self.budget is None else self.budget
        extra: list[Any] = []
        self.out.where = f"entering step {index}"
        with context:
            self.out.where = f"forward of step {index}"
            enter = self.region if program["OUTER"] else direct
            result = enter(program["forward"], state)
            self.note_forward(state, result)
            if program["INSIDE"]:
                self.out.where = f"backward of step {index}"
                extra = program["backward"](state, result)
        if not program["INSIDE"]:
            self.out.where = f"backward of step {index}"
            extra = program["backward"](state, result)
        self.out.where = f"report of step {index}"
        self.note_state(state, extra)
        self.note_peak(index)
        self.out.where = ""

    def note_peak(self, index: int) -> None:
        """Hold steps to their limit that follow a plan: a first step is modelled (rule 13)."""
        if self.budget is None:
            return
        report = self.budget.report()
        if not report.planned:
            return
        peak, limit = report.measured_peak, report.limit
        if peak is not None and limit is not None and peak > limit and not self.out.exceeded:
            self.out.exceeded = f"after step {index}: measured {peak} B, limit {limit} B"

    def descend(self, state: dict[str, Any]) -> None:
        """A step of gradient descent, so that later steps read parameters that moved."""
        with torch.no_grad():
            for value in tools.leaves(state):
                if value.is_leaf and value.grad is not None:
                    grad = value.grad.to_dense() if value.grad.is_sparse else value.grad
                    value.sub_(torch.nan_to_num(grad).clamp(-1, 1), alpha=0.05)
                    if "between" not in self.program:
                        value.grad = None

    def all_steps(self, steps: int) -> None:
        torch.manual_seed(20)
        state: dict[str, Any] = self.program["state"]()
        for index in range(steps):
            state.update(self.program["data"](index))
            self.wakes = self.method in ROOMY and index >= steps - 2
            self.step(index, state)
            self.calls.clear()
            self.stash.clear()
            if index + 1 < steps:
                self.descend(state)
                self.program.get("between", bool)(state)


def run(program: Namespace, method: str, *, steps: int = 1, fraction: float = 1.0) -> Outcome:
    """Run `program` once under `method` and say what it did; errors are part of the outcome."""
    alone: Any = contextlib.nullcontext
    if method == "alone":
        alone = importlib.import_module(".alone", __package__).all_alone
    with _quiet(), alone():
        this = _Run(program, method, fraction)
        try:
            this.all_steps(steps)
        except Exception as error:  # the comparison decides what an error means
            this.out.error = error.with_traceback(None)
            error.__context__ = None
            this.calls.clear()
            this.stash.clear()
        else:
            this.out.leaked = this.alive()
        this.refs.clear()
    return this.out


def run_within_budget(program: Namespace, method: str, fraction: float, *, steps: int) -> Outcome:
    """As `run`, trying larger fractions until one can be met; 1.0 must be (rule 13)."""
    budget_error: type[Exception] = importlib.import_module("lowtide").BudgetError
    for candidate in [f for f in FRACTIONS if f >= fraction]:
        outcome = run(program, method, steps=steps, fraction=candidate)
        if not isinstance(outcome.error, budget_error):
            break
    return outcome


def compare(
    program: Namespace, method: str, *, fraction: float = 0.5, peaks: bool = False
) -> Verdict:
    """Run a program plain and under `method` and compare; also for pasted reproductions.

    With `peaks`, a budget must also have been kept. That is asked for apart from the bits: with
    tensors of some bytes each, a generator's state (5 kB on the CPU) is most of a step.
    """
    steps = STEPS.get(method, 1)
    plain = run(program, "plain", steps=steps)
    if method in BUDGETED:
        other = run_within_budget(program, method, fraction, steps=steps)
    else:
        other = run(program, method, steps=steps)
    verdict = judge(plain, other)
    if verdict.kind == "exceeded" and not peaks:
        verdict = Verdict("equal")
    if verdict.kind == "refused" and _excused(program, method, other):
        verdict = Verdict("stale", verdict.detail)
    if verdict.kind == "different" and _unseen(program, method):
        # Everything else being right is shown by the same program with all of it recorded.
        whole = _recorded_whole(program, method)
        if judge(plain, whole).kind == "equal":
            verdict = Verdict("unseen", verdict.detail)
    if verdict.bad and judge(plain, run(program, "plain", steps=steps)).bad:
        verdict = Verdict("unstable", "two plain runs differ")
    return dataclasses.replace(verdict, watched=plain.watched, freed=(plain.freed, other.freed))


def _excused(program: Namespace, method: str, other: Outcome) -> bool:
    """Rule 4: a write after a region or a budget has closed may be answered with ReplayError."""
    if type(other.error).__name__ != "ReplayError":
        return False
    unseen: bool = program["TOUCHES"] and not (method in BUDGETED and program["INSIDE"])
    return unseen or (method not in BUDGETED and program["WRITES"] and not program["OUTER"])


def _unseen(program: Namespace, method: str) -> bool:
    """Rule 4: a write that moves no version counter is not seen where nobody records."""
    return bool(program["BEHIND"] and method not in BUDGETED and not program["OUTER"])


def _recorded_whole(program: Namespace, method: str) -> Outcome:
    """As `run`, with the whole forward in one region."""
    program["OUTER"] = True
    try:
        return run(program, method)
    finally:
        program["OUTER"] = False


TOOLS: Namespace = {
    "torch": torch,
    "F": F,
    "copy": copy,
    "direct": direct,
    **{
        name: value
        for module in (functions, modules, tools)
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    },
}
