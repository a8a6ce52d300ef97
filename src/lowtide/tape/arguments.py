"""The arguments of a forward that runs again, which may be anything.

Problem: the forward of a custom Function takes lists, dicts, objects with tensors in them, and
functions, which the program may change before a replay, and nobody would see it; and it may write
to its tensors with a kernel that no dispatcher sees. Invariant: a replay gets what the call got, or
the call is not recorded. Imports `_compat` and values. Rejected: deep copies of objects, of which
nobody knows what they hold.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.tape.values import tensors_in

# What nobody can change.
_FIXED = (type(None), bool, int, float, complex, str, bytes, range, type, enum.Enum, torch.dtype,
          torch.device, torch.layout, torch.memory_format, torch.Size)  # fmt: skip


def may_be_recorded(argument: Any) -> bool:
    """Whether a replay can be given the same: tensors, also in a list, generators, and what cannot
    change or is copied."""
    if type(argument) is list:
        return all(isinstance(each, torch.Tensor) or _known(each) for each in argument)
    return isinstance(argument, torch.Tensor | torch.Generator) or _known(argument)


def _known(argument: Any) -> bool:
    if isinstance(argument, _FIXED):
        return True
    if type(argument) is dict:
        return all(map(_known, (*argument, *argument.values())))
    if isinstance(argument, tuple) or type(argument) in (list, set, frozenset):
        return all(map(_known, argument))
    if isinstance(argument, types.FunctionType):
        return argument.__closure__ is None
    if isinstance(argument, types.BuiltinFunctionType):  # of a module, or of one of torch's classes
        return isinstance(argument.__self__, types.ModuleType | type | None)
    if dataclasses.is_dataclass(argument):
        frozen = type(argument).__dataclass_params__.frozen  # type: ignore[union-attr]
        return frozen and all(
            _known(getattr(argument, each.name)) for each in dataclasses.fields(argument)
        )
    return False


def copied(argument: Any) -> Any:
    """An argument in containers of its own, which the program cannot change. Tensors in them stay
    what they are."""
    kind = type(argument)
    if kind in (list, set, tuple):
        return kind(map(copied, argument))
    return {key: copied(each) for key, each in argument.items()} if kind is dict else argument


def needing(args: tuple[Any, ...], grads: tuple[bool, ...]) -> tuple[Any, ...]:
    """These arguments of a replay, with tensors that require a gradient where the program's did, as
    a forward may ask."""
    left = iter(grads)

    def one(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return argument.detach().requires_grad_() if next(left) else argument
        return list(map(one, argument)) if type(argument) is list else argument

    return tuple(map(one, args)) if any(grads) else args


def kind_of(args: tuple[Any, ...]) -> Any:
    """The kind of a call: its kernels may be others for other kinds."""
    tensors = [
        (t.dtype, t.device.type, t.dim(), t.requires_grad, t.layout == torch.strided
         and not t.is_nested and t.is_contiguous())
        for t in tensors_in(args, {})
    ]  # fmt: skip
    return (*tensors, *(a if isinstance(a, bool | str) else type(a) for a in args))


class Contents:
    """What is in the tensors among arguments, to see whether a call writes to them.

    Operators of torch's move a version. A kernel that no dispatcher sees does not; its writes
    change sums over the memory, taken as integers, if all of it is looked at (`whole`).
    """

    def __init__(self, args: tuple[Any, ...], *, whole: bool) -> None:
        self._tensors = [
            tensor for tensor in tensors_in(args, {})
            if not tensor.is_inference() and not fakes.is_fake(tensor)
        ]  # fmt: skip
        self._versions = list(map(_compat.version_of, self._tensors))
        self._whole = whole and not _capturing()
        self._sums = self._summed()

    def changed(self) -> bool:
        if list(map(_compat.version_of, self._tensors)) != self._versions:
            return True
        after = zip(self._sums, self._summed(), strict=True)
        with _compat.disable_dispatch(), _compat.below_autograd(), _compat.no_overrides():
            return not all(torch.equal(one, other) for one, other in after)

    def _summed(self) -> list[torch.Tensor]:
        if not self._whole:
            return []
        found: list[torch.Tensor] = []
        with _compat.disable_dispatch(), _compat.below_autograd(), _compat.no_overrides():
            for tensor in self._tensors:
                storage = None if _compat.has_own_dispatch(type(tensor)) else (
                    _compat.storage_of(tensor))  # fmt: skip
                if storage is None or tensor.device.type == "meta":
                    continue
                if not tensor.numel():
                    continue
                begin = tensor.storage_offset() * tensor.itemsize
                places = zip(tensor.shape, tensor.stride(), strict=True)
                end = begin + (1 + sum((n - 1) * step for n, step in places)) * tensor.itemsize
                first, last = min(-(-begin // 8), end // 8), end // 8  # whole words
                flat = torch.empty(0, dtype=torch.int64, device=tensor.device)
                flat = flat.set_(storage, first, (last - first,), (1,))
                # Several, as some changes (another order, another sign) leave one of them alone.
                found.extend(flat[::step].sum() for step in (1, 2, 3))
                edges = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                edges = edges.set_(storage, begin, (end - begin,), (1,))
                head = 8 * first - begin if last > first else end - begin
                found.extend((edges[:head].sum(), edges[8 * last - begin :][:8].sum()))
        return found


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
