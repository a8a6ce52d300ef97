"""A fast path for calls on fake tensors, for operators whose meta kernels give the result.

Problem: torch examines every argument of every call on fake tensors in Python, which takes half a
millisecond; ten thousand operations and their backward take half a minute. Invariant: the fast path
is used only for simple calls on fake tensors of one device, and only for operators on which it gave
exactly torch's own result (sizes, strides, dtypes, storages) on their first calls; everything else
takes torch's path. Imports `_compat`, lengths and kernels. Rejected: meta tensors in place of fake
ones, for which torch and user code choose other operators than for the intended device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.dryrun import lengths
from lowtide.kernels import fourier, grouped, quick
from lowtide.kernels.mixed import dtypes_of_results
from lowtide.kernels.pointwise import kept_of_bags, kept_storage
from lowtide.tape.operators import FACTS, facts_of
from lowtide.tape.values import flatten

_CHECKED_CALLS = 2
# What the kernels on the CPU return, whatever the layout of what they read, or in the channels-last
# format of that argument. Fake tensors say otherwise.
_CONTIGUOUS = frozenset(
    f"aten::{name}"
    for name in (
        "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "glu_backward",
        "log_sigmoid_forward", "rrelu_with_noise",
        "rrelu_with_noise_backward",
    )
)  # fmt: skip
_FOLLOWS = {
    "aten::channel_shuffle": 0,
    "aten::max_unpool2d": 0,
    "aten::roll": 0,
    "aten::reflection_pad2d_backward": 1,
    "aten::replication_pad2d_backward": 1,
    "aten::replication_pad3d": 0,
    "aten::replication_pad3d_backward": 1,
}
# The first result of these has the channels-last format of that argument, or else is contiguous.
_NORMALIZED = {"aten::native_batch_norm": 0, "aten::native_batch_norm_backward": 1}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# The dimensions that they do not transform lie in the result in an order of their own, if some have
# equal strides, as after `expand`.
_FOURIER = frozenset({"aten::_fft_r2c", "aten::_fft_c2c", "aten::_fft_c2r"})
# What these return lies in memory as the gradient does that they are given.
_AS_GIVEN = frozenset(
    f"aten::{name}_backward"
    for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "native_dropout", "softplus")
)


class Shapes:
    """Calls operators on fake tensors of one mode."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._trust: dict[Any, int] = {}  # calls that agreed; -1: never use the fast path again
        self._results: dict[Any, Any] = {}
        self._make: Callable[..., Any] = fakes.fake_maker(mode)
        self._kind = fakes.fake_type()

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = _compat.schema_of(func).name
        if name == lengths.NAME and (sized := lengths.on_shapes(args)) is not None:
            return tuple([self._make(tensor, args[0].device) for tensor in sized])
        result = grouped.on_shapes(self._called, func, args, kwargs)
        dtypes = dtypes_of_results(name, args)
        if name in _NORMALIZED and args[0].device.type == "cpu" and result[0] is not None:
            form = _format(args[_NORMALIZED[name]]) or torch.contiguous_format
            result = (self._in_format(result[0], form, args[0].device), *result[1:])
        if dtypes:
            return self._of_dtypes(dtypes, args[0].device, result)
        if name in _FOURIER and args[0].device.type == "cpu" and torch.backends.mkl.is_available():
            strides = fourier.strides_of_result(name, args[0], args, result.shape)
            return self._strided(result, strides, args[0].device)
        if name in _CONTIGUOUS or name in _FOLLOWS:
            return self._laid_out(name, args, result)
        if name in _AS_GIVEN:
            return self._as_given(args[0], result)
        if name == "aten::_embedding_bag" and args[0].device.type == "cpu":
            for place, nbytes in kept_of_bags(args, result).items():
                _enlarge(result[place], nbytes)
        kept = kept_storage(name, args)
        if kept is not None and isinstance(result, torch.Tensor):
            _enlarge(result, kept)
        return result

    def _of_dtypes(
        self, dtypes: dict[int, torch.dtype], device: torch.device, result: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The results with these dtypes, by position."""
        found = list(result)
        for place, dtype in dtypes.items():
            if found[place] is None or found[place].dtype == dtype:
                continue
            with _compat.disable_dispatch():
                made = torch.empty(found[place].shape, dtype=dtype, device="meta")
            found[place] = self._make(made, device)
        return tuple(found)

    def _laid_out(self, name: str, args: tuple[Any, ...], result: Any) -> Any:
        """The result in the layout that the kernel on the CPU gives it."""
        device, form = args[0].device, torch.contiguous_format
        if device.type != "cpu":
            return result
        follows = args[_FOLLOWS[name]] if name in _FOLLOWS else None
        if follows is not None and follows.dim() in _LAST:
            known = _format(follows)
            if known is None:
                return result
            form = known
        several = isinstance(result, tuple)
        found = [
            self._in_format(tensor, form, device) for tensor in (result if several else (result,))
        ]
        return tuple(found) if several else found[0]

    def _in_format(
        self, tensor: torch.Tensor, form: torch.memory_format, device: torch.device
    ) -> torch.Tensor:
        with _compat.disable_dispatch():
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=form)
        return tensor if tensor.stride() == made.stride() else self._make(made, device)

    def _as_given(self, gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The result in the layout of the gradient, if that has neither gaps nor overlaps."""
        strides = gradient.stride()
        if gradient.device.type != "cpu" or result.stride() == strides:
            return result
        with _compat.disable_dispatch():
            made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device="meta")
            dense = torch.empty_like(made).stride() == strides
        return self._make(made, gradient.device) if dense else result

    def _strided(
        self, tensor: torch.Tensor, strides: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        with _compat.disable_dispatch():
            made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
        return tensor if tensor.stride() == strides else self._make(made, device)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trust = self._trust.get(func)
        if trust is None:
            trust = self._trust[func] = 0 if _plain(func) else -1
        if trust < 0 or (kwargs and not _harmless(kwargs)) or _layout_of_backend(func, args):
            return func(*args, **kwargs)
        device = self._device(args)
        if device is None:
            return func(*args, **kwargs)
        if trust >= _CHECKED_CALLS:
            try:
                return self._again(func, args, kwargs, device)
            except Exception:  # a mask among indices, for example: this call needs contents
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        try:
            same = _geometry(self._short(func, args, kwargs, device)) == _geometry(result)
        except Exception:  # there is no meta kernel; operators report that in many ways
            same = False
        self._trust[func] = trust + 1 if same else -1
        return result

    def _device(self, args: tuple[Any, ...]) -> torch.device | None:
        """The device of all tensors of a call; None unless all are fake and on one device."""
        found: torch.device | None = None
        kind = self._kind
        for argument in args:
            for tensor in argument if type(argument) is list else (argument,):
                if isinstance(tensor, torch.Tensor):
                    if type(tensor) is not kind:
                        return None
                    where = tensor.fake_device  # type: ignore[attr-defined]
                    if found is None:
                        found = where
                    elif found != where:
                        return None
        return found

    def _again(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """As `_short`, with a cache: repeated layers call operators with the same shapes."""
        if kwargs or facts_of(func).view:
            return self._short(func, args, kwargs, device)
        key = (func, device, *map(_key, args))
        known = self._results.get(key)
        if known is None:
            result = self._short(func, args, kwargs, device)
            self._results[key] = _fresh(result, args) or ()
            return result
        if not known:
            return self._short(func, args, kwargs, device)
        with _compat.disable_dispatch():
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device="meta")
                for size, stride, dtype in known[1]
            ]
        outputs = [self._make(tensor, device) for tensor in made]
        return known[0](outputs) if known[0] is not None else outputs[0]

    def _short(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        with fakes.on_shapes(self._mode):
            result = quick.made_by(func, args, kwargs)
            if result is None:
                result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return self._make(result, device)
        if isinstance(result, tuple | list):
            return type(result)(
                [self._make(r, device) if isinstance(r, torch.Tensor) else r for r in result]
            )
        return result


def _format(tensor: torch.Tensor) -> torch.memory_format | None:
    """The format that a tensor lies in memory in; None if in another order, or with gaps."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    last = _LAST.get(tensor.dim())
    return last if last is not None and tensor.is_contiguous(memory_format=last) else None


def _enlarge(result: torch.Tensor, nbytes: int) -> None:
    """Give a result a storage of at least so many bytes."""
    storage = result.untyped_storage()
    storage.resize_(max(nbytes, storage.nbytes()))


def _key(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if type(argument) is list:
        return tuple(map(_key, argument))
    return type(argument), argument


def _fresh(result: Any, args: Any) -> tuple[Any, list[Any]] | None:
    """How to make this result again; None unless it is only tensors with new, dense storages. (What
    asks whether two tensors are alike makes none.)"""
    given = {_compat.storage_id(t.untyped_storage()) for a in args for t in flatten(a)
             if isinstance(t, torch.Tensor)}  # fmt: skip
    several = type(result) if isinstance(result, tuple | list) else None
    made = []
    for tensor in flatten(result):
        if not isinstance(tensor, torch.Tensor) or tensor.storage_offset():
            return None
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        storage = tensor.untyped_storage()
        if _compat.storage_id(storage) in given:  # a view not declared as one, as `_unsafe_view`
            return None
        if tensor.numel() and storage.nbytes() != span * tensor.element_size():
            return None
        made.append((tensor.shape, tensor.stride(), tensor.dtype))
    return (several, made) if made else None


def _plain(func: Any) -> bool:
    """Whether an operator only makes new tensors or views from its arguments."""
    facts = FACTS.get(id(func)) or facts_of(func)
    return (facts.simple or facts.view) and facts.name.startswith("aten::")


def _layout_of_backend(func: Any, args: Any) -> bool:
    """Whether the strides of the result depend on the backend that torch selects for fake tensors.
    The fast path does not know it, and agrees only if everything is contiguous."""
    return "convolution" in _compat.schema_of(func).name and any(
        not t.is_contiguous() for t in args[:3] if isinstance(t, torch.Tensor)
    )


def _harmless(kwargs: dict[str, Any]) -> bool:
    return all(
        key != "device" and not isinstance(value, torch.Tensor | list)
        for key, value in kwargs.items()
    )


def _geometry(result: Any) -> list[Any]:
    return [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes())
        if isinstance(t, torch.Tensor)
        else t
        for t in flatten(result)
    ]
