"""Fake tensors: shapes without memory.

Problem: a step that does not fit is planned on shapes, and torch documents fake tensors only as an
idea behind torch.compile. Invariant: as in `lowtide._compat`, of which this is the part that dry
runs use, and what has to tell a fake tensor from a real one. All of it is unnecessary when torch
documents a way to run a program on shapes. Imports torch. Rejected: shape functions of our own,
which would cover only some of torch's operators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


def fake_mode(around: Iterable[torch.Tensor] = ()) -> Any:
    """A mode under which operators compute shapes only: that of a given fake tensor, if any."""
    dynamo_aside()
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for tensor in around:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Or `data_ptr` is 0, which a kernel that is no operator would write to.
    mode._allow_unsafe_data_ptr_access = False
    return mode


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Suppress the page that torch logs for each operator that fails on shapes, even if caught."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# By thread: the functions of TorchScript that were looked at, as one may come and go meanwhile.
_refusing: dict[int, dict[int, Any]] = {}
_refusing_lock = threading.Lock()
_SCRIPTS = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_calls = [kind.__call__ for kind in _SCRIPTS]


@contextlib.contextmanager
def lists_refused() -> Iterator[None]:
    """Raise where TorchScript on this thread is about to make a tensor of a list: it writes to the
    memory of the tensor, and under a mode for shapes there is none, which ends the process."""
    here = threading.get_ident()
    with _refusing_lock:
        if not _refusing:
            _call_scripts_by([_checked(call) for call in _calls])
        _refusing[here] = {}
    try:
        yield
    finally:
        with _refusing_lock:
            del _refusing[here]
            if not _refusing:
                _call_scripts_by(_calls)


def _call_scripts_by(calls: list[Callable[..., Any]]) -> None:
    for kind, call in zip(_SCRIPTS, calls, strict=True):
        setattr(kind, "__call__", call)  # noqa: B010


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    def checking(script: Any, *args: Any, **kwargs: Any) -> Any:
        safe = _refusing.get(threading.get_ident())
        if safe is not None and id(script) not in safe:
            if _makes_tensors_of_lists(script.graph):
                raise RuntimeError(f"TorchScript makes a tensor of a list in {script.name}")
            safe[id(script)] = script
        return call(script, *args, **kwargs)

    return checking


def _makes_tensors_of_lists(graph: Any) -> bool:
    """Whether a graph of TorchScript, with all that it calls, does; also on threads of its own."""
    graph = graph.copy()
    torch._C._jit_pass_inline(graph)
    return any(
        next(node.inputs()).type().kind() == "ListType"
        for kind in ("aten::tensor", "aten::as_tensor")
        for node in graph.findAllNodes(kind)
    ) or any(
        _makes_tensors_of_lists(node.g("Subgraph")) for node in graph.findAllNodes("prim::fork")
    )


def is_fake(tensor: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def mode_is_on() -> bool:
    """Whether a mode for fake tensors is on, so that factories make them."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def faked(mode: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of the same geometry; a tensor on the meta device is treated as on `device`."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return tensor
    fake: torch.Tensor
    if tensor.device.type == "meta":
        fake = FakeTensor(mode, tensor.detach(), device)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            fake._is_param = True
        return fake
    fake = mode.from_tensor(tensor)
    return fake


def fake_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def fake_maker(mode: Any) -> Callable[[torch.Tensor, torch.device], torch.Tensor]:
    """A function that makes a fake tensor from one on the meta device and the device that is meant.

    torch makes the first of each device. The others get the contents of its `__dict__`, without the
    thirty checks and assignments with which torch makes each one. Unnecessary when
    `FakeTensor.__new__` costs no more than that.
    """
    cls: Any = fake_type()
    alike: dict[torch.device, dict[str, Any]] = {}
    subclass = torch.Tensor._make_subclass
    guard = torch._C._set_throw_on_mutable_data_ptr
    if mode._allow_unsafe_data_ptr_access:
        guard = torch._C._set_warn_deprecated_on_mutable_data_ptr

    def make(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        known = alike.get(device)
        if known is None:
            first: torch.Tensor = cls(mode, tensor, device)
            alike[device] = dict(first.__dict__)
            return first
        made: torch.Tensor = subclass(
            cls,
            tensor,
            tensor.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        guard(made)
        made.__dict__.update(known)
        return made

    return make


def on_shapes(mode: Any) -> Any:
    """While this is open, operators treat fake tensors as tensors on the meta device."""
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    return in_kernel_invocation_manager(mode)


def asks_for_device(func: Any) -> bool:
    """Whether an "operator" only asks on which device a fake tensor is meant to be."""
    return func is _ASKS_FOR_DEVICE


_ASKS_FOR_DEVICE = torch.ops.prim.device.default


def depends_on_data() -> tuple[type[Exception], ...]:
    """What a fake tensor raises when its contents are read."""
    from torch._subclasses import fake_tensor

    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


def listing(elements: Callable[[torch.Tensor], Any]) -> AbstractContextManager[None]:
    """While this is open, `tolist()` of a fake tensor on this thread is `elements(tensor)`.

    The usual one reads one element after the other, with operators that a real tensor does not run.
    """
    return _replaced("tolist", elements)


def formatting(text: Callable[[torch.Tensor, str], str]) -> AbstractContextManager[None]:
    """While this is open, a fake tensor in an f-string on this thread is `text(tensor, format)`.

    The usual one reads the number in a tensor only if its type is exactly `torch.Tensor`.
    """
    return _replaced("__format__", text)


@contextlib.contextmanager
def _replaced(name: str, ours: Callable[..., Any]) -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensor

    usual, thread = getattr(FakeTensor, name), threading.get_ident()

    def call(tensor: Any, *args: Any) -> Any:
        return (ours if threading.get_ident() == thread else usual)(tensor, *args)

    setattr(FakeTensor, name, call)
    try:
        yield
    finally:
        setattr(FakeTensor, name, usual)


def constructors_known() -> None:
    """Have torch look up, once, the functions that a `torch.device` context concerns.

    One that is replaced for a while would be missed if torch looked at that moment, and for good.
    Unnecessary when torch asks a function for its name.
    """
    from torch.utils._device import _device_constructors

    _device_constructors()


@functools.cache
def dynamo_aside() -> None:
    """Import Dynamo, which torch itself does inside the first operator that it decomposes on the
    meta device.

    Something in Dynamo keeps the frame that imported it until Python collects garbage, and with it
    all its callers: the user's forward, and every activation that has a name there. A new thread
    has no callers. Unnecessary when torch does not import Dynamo there, or releases the frame.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()
