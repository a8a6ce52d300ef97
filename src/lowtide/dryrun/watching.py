"""A step recorded from its first operation to the end of its backward, with nothing recomputed.

Problem: a dry run, and the real step that stands in for one, want what a budget's first step shows,
and also which module called each operation. Invariant: the observer sees what it would in a step
under a budget; the function runs its own backward, or backward starts from all that it returns.
Imports batches, memory, outside, witness, observer, step. Rejected: the decisions of a real step
with a limit that is never reached, which look at times and room.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.batches import tensors_of
from lowtide.dryrun.found import OWN
from lowtide.dryrun.memory import FakeMemory
from lowtide.dryrun.outside import stand_in
from lowtide.dryrun.witness import Witness
from lowtide.memory.marks import Marks
from lowtide.observing.observer import Observer
from lowtide.running.prepared import Signature, signature_of
from lowtide.step import Recording
from lowtide.tape.regions import Region
from lowtide.tape.tape import Decisions
from lowtide.tape.values import Handle, Operation, Value


class Watching(Observer):
    """An observer that also knows modules and, on fake tensors, modelled times."""

    def __init__(
        self, memory: Marks | None, names: dict[int, str], witness: Witness | None = None
    ) -> None:
        super().__init__(memory)
        self._names = names
        self._inside: list[str] = []
        self.modules: list[str] = []
        self.lossless = False
        self.guessed = False
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
        seconds = self.memory.last if isinstance(self.memory, FakeMemory) else None
        super().operation(op, made, args, kwargs, live, signature)
        if seconds is not None:
            self.ops[-1].seconds = seconds
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


class _Everything(Decisions):
    """Decisions of a step in which nothing is recomputed but what was overwritten in place. It is
    recorded in Python, and never idles."""

    asks = True

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

    def answered(self, value: Value, given: torch.Tensor) -> None:
        if self.begun and value.number >= 0:
            self.observer.answered(value, given)


def loss_of(result: Any, to_come: torch.Tensor | None = None) -> torch.Tensor | None:
    """What backward starts from: the sum of all tensors that require grad; None: none does.
    `to_come`: of the loss too that is taken to come, see `outside`."""
    wanted = _with_a_graph(result)
    if not wanted:
        return None
    if len(wanted) == 1 and wanted[0].numel() == 1:
        return wanted[0]
    parts = [t.sum() if not t.is_complex() else t.real.sum() for t in wanted]
    total = parts[0] if to_come is None else parts[0] + to_come
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total


def _with_a_graph(result: Any) -> list[torch.Tensor]:
    return [t for t in tensors_of(result) if t.requires_grad and not t.is_sparse]


@contextmanager
def module_calls(
    enter: Callable[[nn.Module, Any], None], leave: Callable[..., None]
) -> Iterator[None]:
    """Call `enter` before the forward of each module that is called inside, and `leave` after."""
    before = nn.modules.module.register_module_forward_pre_hook(enter)
    after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        with warnings.catch_warnings():
            # Of a compiled module, that it has two calls: of the user's hooks there are none here.
            about_hooks = r"Using `torch\.compile\(module\)` when there are global hooks"
            warnings.filterwarnings("ignore", message=about_hooks)
            yield
    finally:
        before.remove()
        after.remove()


def record(
    observer: Watching,
    recording: Callable[..., Recording],
    call: Callable[[], Any],
    begin: Callable[[Any], None] | None = None,
) -> None:
    """Forward and backward under an observer; `begin` is called with the open recorder."""
    decisions = _Everything(observer)
    calls = module_calls(observer.enter, observer.leave)
    with calls, recording(decisions, timed=begin is None) as tape:
        assert tape.recorder is not None
        decisions.live = tape.recorder.live
        observer.attach(tape.recorder)
        if begin is not None:
            begin(tape.recorder)
        result = call()
        if observer.witness is not None:
            observer.witness.returned(tensors_of(result), tape.recorder)
    if not decisions.begun:  # else the function ran backward itself
        # What a model returned whose forward alone is planned is held, see `lowtide.fitting`.
        guess = stand_in(_with_a_graph(result)) if _compat.dry_run.outputs else None
        observer.guessed = guess is not None
        loss = loss_of(result, guess)
        del result, guess
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
