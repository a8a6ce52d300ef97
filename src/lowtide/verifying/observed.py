"""What a step leaves behind: its results, gradients, buffers and random states, under their names.

Problem: two runs of one step have to be compared bit by bit, and what differs has to be named so
that its owner finds it. Invariant: what is observed is a copy, in main memory, so that the next run
cannot change it; NaN equals itself, and 0.0 is not -0.0. Imports `_compat`, dryrun and state.
Rejected: `torch.allclose`, which calls a gradient right that is nearly so.
"""

from __future__ import annotations

import ctypes
import math
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide import _compat
from lowtide.dryrun.putback import default_generators
from lowtide.verifying.state import Reached

Tensor = torch.Tensor


@dataclass(frozen=True)
class Difference:
    """Something that a step has left behind with other bits than the plain step.

    Attributes:
        kind: "result", "gradient", "parameter", "buffer", "input", "optimizer state" or "random
            state".
        name: the qualified name of a parameter or buffer; the place of a result or input; the
            device of a generator.
        differing: how many elements differ; all of them if the shape or dtype does, or if only one
            of the two is there.
        elements: how many there are.
        largest: the largest absolute difference of two elements; None if there is none to tell, as
            of NaN, infinity and random states.
    """

    kind: str
    name: str
    differing: int
    elements: int
    largest: float | None

    def __str__(self) -> str:
        by = "" if self.largest is None else f", by at most {self.largest:.3g}"
        named = f" {self.name}" if self.name else ""
        return f"{self.kind}{named}: {self.differing} of {self.elements} elements{by}"


Observed = dict[tuple[str, str], Tensor | None]
"""What a step has left, by kind and name. None: it has left none."""


class Read:
    """The gradients that torch's optimizers read at their steps: most steps clear them.

    They are copied where no memory of torch's is allocated, which a measurement counts.
    """

    def __init__(self) -> None:
        self._read: list[tuple[int, bytes, torch.dtype, torch.Size]] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def of(self, parameter: Tensor) -> list[Tensor]:
        """In the order of the steps."""
        return [
            torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
            if raw
            else torch.empty(shape, dtype=dtype)
            for owner, raw, dtype, shape in self._read
            if owner == id(parameter)
        ]

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._copy(parameter, parameter.grad)

    def _copy(self, parameter: Tensor, grad: Tensor) -> None:
        own = _compat.has_own_dispatch(type(grad))
        with nullcontext() if own else _compat.disable_dispatch(), torch.no_grad():
            plain = _plain(grad.detach())
            if plain is not None:
                here = plain.to("cpu").contiguous()
                raw = ctypes.string_at(here.data_ptr(), here.nbytes) if here.nbytes else b""
                self._read.append((id(parameter), raw, here.dtype, here.shape))


def observe(
    reached: Reached, result: Any, others: list[Tensor], read: Read | None = None
) -> Observed:
    """Copy what a step has left. `others`: leaves of its graph, of which some may be known."""
    found: Observed = {}
    for name, one in _named(result):
        found["result", name] = _copied(one) if isinstance(one, Tensor) else _number(one)
    _observe_tensors(found, reached, read)
    names = {id(tensor): name for _, name, tensor in reached.named()}
    _observe_optimizers(found, reached, names)
    more = [leaf for leaf in others if id(leaf) not in names]
    for place, leaf in enumerate(more):
        name = f"of leaf {place} of shape {tuple(leaf.shape)}"
        found["gradient", name] = None if leaf.grad is None else _copied(leaf.grad)
    _observe_chance(found, reached)
    return found


def _observe_tensors(found: Observed, reached: Reached, read: Read | None) -> None:
    """Parameters, buffers and inputs, each after its gradient."""
    for kind, name, tensor in reached.named():
        if kind == "parameter" or tensor.requires_grad:
            grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            left = None if grad is None else _copied(grad)
            steps = [] if read is None else read.of(tensor)
            if steps and (left is None or _alike(left, steps[-1])):
                left = steps.pop()
            found["gradient", name] = left
            for step, part in enumerate(steps):
                found["gradient", f"{name} in step {step} of an optimizer"] = part
        found[kind, name] = _copied(tensor)


def _observe_optimizers(found: Observed, reached: Reached, names: dict[int, str]) -> None:
    """What they keep for each parameter. `names`: of tensors, by their ids."""
    for number, optimizer in enumerate(reached.optimizers):
        before = f"{number}: " if len(reached.optimizers) > 1 else ""
        for parameter, entries in optimizer.state.items():
            name = before + names.get(id(parameter), "")
            for key, part in _named(entries):
                if isinstance(part, Tensor):
                    found["optimizer state", name + key] = _copied(part)


def _observe_chance(found: Observed, reached: Reached) -> None:
    """The states of what draws random numbers."""
    for generator in (*default_generators(), *reached.generators):
        found["random state", _unused(found, str(generator.device))] = generator.get_state()
    found["random state", "of Python"] = _text(random.getstate())
    if "numpy" in sys.modules:
        found["random state", "of NumPy"] = _text(sys.modules["numpy"].random.get_state())
    for place, drawn in enumerate(reached.drawn()):
        found["random state", f"{place} of the step's own"] = _text(drawn)


def differences(plain: Observed, other: Observed) -> list[Difference]:
    """What differs, in the order in which it was observed."""
    found = []
    for (kind, name), one in plain.items():
        two = other.get((kind, name))
        if one is None and two is None:
            continue
        if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
            elements = max(0 if part is None else part.numel() for part in (one, two))
            found.append(Difference(kind, name, elements, elements, None))
        elif not _alike(one, two):
            changed = int((_bytes(one) != _bytes(two)).any(1).sum())
            apart = None if kind == "random state" else _largest(one, two)
            found.append(Difference(kind, name, changed, one.numel(), apart))
    extra = [key for key in other if key not in plain]
    for kind, name in extra:
        two = other[kind, name]
        if two is not None:
            found.append(Difference(kind, name, two.numel(), two.numel(), None))
    return found


def _alike(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: Tensor) -> Tensor:
    """(elements, bytes of each)."""
    if not tensor.numel():
        return torch.empty(0, 1, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _largest(one: Tensor, two: Tensor) -> float | None:
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - two.to(wide)).abs()
    apart = apart[~apart.isnan()]
    largest = float(apart.max()) if apart.numel() else math.inf
    return largest if math.isfinite(largest) else None


def _named(item: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers (as of `loss.item()`) in any nesting of lists, tuples, dictionaries
    and dataclasses, with their places."""
    if isinstance(item, Tensor | int | float | complex) or type(item).__module__ == "numpy":
        yield name, item
    elif isinstance(item, dict):
        for key, part in item.items():
            yield from _named(part, f"{name}[{key!r}]")
    elif isinstance(item, list | tuple):
        for place, part in enumerate(item):
            yield from _named(part, f"{name}[{place}]")
    elif is_dataclass(item) and not isinstance(item, type):
        for field in fields(item):
            yield from _named(getattr(item, field.name), f"{name}.{field.name}")


def _copied(tensor: Tensor) -> Tensor | None:
    """A plain copy in main memory; None if there is nothing to copy."""
    with torch.no_grad():
        plain = _plain(tensor.detach())
        return None if plain is None else plain.to("cpu", copy=True)


def _plain(tensor: Tensor) -> Tensor | None:
    if torch.nn.parameter.is_lazy(tensor) or tensor.device.type == "meta":
        return None
    if _compat.is_wrapper(type(tensor)):  # a DTensor, a jagged nested one: by its parts
        names, _ = _compat.taken_apart(tensor)
        return _joined([getattr(tensor, name) for name in names])
    if tensor.is_nested:
        return _joined(tensor.unbind())
    if tensor.is_quantized:  # with its scale
        return _joined([tensor.int_repr(), tensor.dequantize()])
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    storage = _compat.storage_of(tensor)
    if storage is not None and storage.nbytes() == 0 < tensor.nbytes:
        return None  # freed, as FSDP2 does when it reshards
    return tensor.resolve_conj().resolve_neg()


def _joined(parts: Iterable[Any]) -> Tensor | None:
    """The tensors among these parts of one, which need not have one dtype or device."""
    found = [_plain(part) for part in parts if isinstance(part, Tensor)]  # a mesh is none
    there = [part for part in found if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    return torch.cat([_bytes(part.to("cpu")).flatten() for part in there])


def _number(item: Any) -> Tensor:
    """A number of Python's or an array of NumPy's, with all of its digits."""
    if isinstance(item, float | complex):
        wide = torch.float64 if isinstance(item, float) else torch.complex128
        return torch.tensor(item, dtype=wide)
    return _text(item)


def _text(state: Any) -> Tensor:
    """A random state of Python's or NumPy's, whole: its place in what it has drawn included."""
    return torch.frombuffer(bytearray(repr(_listed(state)), "utf-8"), dtype=torch.uint8)


def _listed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _listed(part) for key, part in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_listed, state))
    return state.tolist() if hasattr(state, "tolist") else state  # an array, printed in full


def _unused(found: Observed, name: str) -> str:
    """A name for one of several generators of a device."""
    count = 1
    while ("random state", name if count == 1 else f"{name} ({count})") in found:
        count += 1
    return name if count == 1 else f"{name} ({count})"
