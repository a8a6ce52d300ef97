"""Externals, and the writes that are about to overwrite them.

Problem: a replay reads parameters, buffers and inputs that the tape did not make, and the user may
change them in place before backward: a GAN's discriminator runs twice and its spectral-norm
vectors move in between. Invariant: before a write that any recorder sees reaches an external, its
old content is copied, whichever tape it belongs to; a write that no recorder saw is detected by the
version counter when the value is used (rule 4). Imports values. Rejected: copying every buffer when
it is first read, which always pays for a rare case.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch

from lowtide import _compat
from lowtide.tape.values import Value

PLAIN = (torch.Tensor, torch.nn.Parameter)
_weak: Callable[[Value], weakref.ref[Value]] = weakref.ref


class Watched:
    """Storage key -> values that hold an alias of it.

    The alias keeps the storage alive, so a key can mean another storage only after these values are
    gone. Dead references are swept from time to time: a weak reference's callback for each value
    would cost more than everything else here.
    """

    def __init__(self) -> None:
        self._storages: dict[int, list[weakref.ref[Value]]] = {}
        self._swept = 0  # storages left after the last sweep

    def add(self, key: int, value: Value) -> None:
        weak = _weak(value)
        found = self._storages.get(key)
        if found is None:
            found = self._storages.setdefault(key, [])
        found.append(weak)
        while self._storages.get(key) is not found:  # another thread has taken that list away
            found = self._storages.setdefault(key, [])
            found.append(weak)
        if len(found) == 1:
            if len(self._storages) > 2 * self._swept + 1000:
                self.sweep()
        elif len(found) > 8 and not len(found) & (len(found) - 1):  # at powers of two
            _forget_gone(found)

    def pop(self, key: int) -> list[Value]:
        """Stop watching a storage; returns the values that hold it."""
        found = self._storages.pop(key, ())
        return [value for weak in found if (value := weak()) is not None]

    def sweep(self) -> None:
        for key, found in list(self._storages.items()):
            _forget_gone(found)
            if not found:
                # Another thread may have added to it just now.
                for weak in self._storages.pop(key, ()):
                    if (value := weak()) is not None:
                        self.add(key, value)
        self._swept = len(self._storages)

    def counts(self) -> list[int]:
        """The number of references for each storage, dead ones not yet swept included."""
        return [len(found) for found in self._storages.values()]

    def everything(self) -> list[tuple[int, Value]]:
        return [
            (key, value)
            for key, found in self._storages.items()
            for weak in found
            if (value := weak()) is not None
        ]


def _forget_gone(found: list[weakref.ref[Value]]) -> None:
    """Take dead references out of a list to which another thread may be adding."""
    for weak in [weak for weak in found if weak() is None]:
        with contextlib.suppress(ValueError):  # the other one has
            found.remove(weak)


_table = [Watched()]


def use(table: Watched) -> None:
    """Use the compiled recorder's table in place of Python's: one table, for the values of both.

    An interrupt may come before all of the core is in use, and then all of this is done again.
    """
    if _table[0] is table:
        return
    for key, value in _table[0].everything():
        table.add(key, value)
    _table[0] = table


def watch(key: int, value: Value) -> None:
    """From now on `overwriting` takes care of `value` before a recorded write to storage `key`."""
    _table[0].add(key, value)


def unwatch(key: int) -> None:
    """The content of storage `key` is gone, and will be put back there: values that hold it find it
    there, as autograd does."""
    _table[0].pop(key)


def sweep() -> None:
    """Forget the values that are gone, and the storages that no value holds any more."""
    _table[0].sweep()


def counts() -> list[int]:
    """How many values are registered for each storage that is watched."""
    return _table[0].counts()


def overwriting(key: int, hidden: bool) -> None:
    """The content of storage `key` is about to change.

    `hidden`: by a kernel that moves running statistics without a new version. Autograd then reads
    the new content of what it has saved of them.
    """
    for value in _table[0].pop(key):
        if value.held is None:
            continue
        if hidden and value.saved and (value.op is not None or value.read):
            _leave_to_autograd(value)
        if value.op is not None:
            value.held = None  # it can be replayed
        elif value.read and value.intact():
            value.held = copy_of(value.held)
            value.version = _compat.version_of(value.held)
            value.home = _compat.stream_of((value.held,))


def _leave_to_autograd(value: Value) -> None:
    """What autograd has saved of this value stays the live memory, as in the plain step."""
    live = type(value)(None, value.nbytes, value.region)
    live.held, live.version = value.held, value.version
    value.hand_over(live)


def hold(value: Value, tensor: torch.Tensor) -> None:
    """Keep a value in memory through an alias that shares its version counter."""
    value.held = alias_of(tensor)
    value.version = _compat.version_of(value.held)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in PLAIN:
        return _compat.detached_alias(tensor)
    with _compat.disable_torch_function_subclass():
        return _compat.detached_alias(tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry over a copy of the whole storage."""
    if torch.is_inference_mode_enabled():  # its tensors have no version
        with torch.inference_mode(mode=False):
            return copy_of(tensor)
    storage = tensor.untyped_storage().clone()
    with _compat.below_autograd(), _compat.no_overrides():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
