"""The state of a program before a step that is not its own, put back afterwards.

Problem: the Python code of a step runs in a dry run, and a recorded step runs for real; both leave
attributes, counters and random states behind. Invariant: afterwards the modules that were found,
what hangs on them, and the generators are as they were; of a real step, gradients, buffers and the
other tensors that it has written too. Imports `_compat` and found. Rejected: deep copies, which the
program would hold no reference to.
"""

from __future__ import annotations

import operator
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide._compat.sharding import counted_outside
from lowtide.dryrun.found import ATOMS, DEPTH, Found


class Saved:
    """Saves and restores what a forward may change in modules and in random states: one that seeds
    them does so even on fake tensors, on which nothing is drawn."""

    def __init__(self, found: Found, more: Sequence[Any] = ()) -> None:
        self._modules = list(found.modules())
        self._more = more
        self._found = found
        self._generators: list[torch.Generator] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._others: list[tuple[Any, list[Any]]] = []  # lists, sets and queues
        self._moved: list[tuple[dict[str, Any], tuple[str, ...]]] = []  # what is not put back
        self._random: RandomStates | None = None

    def take(self) -> None:
        seen = set(map(id, self._modules))
        for module in self._modules:
            self._take(vars(module), DEPTH, seen)
            self._moved.append((vars(module), counted_outside(module)))
            for parameter in _compat.parameters_and_buffers(module)[0].values():
                if parameter is not None:  # libraries keep what they add to one in its attributes
                    self._take(vars(parameter), DEPTH, seen)
        for item in self._more:
            self._take(item, DEPTH, seen)
        self._random = RandomStates((*self._found.generators, *self._generators))
        self._generators.clear()

    def _take(self, part: Any, depth: int, seen: set[int]) -> None:
        """Note what is in a container, and in the containers and objects in it."""
        if isinstance(part, torch.Generator):
            self._generators.append(part)
        if not depth or isinstance(part, ATOMS) or id(part) in seen:
            return
        items: list[Any]
        if isinstance(part, dict):
            items = list(part.values())
            self._dicts.append((part, dict(part)))
        elif isinstance(part, list | set | deque):
            items = list(part)
            self._others.append((part, items))
        elif isinstance(part, tuple):
            # A subclass may refuse to be taken for a sequence (the irreps of e3nn have no length).
            items = [*tuple.__iter__(part)]
        else:
            if _is_data(part):
                self._take(vars(part), depth - 1, seen)
            return
        seen.add(id(part))
        for item in items:
            self._take(item, depth - 1, seen)

    def restore(self) -> None:
        moved = [
            (place, {name: place[name] for name in names if name in place})
            for place, names in self._moved
        ]
        self._moved.clear()
        for place, before in self._dicts:
            if place.keys() != before.keys() or any(
                place[key] is not part for key, part in before.items()
            ):
                place.clear()
                place.update(before)
        for part, items in self._others:
            if len(part) != len(items) or any(map(operator.is_not, part, items)):
                part.clear()
                (part.update if isinstance(part, set) else part.extend)(items)
        for place, now in moved:
            place.update(now)
        self._dicts.clear()
        self._others.clear()
        if self._random is not None:
            self._random.restore()


class RandomStates:
    """What torch, Python, numpy and `more` generators would draw next, at the time that this is
    made."""

    def __init__(self, more: Iterable[torch.Generator] = ()) -> None:
        generators = (*default_generators(), *more)
        self._draws = [(generator, generator.get_state()) for generator in generators]
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        for generator, state in self._draws:
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            numpy: Any = sys.modules["numpy"]
            numpy.random.set_state(self._numpy)


def _is_data(item: Any) -> bool:
    """Whether it is an object of the program's own, whose attributes are its data."""
    kinds = nn.Module, torch.Tensor, types.FunctionType, types.MethodType, types.BuiltinFunctionType
    if isinstance(item, kinds) or not isinstance(getattr(item, "__dict__", None), dict):
        return False
    home = str(type(item).__module__).partition(".")[0]
    return home not in ("torch", "lowtide") and home not in sys.stdlib_module_names - {"__main__"}


class RealState:
    """Context manager: restores gradients, buffers and random states on exit.

    Attributes:
        moved: once it is over, how many parameters and tensors of no module were written: copying
            all of them up front could take as much memory as the step itself, so that these are
            reported and not restored. With `whole` they are copied, to main memory, and restored.
            `more`: containers and objects that are restored too.
    """

    def __init__(self, found: Found, *, whole: bool = False, more: Sequence[Any] = ()) -> None:
        self._found = found
        self._whole = whole
        self._python = Saved(found, more)
        self.moved = 0

    def __enter__(self) -> RealState:
        self._python.take()
        parameters = {
            id(parameter): parameter
            for module in self._found.modules()
            for parameter in _compat.parameters_and_buffers(module)[0].values()
            if parameter is not None and not parameter.is_inference()
        }
        others = {id(t): t for t in self._found.tensors if not (t.is_inference() or t.is_nested)}
        self._before = [(t, _state(t)) for t in (parameters | others).values()]
        leaves = {id(t): t for t in (*self._found.state(), *self._found.tensors)}
        self._gradients = [(t, t.grad) for t in leaves.values() if t.is_leaf and t.requires_grad]
        self._contents = [_content(g) for _, g in self._gradients if g is not None]
        self._contents += [
            _content(buffer)
            for module in self._found.modules()
            for buffer in _compat.parameters_and_buffers(module)[1].values()
            if buffer is not None
        ]
        if self._whole:
            more = {id(t): t for t in (*parameters.values(), *self._found.tensors)}
            self._contents += [_content(t, "cpu") for t in more.values() if _has_content(t)]
        return self

    def __exit__(self, *exc: object) -> None:
        with torch.no_grad():
            for tensor, before, version in self._contents:
                if tensor.shape != before.shape:  # as an observer of channels resizes at first
                    tensor.resize_(before.shape)
                # Between a forward and its backward, autograd may have saved what is put back.
                tensor.data.copy_(before)
                if version is not None:
                    _compat.put_version(tensor, version)
            for leaf, gradient in self._gradients:
                leaf.grad = gradient
        self._python.restore()
        self.moved = sum(_state(t) != before for t, before in self._before)


@contextmanager
def without_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, these leaves begin without gradients; afterwards they have those of before."""
    gradients = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """The version, and a sum of the bits: a write through `.data` moves no version."""
    version = _compat.version_of(tensor)
    if nn.parameter.is_lazy(tensor) or tensor.device.type == "meta":
        return version, 0
    whole = _WHOLE.get(tensor.element_size())
    if whole is None or tensor.layout is not torch.strided or tensor.is_quantized:
        return version, 0
    if tensor.is_conj() or tensor.is_neg() or _compat.has_own_dispatch(type(tensor)):
        return version, 0
    if tensor.untyped_storage().nbytes() < tensor.nbytes:  # freed, as FSDP1 does
        return version, 0
    with torch.no_grad():
        return version, _sum(tensor.detach().view(whole))


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED = 1 << 22  # numbers at once


def _sum(bits: torch.Tensor) -> int:
    """Part by part, as torch sums a copy in the larger dtype: of a whole data set, that is many
    times its size."""
    if bits.numel() <= _SUMMED:
        return int(bits.sum(dtype=torch.int64))
    longest = max(range(bits.dim()), key=bits.shape.__getitem__)
    count = max(1, bits.shape[longest] * _SUMMED // bits.numel())
    return sum(int(part.sum(dtype=torch.int64)) for part in bits.split(count, longest))


def _content(
    tensor: torch.Tensor, device: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    version = None if tensor.is_inference() else _compat.version_of(tensor)
    plain = tensor.detach()
    # A DTensor belongs to the devices of its mesh.
    here = device is None or _compat.has_own_dispatch(type(tensor))
    copy = plain.clone() if here else plain.to(device, copy=True)
    return tensor, copy, version


def _has_content(tensor: torch.Tensor) -> bool:
    """Whether there is memory to copy: FSDP1 frees that of parameters."""
    if nn.parameter.is_lazy(tensor) or tensor.device.type == "meta" or tensor.is_inference():
        return False
    storage = _compat.storage_of(tensor)
    return storage is None or storage.nbytes() >= tensor.nbytes


def default_generators() -> list[torch.Generator]:
    """The default generators: the CPU's, and those of the accelerator's devices."""
    found = [torch.default_generator]
    kind = torch.accelerator.current_accelerator()
    if kind is not None and _compat.accelerator_in_use():
        for index in range(torch.accelerator.device_count()):
            try:
                generator = _compat.default_generator(torch.device(kind.type, index))
            except LookupError:  # draws on it are kept and never replayed
                continue
            found += [] if generator is None else [generator]
    return found
