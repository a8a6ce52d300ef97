"""Stand-ins for everything a step reads, so that it can be traced without memory.

Problem: a dry run calls the user's own function, which reaches its parameters through modules,
closures and globals. Invariant: while it runs, parameters, buffers and the tensors among the
arguments are fake; afterwards every module found is as it was, attributes included, and so are the
gradients and the random states of Python and NumPy. Imports `_compat` and reached. Rejected: a deep
copy of the model on the meta device, which would take other code paths than `cpu` or `cuda`.

What is found: modules and tensors among the arguments (in lists, tuples, dictionaries), in the
function's closure, in the globals that it names, and behind `functools.partial`, bound methods and
attributes of objects found in this way. Tensors elsewhere are treated as constants.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide._compat import fakes
from lowtide._compat.sharding import counted_outside
from lowtide.models.reached import named_globals

DEPTH = 5
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype,
          torch.device, torch.Generator)  # fmt: skip

OWN = "(model)"
"""The module of what runs directly in the forward of the only model: its qualified name is empty.
"""
OUTSIDE = "(outside of modules)"
"""Shown for what no module runs, for example a loss."""


class Found:
    """The modules and tensors that a function reaches."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.roots: dict[str, nn.Module] = {}
        self.tensors: list[torch.Tensor] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # keeps ids valid: bound methods are new objects each time
        self._visit("", function, DEPTH)
        self._visit("", (args, kwargs), DEPTH)
        inside = {id(m) for root in self.roots.values() for m in root.modules() if m is not root}
        self.roots = {k: m for k, m in self.roots.items() if id(m) not in inside}

    def modules(self) -> Iterator[nn.Module]:
        seen: set[nn.Module] = set()
        for root in self.roots.values():
            for module in root.modules():
                if module not in seen:
                    seen.add(module)
                    yield module

    def names(self) -> dict[int, str]:
        """Qualified names by module id; if there are several roots, prefixed with the variable."""
        names: dict[int, str] = {}
        for label, root in self.roots.items():
            for name, module in root.named_modules():
                prefix = label if len(self.roots) > 1 else ""
                names.setdefault(id(module), ".".join(filter(None, (prefix, name))))
        return names

    def state(self) -> Iterator[torch.Tensor]:
        for module in self.modules():
            for tensors in _compat.parameters_and_buffers(module):
                yield from (t for t in tensors.values() if t is not None)

    def _visit(self, label: str, item: Any, depth: int) -> None:
        if depth < 0 or isinstance(item, _ATOMS) or id(item) in self._seen:
            return
        self._seen.add(id(item))
        self._keep.append(item)
        if isinstance(item, nn.Module):
            name = label or type(item).__name__
            while name in self.roots:
                name += "'"
            self.roots[name] = item
        elif isinstance(item, torch.Tensor):
            self.tensors.append(item)
        else:
            for name, part in _parts(item):
                self._visit(name, part, depth - 1)


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object that is neither a module nor a tensor, with names if they have any."""
    if isinstance(item, dict):
        yield from ((key if isinstance(key, str) else "", part) for key, part in item.items())
    elif isinstance(item, list | tuple | set | frozenset | deque):
        yield from (("", part) for part in item)
    elif isinstance(item, functools.partial):
        yield from (("", part) for part in (item.func, item.args, item.keywords))
    elif isinstance(item, types.MethodType):
        yield from (("self", item.__self__), ("", item.__func__))
    elif isinstance(item, types.FunctionType):
        yield from _reached(item)
    elif not isinstance(item, types.BuiltinFunctionType):
        home = type(item).__module__.partition(".")[0]
        if home != "torch" and home not in sys.stdlib_module_names:
            yield from _attributes(item)


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """An object's own, in its dictionary and in slots."""
    if hasattr(item, "__dict__"):
        yield from vars(item).items()
    for kind in type(item).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield name, slot.__get__(item)
                except AttributeError:  # not assigned yet
                    continue


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield "", function.__defaults__ or ()
    yield "", function.__kwdefaults__ or {}
    yield "", vars(function).get("__wrapped__")
    home = str(function.__module__).partition(".")[0]
    if home in ("torch", "lowtide") or home in sys.stdlib_module_names - {"__main__"}:
        return
    yield from named_globals(function)


class StandIns:
    """Context manager: the found modules hold fake tensors; `fake` converts arguments."""

    def __init__(self, found: Found, device: torch.device, mode: Any) -> None:
        self.found = found
        self.device = device
        self.mode = mode
        self._made: dict[int, torch.Tensor] = {}
        self._real: dict[int, torch.Tensor] = {}
        self._read: list[torch.Tensor] = []
        self.originals: dict[int, torch.Tensor] = {}  # by the id of what stands for them
        self._saved = _Saved(found)
        self._scripted: list[tuple[Any, str, torch.Tensor]] = []

    def __enter__(self) -> StandIns:
        self._saved.take()
        try:
            for module in self.found.modules():
                for tensors in _compat.parameters_and_buffers(module):
                    if _compat.is_script(module):  # not among its attributes
                        self._scripted += [(tensors, *one) for one in tensors.items()]
                    for name, tensor in list(tensors.items()):
                        if tensor is not None:
                            tensors[name] = self.fake(tensor)
            for tensor in self.found.tensors:  # torch fakes those of closures where they are read
                self._know(tensor)
            for module in self.found.modules():
                for name, part in vars(module).items():
                    # Lists of a module's own parameters, as in recurrent layers.
                    if type(part) is list and any(id(p) in self._made for p in part):
                        vars(module)[name] = [self._made.get(id(p), p) for p in part]
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for tensors, name, tensor in self._scripted:
            tensors[name] = tensor
        self._scripted.clear()
        self._read.clear()
        self._saved.restore()

    def behind(self, storage: Any) -> torch.Tensor | None:
        """The real tensor that stands behind a fake storage."""
        return self._real.get(_compat.storage_id(storage))

    def fake(self, item: Any) -> Any:
        """The same arguments with fake tensors in place of real ones."""
        if isinstance(item, torch.Tensor):
            made = self._made.get(id(item))
            if made is None:
                made = self._made[id(item)] = fakes.faked(self.mode, item, self.device)
                self.originals[id(made)] = item
                storage = _compat.storage_of(made)
                if storage is not None and made is not item and item.device.type != "meta":
                    self._real.setdefault(_compat.storage_id(storage), item)
            return made
        if type(item) in (list, tuple):
            return type(item)(map(self.fake, item))
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(self.fake, item))
        if type(item) is dict:
            return {key: self.fake(part) for key, part in item.items()}
        return item

    def _know(self, tensor: torch.Tensor) -> None:
        """What is in a tensor that the function reaches without being given it can be asked for,
        of itself and of what the mode makes of it wherever an operator reads it."""
        if tensor.requires_grad or fakes.is_fake(tensor) or tensor.device.type == "meta":
            return
        self._read.append(fakes.faked(self.mode, tensor, self.device))  # else torch makes another
        for one in (tensor, self._read[-1]):
            storage = _compat.storage_of(one)
            if storage is not None:
                self._real.setdefault(_compat.storage_id(storage), tensor)

    def made(self, result: Any) -> Any:
        """What an operator returned, with fake tensors in place of real ones. They are in memory
        as long as the program has them, and no longer."""
        if isinstance(result, torch.Tensor):
            fake = fakes.faked(self.mode, result, self.device)
            self.stands_for(fake, result)
            return fake
        if isinstance(result, tuple | list):
            return type(result)(map(self.made, result))
        return result

    def stands_for(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """As long as its storage is there, a fake tensor has the content of a real one."""
        storage = _compat.storage_of(fake)
        if storage is not None:
            key = _compat.storage_id(storage)
            self._real[key] = real
            weakref.finalize(storage, self._real.pop, key, None)


class _Saved:
    """Saves and restores what a forward may change in modules and in random states: one that seeds
    them does so even on fake tensors, on which nothing is drawn."""

    def __init__(self, found: Found, more: Sequence[Any] = ()) -> None:
        self._modules = list(found.modules())
        self._more = more
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
        self._random = RandomStates()

    def _take(self, part: Any, depth: int, seen: set[int]) -> None:
        """Note what is in a container, and in the containers and objects in it."""
        if not depth or isinstance(part, _ATOMS) or id(part) in seen:
            return
        items: list[Any] = []
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
    """What torch, Python and numpy would draw next, at the time that this is made."""

    def __init__(self) -> None:
        self._draws = [(generator, generator.get_state()) for generator in default_generators()]
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
        moved: once it is over, how many parameters were written: copying all of them up front could
            take as much memory as the step itself, so that these are reported and not restored.
            With `whole` they are copied, to main memory, and restored, and so are the other tensors
            that were found. `more`: containers and objects that are restored too.
    """

    def __init__(self, found: Found, *, whole: bool = False, more: Sequence[Any] = ()) -> None:
        self._found = found
        self._whole = whole
        self._python = _Saved(found, more)
        self.moved = 0

    def __enter__(self) -> RealState:
        self._python.take()
        parameters = {
            id(parameter): parameter
            for module in self._found.modules()
            for parameter in _compat.parameters_and_buffers(module)[0].values()
            if parameter is not None and not parameter.is_inference()
        }
        self._before = [(p, _state(p)) for p in parameters.values()]
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
        self.moved = sum(_state(p) != before for p, before in self._before)


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    """The version, and a sum of the bits: a write through `.data` moves no version."""
    version = _compat.version_of(parameter)
    if nn.parameter.is_lazy(parameter) or parameter.device.type == "meta":
        return version, 0
    whole = _WHOLE.get(parameter.element_size())
    if whole is None or parameter.layout is not torch.strided or parameter.is_conj():
        return version, 0
    if _compat.has_own_dispatch(type(parameter)):
        return version, 0
    if parameter.untyped_storage().nbytes() < parameter.nbytes:  # freed, as FSDP1 does
        return version, 0
    with torch.no_grad():
        return version, int(parameter.detach().view(whole).sum(dtype=torch.int64))


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


__all__ = ["Found", "RealState", "StandIns"]
