"""Which saved tensor comes back from a replay with another content than it had.

Problem: a wrong gradient shows in every layer before the one where it began. Invariant: what
autograd saves is summed up when it is saved and when it is handed back, so the first value in the
forward's order that differs is where it began. Nothing is written to, and no tensor is kept.
Imports the Python recorder, step and lines. Rejected: comparing gradients layer by layer, which
shows where a fault has spread to.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.dryrun.found import OUTSIDE, OWN
from lowtide.dryrun.lines import line_of_caller
from lowtide.dryrun.watching import module_calls
from lowtide.replay import unpack
from lowtide.step import recorded_by
from lowtide.tape.recorder import Recorder
from lowtide.tape.values import Handle


@dataclass(frozen=True)
class Origin:
    """A saved tensor that was replayed with another content than the one that was saved.

    Attributes:
        operator: what makes it, such as "aten::mul".
        module: the qualified name of the module that ran when it was saved.
        line: the line of the program that ran then, as `path:number`.
        shape: its sizes.
    """

    operator: str
    module: str
    line: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        at = f" ({self.line})" if self.line else ""
        return (
            f"a tensor of shape {list(self.shape)} saved in {self.module}{at}, which "
            f"{self.operator} makes"
        )


@dataclass(frozen=True)
class _Saved:
    content: int
    module: str
    line: str


class Watch:
    """What is saved and handed back while `watching`; see `Origin`."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._inside: list[str] = []
        self._saved: weakref.WeakKeyDictionary[Any, _Saved] = weakref.WeakKeyDictionary()
        self._found: dict[int, Origin] = {}

    @property
    def origin(self) -> Origin | None:
        """The first of the forward that differed, if one did."""
        return self._found[min(self._found)] if self._found else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record in Python what runs inside, and compare."""
        watch = self

        class Comparing(Recorder):
            def pack(self, tensor: torch.Tensor) -> Any:
                packed = super().pack(tensor)
                with _compat.disable_dispatch(), torch.no_grad():
                    watch._packed(packed, tensor)
                return packed

            @staticmethod
            def unpack(packed: Any) -> Any:
                tensor = unpack(packed)
                watch._unpacked(packed, tensor)
                return tensor

        with recorded_by(Comparing), module_calls(self._enter, self._leave):
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        outer = self._inside[-1] if self._inside else OUTSIDE
        name = self._names.get(id(module))
        self._inside.append(outer if name is None else name or OWN)

    def _leave(self, *_: Any) -> None:
        if self._inside:
            self._inside.pop()

    def _packed(self, packed: Any, tensor: torch.Tensor) -> None:
        content = _sum_of(tensor) if isinstance(packed, Handle) else None
        if content is not None:
            module = self._inside[-1] if self._inside else OUTSIDE
            self._saved[packed] = _Saved(content, module, line_of_caller())

    def _unpacked(self, packed: Any, tensor: torch.Tensor) -> None:
        saved = self._saved.get(packed) if isinstance(packed, Handle) else None
        if saved is None or packed.value.op is None or saved.content == _sum_of(tensor):
            return
        op = packed.value.op
        origin = Origin(op.facts.name, saved.module, saved.line, tuple(tensor.shape))
        self._found.setdefault(op.sequence, origin)


def _sum_of(tensor: torch.Tensor) -> int | None:
    """A checksum of a tensor's bytes; None if it has none of its own."""
    if _compat.has_own_dispatch(type(tensor)) or tensor.layout is not torch.strided:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    address = plain.data_ptr()
    return zlib.crc32((ctypes.c_char * plain.nbytes).from_address(address)) if address else 0
