"""What autograd saves of wrapper subclasses: DTensor, jagged nested tensors, quantized ones.

Problem: a wrapper has no memory of its own but consists of other tensors, which the tape knows like
any others; holding the wrapper would hold their memory. Invariant: its parts are packed one by one,
and put together again as `torch.compile` does it; a write to the wrapper is noticed by the
wrapper's own version, as autograd notices it. Imports values. Rejected: a handle for the wrapper:
neither planner nor replay would know what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide.tape.values import Kept


def kept(
    tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> Any:
    """What autograd is to hold in place of a tensor of a class with its own dispatch.

    One whose class does not say what it consists of, or has no alias without parts, is kept whole.
    One that a collective is still filling is waited for, as the operator that reads it would.
    """
    filled = _compat.awaited(tensor)
    if filled is not None:
        return pack(filled)
    if _compat.is_wrapper(type(tensor)):
        counted = _compat.hollow(tensor)
        if counted is not None:
            return Wrapped(tensor, counted, pack, unpack)
    return Kept(_compat.detached_alias(tensor))  # the class's own detach keeps the class


def _may_be_another(part: torch.Tensor) -> bool:
    """Whether a tensor of the same content may take the place of this part. Nested tensors tell
    equal lengths by the identity of their offsets, which are integers; a mask is a part like any
    other, and a fourth of what it masks."""
    return part.is_floating_point() or part.is_complex() or part.dtype is torch.bool


class Wrapped:
    """A wrapper, taken apart.

    Attributes:
        counted: an alias of the wrapper without its parts, which has its version counter.
    """

    __slots__ = ("_kind", "_layout", "_parts", "_unpack", "counted", "version")

    def __init__(
        self,
        tensor: torch.Tensor,
        counted: torch.Tensor,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], Any],
    ) -> None:
        self._kind, self._unpack, self.counted = type(tensor), unpack, counted
        names, context = _compat.taken_apart(tensor)
        self._layout = context, tensor.size(), tensor.stride()
        self._parts: dict[str, tuple[Any, bool]] = {}  # the part or what stands for it; if packed
        for name in names:
            part = getattr(tensor, name)
            if not isinstance(part, torch.Tensor):
                self._parts[name] = part, False
            elif _may_be_another(part):
                self._parts[name] = pack(part), True
            else:
                self._parts[name] = Kept(part), True
        self.version = -1 if tensor.is_inference() else _compat.version_of(tensor)

    def intact(self) -> bool:
        return self.version < 0 or _compat.version_of(self.counted) == self.version

    @property
    def shape(self) -> torch.Size:
        return self._layout[1]

    @property
    def tensor(self) -> torch.Tensor:
        """The wrapper again, put together from its parts."""
        parts = {
            name: self._unpack(part) if packed else part
            for name, (part, packed) in self._parts.items()
        }
        return _compat.put_together(self._kind, parts, *self._layout)
