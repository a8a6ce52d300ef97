"""A step traced on fake tensors: the graph of a step that has not been run.

Problem: a step that does not fit cannot be run to find out what to recompute. Invariant: the user's
own forward and autograd's own backward run, seen by the recorder and observer of real steps; only
the tensors have no memory, bytes are counted from their sizes, and times come from a model of the
device. No kernel runs and no side effects remain. If a forward needs the content of a tensor that
is not known, one real step is recorded instead, with a warning. Imports standins, costs, observer,
step. Rejected: torch.export, which has to be able to trace the whole model.
"""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide._compat import fakes
from lowtide._compat.switches import without_anomalies
from lowtide.dryrun.memory import FakeMemory
from lowtide.dryrun.recorder import Adding, FakeRecorder, FakeRecording
from lowtide.dryrun.standins import OWN, Found, RealState, StandIns
from lowtide.dryrun.traces import nothing_kept
from lowtide.dryrun.witness import Witness
from lowtide.errors import DryRunWarning, LowtideError, UsageError, users_frame
from lowtide.kernels.costs import CostModel
from lowtide.memory.marks import Marks, start_marks
from lowtide.models import foreign
from lowtide.observing.observer import Observer
from lowtide.observing.seen import Seen
from lowtide.planner import Graph
from lowtide.running.prepared import Signature, signature_of
from lowtide.step import Recording, current_recorder, recordable
from lowtide.tape.operators import Facts
from lowtide.tape.values import Handle, Operation, Region, Value


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
    """

    graph: Graph
    seen: Seen
    modules: tuple[str, ...]
    seconds: float
    source: str
    device: str
    lossless: bool = False


# ---------------------------------------------------------------------------- recording


class _Watching(Observer):
    """An observer that also knows modules and, on fake tensors, modelled times."""

    def __init__(
        self, memory: Marks | None, names: dict[int, str], witness: Witness | None = None
    ) -> None:
        super().__init__(memory)
        self._names = names
        self._inside: list[str] = []
        self.modules: list[str] = []
        self.lossless = False
        self.witness = witness
        if witness is not None:
            witness.inside = self._inside

    def operation(
        self,
        op: Operation,
        made: list[Value],
        args: Any,
        kwargs: Any,
        live: int,
        signature: Signature,
    ) -> None:
        fake = self.memory if isinstance(self.memory, FakeMemory) else None
        super().operation(op, made, args, kwargs, live, signature)
        if fake is not None:
            self.ops[-1].seconds = fake.last
            self.ops[-1].kind = None  # modelled times are not averaged with measured ones
        self.modules.append(self._inside[-1] if self._inside else "")
        if self.witness is not None:
            self.witness.operation(op.facts.name, made)

    def saved(self, value: Value, handle: Handle) -> None:
        super().saved(value, handle)
        if self.witness is not None:
            self.witness.saved(value, handle)

    def begin_backward(self, anchored: Container[int] = ()) -> None:
        super().begin_backward(anchored)
        if self.witness is not None:
            self.witness.backward_begins()

    def enter(self, module: nn.Module, _: Any) -> None:
        outer = self._inside[-1] if self._inside else ""
        name = self._names.get(id(module))
        self._inside.append(outer if name is None else name or OWN)

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self._inside:
            self._inside.pop()


class _Everything:
    """Decisions of a step in which nothing is recomputed. See `lowtide.tape.tape.Decisions`."""

    asks = True
    where = None  # values count whatever their device is

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.begun = False
        self.live = [0]

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        signature = signature_of(op, made, args, kwargs)
        self.observer.operation(op, made, args, kwargs, self.live[0], signature)

    def saved(self, value: Value, region: Region) -> bool:
        return True

    def packed(self, handle: Handle, value: Value) -> None:
        self.observer.saved(value, handle)

    def forgotten(self, value: Value) -> None:
        self.observer.let_go(value)

    def requested(self, handle: Handle) -> None:
        recorder = handle.tape.recorder
        if recorder is not None and torch.is_grad_enabled():
            return  # a differentiable backward inside the forward, such as a gradient penalty
        if not self.begun:
            self.begun = True
            if recorder is not None:
                recorder.pause()
            self.observer.begin_backward()
        value = handle.value
        self.observer.request(value, handle.sequence)

    def retained(self, value: Value, request: Handle) -> bool:
        return False

    def replayed(self, operations: list[Operation], seconds: float) -> None:
        """Ignored: only a value that was overwritten in place is replayed here."""

    def answered(self, value: Value) -> None:
        if self.begun and value.number >= 0:
            self.observer.answered()

    def out_of_memory(self, facts: Facts, func: Any, args: Any, kwargs: Any, attempt: int) -> bool:
        return False

    def replay_out_of_memory(self, attempt: int) -> bool:
        return False


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors in any nesting of lists, tuples and dictionaries (model outputs included)."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        return [t for part in result.values() for t in tensors_in(part)]
    if isinstance(result, list | tuple):
        return [t for part in result for t in tensors_in(part)]
    if is_dataclass(result) and not isinstance(result, type):
        return [t for part in fields(result) for t in tensors_in(getattr(result, part.name))]
    return []


def loss_of(result: Any) -> torch.Tensor | None:
    """What backward starts from: the sum of all tensors that require grad; None: none does."""
    wanted = [t for t in tensors_in(result) if t.requires_grad and not t.is_sparse]
    if not wanted:
        return None
    if len(wanted) == 1 and wanted[0].numel() == 1:
        return wanted[0]
    parts = [t.sum() if not t.is_complex() else t.real.sum() for t in wanted]
    total = parts[0]
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total


@contextmanager
def _module_calls(observer: _Watching) -> Iterator[None]:
    before = nn.modules.module.register_module_forward_pre_hook(observer.enter)
    after = nn.modules.module.register_module_forward_hook(observer.leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _record(
    observer: _Watching,
    recording: Callable[..., Recording],
    call: Callable[[], Any],
    begin: Callable[[Any], None] | None = None,
) -> None:
    """Forward and backward under an observer; `begin` is called with the open recorder."""
    decisions = _Everything(observer)
    with _module_calls(observer), recording(decisions, timed=begin is None) as tape:
        assert tape.recorder is not None
        decisions.live = tape.recorder.live
        observer.attach(tape.recorder)
        if begin is not None:
            begin(tape.recorder)
        result = call()
        if observer.witness is not None:
            observer.witness.returned(tensors_in(result), tape.recorder)
    if not decisions.begun:  # else the function ran backward itself
        loss = loss_of(result)
        del result
        observer.lossless = bool(observer.last_save)
        if loss is not None and loss.grad_fn is not None:
            leaves = [t for t in _compat.leaves_behind([loss]) if not fakes.is_fake(t)]
            before = [(leaf, leaf.grad) for leaf in leaves]
            observer.lossless = False
            loss.backward()
            if observer.witness is not None:
                observer.witness.collected(leaves)
            if isinstance(observer.memory, FakeMemory):
                for leaf, gradient in before:  # real leaves that `Found` did not find
                    leaf.grad = gradient
    observer.mark_end()


# ---------------------------------------------------------------------------- the two ways


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
    if not callable(function):
        raise UsageError(
            "the step must be a callable (a module, or a function of its arguments); got "
            f"{type(function).__name__}."
        )
    if current_recorder() is not None or not recordable():
        raise UsageError(
            "a plan cannot be made inside a budget or checkpointed region, nor with grad disabled "
            "or under torch.compile: there would be no backward to plan for. Call it outside."
        )
    found = Found(function, args, kwargs)
    device = _device(found)
    costs = CostModel(device, on)
    tensors = [*found.state(), *found.tensors]
    ours = not any(map(fakes.is_fake, tensors))
    mode = fakes.fake_mode(tensors)
    with nothing_kept(mode) if ours else nullcontext():
        step = _fake_or_why_not(
            StandIns(found, device, mode), costs, function, args, kwargs, witness, real
        )
    if isinstance(step, Dry):
        if real:
            _tell_of_no_loss(step)
        return step
    reason = step
    # If the error is the user's own, the real step raises it again.
    try:
        step, moved = _real(found, device, function, args, kwargs, witness)
    finally:
        _compat.dry_run.outputs.clear()
    stays = ""
    if moved:
        stays = (
            f" The step also changed parameters ({moved} of them), and that was not undone: leave "
            "optimizer.step(), or what else writes them, out of it."
        )
    warnings.warn(
        f"the step cannot run on fake tensors ({reason}): one real forward and "
        "backward was run and recorded in its place. Gradients, buffers and random state were put "
        f"back.{stays}",
        DryRunWarning,
        stacklevel=users_frame(),
    )
    _tell_of_no_loss(step)
    return step


def _tell_of_no_loss(step: Dry) -> None:
    if step.lossless:
        warnings.warn(
            "the step saved tensors for a backward, but returned nothing that a backward could "
            "start from, so this is about its forward alone. Return the loss itself (not its "
            "item(), and not detached), alone or in tuples, lists, dicts or dataclasses.",
            DryRunWarning,
            stacklevel=users_frame(),
        )


def _fake_or_why_not(
    stand: StandIns,
    costs: CostModel,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    witness: Witness | None,
    real: bool,
) -> Dry | str:
    """The step on fake tensors, or why it has to be run on real ones."""
    try:
        with _no_collector(), without_anomalies():
            return _fake(stand, costs, function, args, kwargs, witness)
    except LowtideError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if any(t.device.type == "meta" or fakes.is_fake(t) for t in stand.found.state()):
            raise UsageError(
                f"the step cannot run on fake tensors ({reason}), and the model has "
                "no memory of its own to run it with. Build the model on a real device."
            ) from error
        if not real:
            raise UsageError(f"the step cannot run on fake tensors ({reason}).") from error
        if witness is not None:
            witness.starts_over()
        return reason
    finally:
        _compat.dry_run.outputs.clear()


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


def _fake(
    stand: StandIns,
    costs: CostModel,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    witness: Witness | None = None,
) -> Dry:
    memory = FakeMemory(costs, stand.mode)
    if witness is not None:
        memory = witness.counts(costs, stand.mode)
    observer = _Watching(memory, stand.found.names(), witness)
    with warnings.catch_warnings(), stand, ExitStack() as stack:
        # torch reads `.grad` of each tensor that it makes a fake one of.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        fake_args, fake_kwargs = stand.fake(args), stand.fake(kwargs)
        if witness is not None:
            witness.begins(stand.found, stand.fake)
        function = _with_fake_self(stand, function)
        stack.callback(memory.undone.put_back)
        stack.callback(setattr, _compat.dry_run, "on", _compat.dry_run.on)
        _compat.dry_run.on = True
        stack.enter_context(fakes.unlogged())
        stack.enter_context(stand.mode)
        stack.enter_context(memory)
        stack.enter_context(foreign.taken_for_real())
        adding = stack.enter_context(Adding())

        def begin(recorder: FakeRecorder) -> None:
            recorder.stand, recorder.adding = stand, adding
            memory.ask = recorder.answer
            stack.enter_context(fakes.listing(lambda tensor: recorder.real(tensor).tolist()))
            stack.enter_context(fakes.formatting(recorder.text))

        _record(observer, FakeRecording, lambda: function(*fake_args, **fake_kwargs), begin)
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


def _real(
    found: Found,
    device: torch.device,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    witness: Witness | None = None,
) -> tuple[Dry, int]:
    """The step, and how many parameters it wrote."""
    with RealState(found) as state:
        if witness is not None:
            witness.begins(found, lambda tensor: tensor)
        observer = _Watching(start_marks(device), found.names(), witness)
        began = time.perf_counter()
        try:
            _record(observer, Recording, lambda: function(*args, **kwargs))
        finally:
            seconds = time.perf_counter() - began
            observer.finish(_nothing)
        if witness is not None:
            witness.ends(observer)
    return _dry(observer, seconds, "recorded", str(device)), state.moved


def _nothing(observer: Observer) -> None:
    """Does nothing, as the caller makes the graph."""


def _dry(observer: _Watching, seconds: float, source: str, device: str) -> Dry:
    graph = observer.graph()
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
    )
