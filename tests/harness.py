"""Run a training step plainly and in some other way, and compare the two bit for bit.

Problem: "the same result" has to mean the same bits in everything a training step touches, or a
wrong gradient, a buffer that moved twice or a generator left elsewhere slips through.

Invariant: `run_steps` starts from one seed, builds model and batches afresh, and writes down every
observable of every step as plain copies. `assert_same` then compares copies only, so that nothing
the method under test keeps alive can change what is compared. Bits are compared, not numbers: NaN
equals the same NaN, and 0.0 differs from -0.0.

May import: torch, numpy and `zoo.case`; never lowtide, so that the harness can be tested without
the engine and cannot share a defect with it.

Rejected: `torch.testing.assert_close` with zero tolerance, which calls 0.0 and -0.0 equal and NaN
either always or never equal, and stops short of buffers and generators.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.case import Batch, Case, tensors_in

Compute = Callable[[Batch], Tensor]
"""Forward and loss of one batch."""

Method = Callable[[nn.Module, Compute], Compute]
"""A way of applying something (lowtide, torch's checkpoint, nothing) to a computation."""

SEED = 20_231


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was observed: a copied tensor, or a value that compares with `==`."""

    name: str
    value: object


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Everything observed in the steps of one case, in the order in which it was observed."""

    case: str
    entries: tuple[Entry, ...]

    def __getitem__(self, name: str) -> Any:
        for entry in self.entries:
            if entry.name == name:
                return entry.value
        raise KeyError(name)

    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]


def plain(model: nn.Module, compute: Compute) -> Compute:
    """The method that does nothing: the step that every other is compared with."""
    return compute


def run_steps(
    case: Case,
    apply: Method = plain,
    steps: int = 3,
    *,
    penalty_inside: bool = False,
    device: str = "cpu",
) -> Trace:
    """Train `case` for a few steps with `apply` and return what was observed.

    With `penalty_inside`, a case's gradient penalty is part of what `apply` wraps; otherwise it is
    computed from the loss that the wrapped computation returned. With another `device` than the
    CPU, that is torch's default device while the case is built and run.
    """
    with _fixed_surroundings(), nullcontext() if device == "cpu" else torch.device(device):
        model = case.build()
        batches = [case.batch() for _ in range(steps)]
        recorder = _Recorder(model, device)
        compute: Compute = _with_autocast(case, lambda batch: case.loss(model, batch), device)
        if case.gradient_penalty and penalty_inside:
            compute = apply(model, _with_penalty(compute))
        elif case.gradient_penalty:
            compute = _with_penalty(apply(model, compute))
        else:
            compute = apply(model, compute)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9, foreach=False)
        for number, batch in enumerate(batches, 1):
            if case.gradient_penalty:
                _require_gradients(batch)
            _train_step(recorder.at(f"step {number}"), compute, batch, optimizer)
        recorder.at("end").tensors("parameter", dict(model.named_parameters()))
        recorder.close()
    return Trace(case.name, tuple(recorder.entries))


def assert_same(plain: Trace, other: Trace) -> None:
    """Fail, naming the first thing that differs, unless the two traces agree bit for bit."""
    for one, two in zip(plain.entries, other.entries, strict=False):
        assert one.name == two.name, (
            f"{plain.case}: the plain run observed {one.name!r} where the other observed "
            f"{two.name!r}"
        )
        difference = _difference(one.value, two.value)
        assert difference is None, f"{plain.case}: {one.name} differs: {difference}"
    assert len(plain.entries) == len(other.entries), (
        f"{plain.case}: {len(plain.entries)} observations in the plain run, "
        f"{len(other.entries)} in the other"
    )


def _train_step(
    recorder: _Recorder, compute: Compute, batch: Batch, optimizer: torch.optim.Optimizer
) -> None:
    loss = compute(batch)
    recorder.tensor("loss", loss)
    recorder.outputs()
    loss.backward()
    recorder.tensors("gradient", {k: p.grad for k, p in recorder.model.named_parameters()})
    inputs = {str(i): leaf.grad for i, leaf in enumerate(tensors_in(batch)) if leaf.requires_grad}
    recorder.tensors("gradient of input", inputs)
    recorder.tensors("buffer", dict(recorder.model.named_buffers()))
    recorder.surroundings()
    optimizer.step()
    optimizer.zero_grad()


class _Recorder:
    """Collects entries, and watches the model's own forward calls."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model
        self._device = device
        self.entries: list[Entry] = []
        self._where = ""
        self._calls = 0
        self._outputs: list[object] = []
        self._hook = model.register_forward_hook(self._forward_ran)

    def at(self, where: str) -> _Recorder:
        self._where = where
        return self

    def close(self) -> None:
        self._hook.remove()

    def tensor(self, name: str, tensor: Tensor | None) -> None:
        self._add(name, None if tensor is None else _copy(tensor))

    def tensors(self, kind: str, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            self.tensor(f"{kind} {name}", tensor)

    def outputs(self) -> None:
        for call, output in enumerate(self._outputs):
            for number, leaf in enumerate(tensors_in(output)):
                self.tensor(f"output {call}.{number}", leaf)
                self._add(f"output {call}.{number} requires_grad", leaf.requires_grad)
        self._outputs.clear()

    def surroundings(self) -> None:
        self._add("default generator", _copy(torch.default_generator.get_state()))
        if self._device != "cpu":
            for drawn in torch.get_device_module(self._device).default_generators:
                self._add("generator of a device", _copy(drawn.get_state()))
        self._add("Python's generator", random.getstate())
        kind, key, *rest = np.random.get_state()
        self._add("numpy's generator", (kind, bytes(key), *rest))  # 600 numbers take 5 ms as text
        for path, module in self.model.named_modules():
            for name, held in vars(module).items():
                if isinstance(held, torch.Generator):
                    self._add(f"generator {path}.{name}", _copy(held.get_state()))
        # Counted only after backward: a method that calls forward again is seen here.
        self._add("calls of forward", self._calls)
        self._outputs.clear()

    def _add(self, name: str, value: object) -> None:
        self.entries.append(Entry(f"{self._where}: {name}", value))

    def _forward_ran(self, module: nn.Module, args: object, output: object) -> None:
        self._calls += 1
        self._outputs.append(output)


def _with_autocast(case: Case, compute: Compute, device: str) -> Compute:
    def run(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16) if case.autocast else nullcontext():
            return compute(batch)

    return run


def _with_penalty(compute: Compute) -> Compute:
    def run(batch: Batch) -> Tensor:
        loss = compute(batch)
        inputs = [leaf for leaf in tensors_in(batch) if leaf.requires_grad]
        slopes = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)

    return run


def _require_gradients(batch: Batch) -> None:
    for leaf in tensors_in(batch):
        if leaf.is_floating_point():
            leaf.requires_grad_()


@contextmanager
def _fixed_surroundings() -> Iterator[None]:
    """One thread and known generators, so that the plain step itself is deterministic."""
    threads, states = torch.get_num_threads(), (random.getstate(), np.random.get_state())
    try:
        with torch.random.fork_rng(devices=[]):
            torch.set_num_threads(1)
            torch.manual_seed(SEED)
            random.seed(SEED)
            np.random.seed(SEED)
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def _difference(one: object, two: object) -> str | None:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        if isinstance(one, Tensor) or isinstance(two, Tensor):
            return f"{type(one).__name__} in the plain run, {type(two).__name__} in the other"
        return None if one == two else f"{_short(one)} in the plain run, {_short(two)} in the other"
    for what in ("dtype", "shape", "layout"):
        if getattr(one, what) != getattr(two, what):
            return f"{what} {getattr(one, what)} against {getattr(two, what)}"
    if one.layout == torch.sparse_coo:
        one, two = one.coalesce(), two.coalesce()
        return _difference(one.indices(), two.indices()) or _difference(one.values(), two.values())
    if one.stride() != two.stride():
        return f"strides {one.stride()} against {two.stride()}"
    return _bit_difference(one, two)


def _bit_difference(one: Tensor, two: Tensor) -> str | None:
    if one.numel() == 0:
        return None
    bits = [t.contiguous().reshape(-1, 1).view(torch.uint8) for t in (one, two)]
    if torch.equal(bits[0], bits[1]):
        return None
    wrong = (bits[0] != bits[1]).any(dim=1)
    first = int(wrong.nonzero()[0])
    values = [t.contiguous().reshape(-1)[first].item() for t in (one, two)]
    return (
        f"{int(wrong.sum())} of {one.numel()} elements, the first at flat index {first}: "
        f"{values[0]!r} in the plain run, {values[1]!r} in the other"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
