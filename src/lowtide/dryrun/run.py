"""A step traced on fake tensors: the graph of a step that has not been run.

Problem: a step that does not fit cannot be run to find out what to recompute. Invariant: the user's
own forward and autograd's own backward run, seen by the recorder and observer of real steps; only
the tensors have no memory, bytes are counted from their sizes, and times come from a model of the
device. No kernel runs and no side effects remain. If a forward needs the content of a tensor that
is not known, one real step is recorded instead, with a warning. Imports standins, putback,
watching, costs, step. Rejected: torch.export, which has to be able to trace the whole model.
"""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide._compat.sharding import only_real
from lowtide._compat.switches import without_anomalies
from lowtide.dryrun.found import Found
from lowtide.dryrun.lines import line_of_error
from lowtide.dryrun.memory import FakeMemory
from lowtide.dryrun.provenance import UnansweredError
from lowtide.dryrun.putback import RealState
from lowtide.dryrun.recorder import Adding, FakeRecorder, FakeRecording
from lowtide.dryrun.standins import StandIns
from lowtide.dryrun.traces import nothing_kept
from lowtide.dryrun.watching import Watching, record
from lowtide.dryrun.witness import Witness
from lowtide.errors import DryRunWarning, LowtideError, UsageError, users_frame
from lowtide.kernels.costs import CostModel
from lowtide.memory.marks import start_marks
from lowtide.models import foreign
from lowtide.observing.graphs import graph_of
from lowtide.observing.observer import Observer
from lowtide.observing.seen import Seen
from lowtide.planner import Graph
from lowtide.step import Recording, check_runs_now, current_recorder, recordable


class _Step(NamedTuple):
    """What is to be traced: a function, what it is called with, and who watches."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    witness: Witness | None


@dataclass(frozen=True)
class Dry:
    """The result of a dry run.

    Attributes:
        graph: the step.
        seen: what a budget needs to follow a plan for it.
        modules: for each operation, the qualified name of the module that called it; `OWN` directly
            in the forward of the only model, "" outside of modules.
        seconds: forward and backward together, modelled or measured.
        source: "fake", or "recorded" if a real step had to be run.
        device: the device that `seconds` refers to.
        lossless: autograd has saved something, but nothing that the step returned requires grad:
            there was no backward.
        guessed: its backward began with that of a loss which is taken to come, see `outside`.
    """

    graph: Graph
    seen: Seen
    modules: tuple[str, ...]
    seconds: float
    source: str
    device: str
    lossless: bool = False
    guessed: bool = False


def dry_run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on: str | None = None,
    witness: Witness | None = None,
    real: bool = True,
) -> Dry:
    """Trace a step on fake tensors; if that is not possible, run and record a real one.

    Times are those of the device named `on`, by default of the one that the step would run on. A
    `witness` records where everything comes from. Without `real`, no real step is run.

    Raises:
        UsageError: `function` cannot be called; called inside a budget or region, or with grad
            disabled; or a real step is needed, but the model has no memory, or `real` is false.
    """
    check_step(function)
    found = Found(function, args, kwargs)
    device = _device(found)
    costs = CostModel(device, on)
    tensors = [*found.state(), *found.tensors]
    refuse_unsized(tensors)
    ours = not any(map(fakes.is_fake, tensors))
    mode = fakes.fake_mode(tensors)
    step = _Step(function, args, kwargs, witness)
    with nothing_kept(mode) if ours else nullcontext():
        dry = _fake_or_why_not(StandIns(found, device, mode), costs, step, real)
    if isinstance(dry, Dry):
        if real:
            tell_of_no_loss(dry)
        return dry
    reason = dry
    # If the error is the user's own, the real step raises it again.
    try:
        dry, moved = _real(found, device, step)
    finally:
        _compat.dry_run.outputs.clear()
    _tell_of_a_real_step(reason, moved)
    tell_of_no_loss(dry)
    return dry


def check_step(function: object, what: str = "a plan cannot be made") -> None:
    """Refuse what is no step, and where none can be recorded; `what` cannot be done there."""
    if not callable(function):
        raise UsageError(
            "the step must be a callable (a module, or a function of its arguments); got "
            f"{type(function).__name__}."
        )
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise UsageError(
            f"the step is a module or a function, not the class {function.__name__}: make one of "
            f"it, {function.__name__}(...), and pass that."
        )
    check_runs_now(function)
    if current_recorder() is not None or not recordable():
        raise UsageError(
            f"{what} inside a budget or checkpointed region, nor with grad disabled or under "
            "torch.compile: there would be no backward. Call it outside."
        )


def refuse_unsized(tensors: list[torch.Tensor]) -> None:
    lazy = sum(map(torch.nn.parameter.is_lazy, tensors))
    if lazy:
        raise UsageError(
            f"{lazy} of the step's parameters and buffers have no size yet (LazyLinear and other "
            "lazy modules). Call the model once on a batch, under torch.no_grad(): that makes them."
        )


def _tell_of_a_real_step(reason: str, moved: int) -> None:
    stays = ""
    if moved:
        stays = (
            f" The step also changed parameters or other tensors ({moved} of them), and that was "
            "not undone: leave optimizer.step(), or what else writes them, out of it."
        )
    warnings.warn(
        f"the step cannot run on fake tensors ({reason}): one real forward and "
        "backward was run and recorded in its place. Gradients, buffers and random state were put "
        f"back.{stays}",
        DryRunWarning,
        stacklevel=users_frame(),
    )


def tell_of_no_loss(step: Dry) -> None:
    if step.lossless:
        warnings.warn(
            "the step saved tensors for a backward, but returned nothing that a backward could "
            "start from, so this is about its forward alone. Return the loss itself (not its "
            "item(), and not detached), alone or in tuples, lists, dicts or dataclasses.",
            DryRunWarning,
            stacklevel=users_frame(),
        )


def _fake_or_why_not(stand: StandIns, costs: CostModel, step: _Step, real: bool) -> Dry | str:
    """The step on fake tensors, or why it has to be run on real ones; without `real`, an error."""
    try:
        known = only_real(stand.found.modules())
        if known is not None:
            raise UnansweredError(known)
        with _no_collector(), without_anomalies():
            return _fake(stand, costs, step)
    except LowtideError:
        raise
    except Exception as error:
        reason = _why_not(error)
        if any(t.device.type == "meta" or fakes.is_fake(t) for t in stand.found.state()):
            raise UsageError(
                f"the step cannot run on fake tensors ({reason}), and the model has "
                "no memory of its own to run it with. Build the model on a real device."
            ) from error
        if not real:
            raise UsageError(f"the step cannot run on fake tensors ({reason}).") from error
        if step.witness is not None:
            step.witness.starts_over()
        return reason
    finally:
        _compat.dry_run.outputs.clear()


def _why_not(error: Exception) -> str:
    """The error in a few words, with the user's line at which it was raised."""
    known = isinstance(error, UnansweredError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    line = line_of_error(error)
    return " ".join(text.split())[:300] + (f", at {line}" if line else "")


@contextmanager
def _no_collector() -> Iterator[None]:
    """Thousands of fake tensors live until backward: scanning them for cycles again and again takes
    a quarter of a dry run, and more of a longer one."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _device(found: Found) -> torch.device:
    """The device the step runs on: that of its parameters, or else of its other tensors."""
    for tensor in (*found.state(), *found.tensors):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _fake(stand: StandIns, costs: CostModel, step: _Step) -> Dry:
    witness = step.witness
    memory = FakeMemory(costs, stand.mode)
    if witness is not None:
        memory = witness.counts(costs, stand.mode)
    observer = Watching(memory, stand.found.names(), witness)
    with warnings.catch_warnings(), stand, ExitStack() as stack:
        # torch reads `.grad` of each tensor that it makes a fake one of.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        args, kwargs = stand.fake(step.args), stand.fake(step.kwargs)
        if witness is not None:
            witness.begins(stand.found, stand.fake)
        function = _with_fake_self(stand, step.function)
        stack.callback(memory.undone.put_back)
        stack.callback(setattr, _compat.dry_run, "on", _compat.dry_run.on)
        _compat.dry_run.on = True
        stack.enter_context(fakes.unlogged())
        stack.enter_context(fakes.lists_refused())
        stack.enter_context(stand.mode)
        stack.enter_context(memory)
        stack.enter_context(foreign.taken_for_real())
        adding = stack.enter_context(Adding())

        def begin(recorder: FakeRecorder) -> None:
            recorder.stand, recorder.adding = stand, adding
            memory.ask = recorder.answer
            stack.enter_context(fakes.listing(lambda tensor: recorder.real(tensor).tolist()))
            stack.enter_context(fakes.formatting(recorder.text))

        record(observer, FakeRecording, lambda: function(*args, **kwargs), begin)
        observer.finish(_nothing)
        if witness is not None:
            witness.ends(observer)
    made = _dry(observer, memory.seconds, "fake", memory.costs.model.name)
    return replace(made, seen=made.seen.of_leaves(stand.originals))


def _with_fake_self(stand: StandIns, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the tensors that `functools.partial` binds replaced by fake ones."""
    if not isinstance(function, functools.partial):
        return function
    args, keywords = stand.fake(function.args), stand.fake(dict(function.keywords))
    return functools.partial(function.func, *args, **keywords)


def _real(found: Found, device: torch.device, step: _Step) -> tuple[Dry, int]:
    """The step, and how many parameters it wrote."""
    function, args, kwargs, witness = step
    with RealState(found) as state:
        if witness is not None:
            witness.begins(found, lambda tensor: tensor)
        observer = Watching(start_marks(device), found.names(), witness)
        began = time.perf_counter()
        try:
            record(observer, Recording, lambda: function(*args, **kwargs))
        finally:
            seconds = time.perf_counter() - began
            observer.finish(_nothing)
        if witness is not None:
            witness.ends(observer)
    return _dry(observer, seconds, "recorded", str(device)), state.moved


def _nothing(observer: Observer) -> None:
    """Does nothing, as the caller makes the graph."""


def _dry(observer: Watching, seconds: float, source: str, device: str) -> Dry:
    graph = graph_of(observer)
    if not observer.requests:  # no backward asked for anything, so the graph's events are guesses
        graph = replace(graph, events=())
    return Dry(
        graph,
        observer.seen(),
        tuple(observer.modules),
        seconds,
        source,
        device,
        observer.lossless,
        observer.guessed,
    )
