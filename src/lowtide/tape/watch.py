"""Externals, and who is about to overwrite them.

Problem: a replay reads parameters, buffers and inputs that the tape did not make, and the user may
change them in place before backward: a GAN's discriminator runs twice and its spectral-norm
vectors move in between. Invariant: a value's alias is copied before a write that any recorder sees
reaches it, whichever tape it belongs to; a write that no recorder saw is told by the version
counter when the value is used (rule 4). Imports values. Rejected: copying every buffer when it is
first read, which pays always for what happens rarely.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from lowtide import _compat
from lowtide.tape.values import Value

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Storage key -> values that hold an alias of it. The alias keeps the storage, so that a key means
# another storage only when these values are gone; what they leave behind is swept up now and then,
# as a callback for each of them costs more than all the rest.
_watched: dict[int, list[weakref.ref[Value]]] = {}
_swept = [0]  # lists that were left by the last sweep
_weak: Callable[[Value], weakref.ref[Value]] = weakref.ref


def watch(key: int, value: Value) -> None:
    """From now on `value` is told before a recorder lets a write into storage `key`."""
    found = _watched.get(key)
    if found is None:
        _watched[key] = [_weak(value)]
        if len(_watched) > 2 * _swept[0] + 1000:
            sweep()
    elif found[-1]() is not value:
        found.append(_weak(value))
        if len(found) > 8 and not len(found) & (len(found) - 1):  # now and then
            found[:] = [weak for weak in found if weak() is not None]


def sweep() -> None:
    """Forget the values that are gone, and the storages that nobody holds any more."""
    for key, found in tuple(_watched.items()):
        found[:] = [weak for weak in found if weak() is not None]
        if not found:
            del _watched[key]
    _swept[0] = len(_watched)


def overwriting(key: int, hidden: bool = False) -> None:
    """The content of storage `key` is about to change.

    `hidden`: by a kernel that moves running statistics without telling autograd, which then reads
    the new content of what it has saved of them.
    """
    for reference in _watched.pop(key, ()):
        value = reference()
        if value is None or value.held is None:
            continue
        if hidden and value.saves is not None and (value.op is not None or value.read):
            _leave_to_autograd(value)
        if value.op is not None:
            value.held = None  # it can be replayed
        elif value.read and value.intact():
            value.held = copy_of(value.held)
            value.version = _compat.version_of(value.held)


def _leave_to_autograd(value: Value) -> None:
    """What autograd has saved of this value stays the live memory, as in the plain step."""
    live = Value(None, value.nbytes, value.region)
    live.held, live.version = value.held, value.version
    live.saves, value.saves = value.saves, None
    for weak in live.saves or ():
        handle = weak()
        if handle is not None:
            handle.ref.value = live


def hold(value: Value, tensor: torch.Tensor) -> None:
    """Keep a value in memory through an alias that shares its version counter."""
    value.held = alias_of(tensor)
    value.version = _compat.version_of(value.held)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in _PLAIN:
        return _compat.detached_alias(tensor)
    with _compat.disable_torch_function_subclass():
        return _compat.detached_alias(tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry over a copy of the whole storage."""
    storage = tensor.untyped_storage().clone()
    with _compat.below_autograd():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
