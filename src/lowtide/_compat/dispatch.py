"""Which layers of torch's dispatcher an operation passes through.

Problem: the engine records and replays below autograd and autocast, and hides its own operations
from the modes on the stack. Invariant: as in `lowtide._compat`, of which this is a part; all state
is left as it was found, and only this module knows the layers that `use_recorder_key` adds. Imports
torch. Rejected: a wrapper subclass in place of a mode, which users would see as the type of their
tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Name, arguments and mutability of an overload. Unnecessary when `OpOverload` has public ones."""


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open, which belongs to the process."""
    return forward_ad._current_level >= 0


def schema_if_any(func: Any) -> Any:
    """The same; None for a higher-order operator, which has none."""
    return getattr(func, "_schema", None)


def operator_name(thing: object) -> str | None:
    """The qualified name of an operator, however it is given: as a name, an operator, an overload
    of one, or what ``torch.library.custom_op`` returns. None: it is none. Unnecessary when torch's
    classes of operators have public names and attributes."""
    if isinstance(thing, torch._ops.OpOverload):
        return str(thing._schema.name)
    if isinstance(thing, torch._ops.OpOverloadPacket):
        return str(thing._qualified_op_name)
    if isinstance(thing, CustomOpDef):
        return str(thing._qualname)
    return thing if isinstance(thing, str) else None


def is_registered(name: str) -> bool:
    """Whether there is an operator of this qualified name. Unnecessary as above."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def is_operator(thing: object) -> bool:
    """Whether it is an operator (``torch.ops.aten.mm``) or an overload of one. Unnecessary when
    torch names their classes in public."""
    return isinstance(thing, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


index_put_unchecked = torch.ops.aten._index_put_impl_.default
"""What `index_put_` is below autograd when no mode is on. Unnecessary when it is so under modes."""

unsafe_view = torch.ops.aten._unsafe_view.default
"""How `matmul` shapes what it made, which autograd takes for no view. Unnecessary when `matmul` of
fake tensors runs the operators of real ones."""


def overloads_beside(func: Any) -> list[Any]:
    """The other overloads of an overload's operator. Unnecessary when torch has this in public."""
    packet = func.overloadpacket
    found = [getattr(packet, name) for name in packet.overloads()]
    return [overload for overload in found if overload is not func]


def names_aten_operator(name: str, overload: str | None = None) -> bool:
    """Whether torch has an operator `aten::name`, with this overload if one is given."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return overload is None or overload in packet.overloads()


def added_in_python(schema: Any) -> bool:
    """Whether it is the schema of an operator that Python code has added, to a namespace of its own
    or another's, and may take away again. Unnecessary when `torch.library` tells this in public."""
    overload = schema.overload_name
    return (f"{schema.name}.{overload}" if overload else schema.name) in torch.library._defs


def aten_operators() -> list[str]:
    """The names of torch's operators. Unnecessary with a public list of them."""
    names = torch._C._dispatch_get_all_op_names()
    return [name[6:].split(".")[0] for name in names if name.startswith("aten::")]


def runs_as_others(name: str) -> bool:
    """Whether torch runs the operator `aten::name` as others, above everything that records, as it
    does `linear`. Unnecessary when torch says so in public."""
    packet = getattr(torch.ops.aten, name)
    kernels = []
    for overload in (getattr(packet, each) for each in packet.overloads()):
        if any(argument.is_out for argument in overload._schema.arguments):
            continue
        with suppress(RuntimeError):  # some exist in TorchScript only
            kernels.append(
                torch._C._dispatch_has_kernel_for_dispatch_key(
                    overload.name(), "CompositeImplicitAutograd"
                )
            )
    return bool(kernels) and all(kernels)


# Execution below autograd. torch has no public way to run an operator below all modes, autocast and
# autograd. Unnecessary when `torch.library` has a "redispatch below" call. A backward may run in a
# `vmap`, torch.func's or autograd's own (`is_grads_batched`): a replay that it asks for is not part
# of the batch, and neither are the random numbers that the replay draws.
_AUTOGRAD_AND_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
for _name in torch._C.DispatchKey.__members__:
    if _name.startswith(("Autocast", "FuncTorch")) or _name in ("Python", "PythonDispatcher"):
        _AUTOGRAD_AND_ABOVE = _AUTOGRAD_AND_ABOVE.add(torch._C.DispatchKey.__members__[_name])
# Some have no name in Python, such as autograd's `vmap`.
for _name in (
    "VmapMode", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"
):  # fmt: skip
    _AUTOGRAD_AND_ABOVE = _AUTOGRAD_AND_ABOVE.add(torch._C._dispatch_key_parse(_name))


def below_autograd() -> AbstractContextManager[None]:
    """Run operators below autograd, autocast, transforms and modes; with `no_overrides`, also below
    torch-function overrides.

    One for both would be a class of Python's: an interrupt that arrives as its `__exit__` begins
    would leave the process without autograd.
    """
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD_AND_ABOVE)
    return guard


no_overrides = torch._C.DisableTorchFunction

_AUTOGRAD = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutogradFunctionality"))
for _name in ("AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
    _AUTOGRAD = _AUTOGRAD.add(torch._C._dispatch_key_parse(_name))
_OF_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_OF_PYTHON = _OF_PYTHON.add(torch._C.DispatchKey.PythonTLSSnapshot)


def through_autograd_again() -> AbstractContextManager[None]:
    """Inside of `below_autograd`: run operators through autograd all the same, as the forward of a
    custom Function runs, which may differentiate a graph of its own. Unnecessary as above."""
    keys = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    if not torch._C._len_torch_dispatch_stack():  # then what this lets in is subclasses alone
        keys -= _OF_PYTHON
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), keys
    )
    return guard


@contextmanager
def default_device(device: torch.device) -> Iterator[None]:
    """Make this the default device, also inside of `no_overrides`. Unnecessary when torch has a
    default device that is not a mode."""
    if device == _CPU:  # what it is below overrides
        yield
        return
    with torch._C._EnableTorchFunction(), device:
        yield


_CPU = torch.device("cpu")


def without_inference_mode() -> AbstractContextManager[object]:
    """Leave inference mode, in which a backward may ask for what is replayed: tensors made in that
    mode have no version. Enter it before `below_autograd`, whose keys it sets."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(mode=False)
    return _no_change


_no_change = nullcontext()


def skips_autograd() -> bool:
    """Whether operators that are called now on this thread bypass autograd."""
    return bool(
        torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    )


def differentiates_flex_attention(name: str) -> bool:
    """Whether a higher-order operator that is called now, below autograd, is a `flex_attention`
    that has a backward: it runs in a `torch.autograd.Function`, in which grad is disabled.

    Unnecessary when torch tells an operator inside of such a function from one under `no_grad`.
    """
    module = sys.modules.get("torch._higher_order_ops.flex_attention")
    if name != "flex_attention" or module is None:
        return False
    code = module.FlexAttentionAutogradOp.forward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("joint_graph") is not None


def modes_of_users() -> bool:
    """Whether a dispatch mode of the user's own is on: it may change what operators do."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    ours = ("torch", "lowtide")
    return any(type(mode).__module__.partition(".")[0] not in ours for mode in modes)


def function_modes_of_users() -> bool:
    """Whether a torch-function mode of the user's own is on: it may change what functions do."""
    ours = ("torch", "lowtide")
    return bool(torch._C._len_torch_function_stack()) and any(
        type(mode).__module__.partition(".")[0] not in ours
        for mode in torch.overrides._get_current_function_mode_stack()
    )


class Mode(TorchDispatchMode):
    """A dispatch mode without the guard against Dynamo that torch puts around each call.

    `never_compiled` keeps Dynamo out of our code at no cost; the guard costs more than recording
    an operation, and imports Dynamo. Unnecessary if the guard gets cheap.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def put_on_mode(mode: TorchDispatchMode) -> None:
    """Enter a mode that may be left in any order, by `take_off_mode`.

    `TorchDispatchMode.__enter__` also sets flags of the process, by which Dynamo knows of modes,
    and `__exit__` sets what they were. With modes that are left in another order, or an interrupt
    in between, they stay set, and torch 2.10 then compiles nothing any more. A recording does not
    need them: see `run_compiled_eagerly`. Unnecessary when torch looks at the stack itself.
    """
    torch.utils._python_dispatch._push_mode(mode)


def is_on(mode: TorchDispatchMode) -> bool:
    """Whether a mode would see a call: not while it handles one, nor while modes are disabled."""
    if _excluded(torch._C.DispatchKey.Python):
        return False
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(each is mode for each in modes)


def take_off_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off wherever on the stack it is, if it is there, and leave the others.

    Unnecessary if modes can be left in any order.
    """
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for _ in [mode, *above]:
        torch.utils._python_dispatch._pop_mode()
    for other in above:
        torch.utils._python_dispatch._push_mode(other)


# The keys that resolve lazy conjugation and negation, which both are above the modes.
_CONJUGATE, _NEGATIVE = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on real tensors from the handler of a mode.

    torch excludes all keys above modes while a handler runs. A kernel that lazily conjugates a
    tensor of its own (`linalg_pinv`, `linalg_polar`) then reads it unconjugated, and its result is
    wrong, not just rounded differently: pytorch/pytorch#198118. Unnecessary when that is closed.
    """
    if not (_excluded(_CONJUGATE) and _excluded(_NEGATIVE)):
        return func(*args, **kwargs)
    _exclude(_CONJUGATE, False)
    _exclude(_NEGATIVE, False)
    try:
        return func(*args, **kwargs)
    finally:
        _exclude(_CONJUGATE, True)
        _exclude(_NEGATIVE, True)


# The compiled recorder's key, `KEY` in `compiled/facts.h`, has no name in Python.
_before_modes = False


def compiled_before_modes() -> bool:
    """Whether the compiled recorder sees an operator before the modes on the stack do.

    True up to torch 2.10, where its key is above theirs; unnecessary without that version.
    """
    return _before_modes


def use_recorder_key(key: int) -> None:
    """Hide from the compiled recorder, from now on, what runs `below_autograd`."""
    global _AUTOGRAD_AND_ABOVE, _before_modes
    _before_modes = key > int(torch._C.DispatchKey.Python.value)
    _AUTOGRAD_AND_ABOVE = _AUTOGRAD_AND_ABOVE.add(torch._C.DispatchKey(key))


def excludes(key: int) -> bool:
    """Whether a dispatch key is excluded on this thread, as inside of what it handles."""
    return _excluded(torch._C.DispatchKey(key))


# For an alias that the modes on the stack do not see; unnecessary with a public equivalent.
disable_dispatch = torch._C._DisableTorchDispatch


class under_modes:
    """Let the modes on the stack see what runs, also inside `disable_dispatch`."""

    def __enter__(self) -> None:
        self._guard = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Python, False)
        self._state = torch._C._SetExcludeDispatchKeyGuard(
            torch._C.DispatchKey.PythonTLSSnapshot, False
        )
        self._guard.__enter__()
        self._state.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._state.__exit__(None, None, None)
        self._guard.__exit__(None, None, None)


# Attribute access and calls on tensor subclasses without their Python overrides.
disable_torch_function_subclass = torch._C.DisableTorchFunctionSubclass


class _Announced(dict[str, Any]):
    """torch's own table of higher-order operators, which announces each one that is added."""

    then: Callable[[Any], None]

    def __setitem__(self, name: str, operator: Any) -> None:
        super().__setitem__(name, operator)
        self.then(operator)


def each_higher_order_operator(then: Callable[[Any], None]) -> None:
    """Call `then` with every operator that exists in Python only, including future ones.

    torch has neither a list of them nor an event.
    """
    table = _Announced(torch._ops._higher_order_ops)
    table.then = then
    torch._ops._higher_order_ops = table
    for operator in list(table.values()):
        then(operator)


def kernel_at_key(operator: Any, key: int, kernel: Callable[..., Any]) -> None:
    """Register a kernel for a higher-order operator; `py_impl` does not know the key."""
    operator.py_kernels.setdefault(torch._C.DispatchKey(key), kernel)
