"""Every use of a torch-private name, in one place.

What the engine needs stands here; beside it `fakes` (tensors without memory), `switches` (global
state that operators read), `profiling` (allocations) and `partitioner` (compiled code).

Problem: an engine below autograd needs names that torch does not promise to keep. Invariant: no
other file in the package touches one; each stands here with its reason and what would make it go.
Imports torch only. Rejected: `getattr` guards scattered where the names are used, which hide how
much of torch the library leans on.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C import _autograd as _bindings
from torch.utils._python_dispatch import TorchDispatchMode


def torch_has(release: tuple[int, int]) -> bool:
    """Whether torch is of this release or later."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= release


# --- dispatch ---------------------------------------------------------------------------------

# Below-autograd execution. torch offers no public way to run an operator under every mode,
# autocast and autograd; goes when `torch.library` has a "redispatch below" call.
_AUTOCAST_AND_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
for _name in torch._C.DispatchKey.__members__:
    if _name.startswith("Autocast") or _name in ("Python", "PythonDispatcher"):
        _AUTOCAST_AND_ABOVE = _AUTOCAST_AND_ABOVE.add(torch._C.DispatchKey.__members__[_name])


class below_autograd:
    """Run operators under autograd, autocast, dispatch modes and torch-function overrides."""

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        autograd = torch._C._AutoDispatchBelowADInplaceOrView()
        above = torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_AND_ABOVE)
        function = torch._C.DisableTorchFunction()
        above.__enter__()
        autograd.__enter__()
        function.__enter__()
        self._guards = (function, autograd, above)

    def __exit__(self, *exc: object) -> None:
        for guard in self._guards:
            guard.__exit__(None, None, None)


class Mode(TorchDispatchMode):
    """A dispatch mode without the guard against Dynamo that torch puts around each call.

    `never_compiled` keeps Dynamo out of our code at no cost; the guard costs more than recording
    an operation, and imports Dynamo. Goes if the guard gets cheap.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# The key of the compiled recorder: nothing but `compiled/recorder.h` uses it, see there. Python has
# no name for it.


def use_recorder_key(key: int) -> None:
    """From now on what runs `below_autograd` is not seen by the compiled recorder."""
    global _AUTOCAST_AND_ABOVE
    _AUTOCAST_AND_ABOVE = _AUTOCAST_AND_ABOVE.add(torch._C.DispatchKey(key))


class _Announced(dict[str, Any]):
    """torch's own table of higher-order operators, which tells of each that is added."""

    then: Callable[[Any], None]

    def __setitem__(self, name: str, operator: Any) -> None:
        super().__setitem__(name, operator)
        self.then(operator)


def each_higher_order_operator(then: Callable[[Any], None]) -> None:
    """Call `then` with every operator that exists in Python only, those to come included.

    torch offers neither a list nor an event.
    """
    table = _Announced(torch._ops._higher_order_ops)
    table.then = then
    torch._ops._higher_order_ops = table
    for operator in list(table.values()):
        then(operator)


def kernel_at_key(operator: Any, key: int, kernel: Callable[..., Any]) -> None:
    """Register a kernel for a higher-order operator; `py_impl` does not know the key."""
    operator.py_kernels.setdefault(torch._C.DispatchKey(key), kernel)


# An alias made without telling the modes on the stack; goes with a public equivalent.
disable_dispatch = torch._C._DisableTorchDispatch


class under_modes:
    """Lets the modes on the stack see what runs, also inside `disable_dispatch`."""

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


class Counter:
    """A tensor's version counter, without its memory.

    torch shows a counter's number and not which counter it is: `.data` has one of its own, `detach`
    and views share theirs. Goes when `.data` does.
    """

    __slots__ = ("_alias",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = detached_alias(tensor)
        with disable_dispatch(), torch.no_grad():
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a write through `tensor` moves this counter."""
        return shares_counter(self._alias, tensor)


def shares_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one version counter: moved through one, read through the other."""
    if one.is_inference() or other.is_inference():
        return False
    before, mine = other._version, one._version
    moved = max(before, mine) + 1
    set_version = torch._C._autograd._unsafe_set_version_counter
    set_version((other,), (moved,))
    shared = one._version == moved
    set_version((other,), (before,))
    return shared


def detached_alias(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` that shares the version counter, also when called below autograd.

    Inside a dispatch mode the key that makes views share their counter is switched off, and an
    alias made there would never show that its storage was written.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _EagerWhileRecording:
    """Dynamo's stance: eager on a thread that records, the user's own on every other.

    Left to itself, Dynamo finds our mode on the stack, skips the function *for good*, and raises
    if it was compiled with ``fullgraph=True``; inside the mode's own frames, where the mode is off
    the stack, it would compile the recorder. `torch.compiler.set_stance` would do, but for the
    whole process. Goes when the tape can stand around compiled code.
    """

    def __init__(self, users: Any, recording: Callable[[], bool], lost: Callable[[], None]) -> None:
        self.users = users
        self.recording = recording
        self.lost = lost

    @property
    def stance(self) -> str:
        return "force_eager" if self.recording() else str(self.users.stance)

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        # Read once a call of a compiled function, and not for a function that is exempt.
        if self.recording() and self.users.stance != "force_eager":
            self.lost()
        return bool(self.users.skip_guard_eval_unsafe)

    @property
    def backend(self) -> Any:
        return self.users.backend


_DYNAMO = "torch._dynamo.eval_frame"


class _OnImportOfDynamo(importlib.abc.MetaPathFinder):
    """Calls back once Dynamo has been imported, which a recording must not do by itself."""

    installed = False

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    @classmethod
    def install(cls, then: Callable[[], None]) -> None:
        if not cls.installed:
            cls.installed = True
            sys.meta_path.insert(0, cls(then))

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: Any) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def run_compiled_eagerly(recording: Callable[[], bool], lost: Callable[[], None]) -> None:
    """From now on compiled functions run eagerly on a thread where `recording()` is true.

    Each such call says so to `lost`. While nobody has used torch.compile it only sees to it that
    whoever is the first to do so, be it inside a recording, finds things as they should be.
    """
    dynamo: Any = sys.modules.get(_DYNAMO)
    if dynamo is None:
        _OnImportOfDynamo.install(lambda: run_compiled_eagerly(recording, lost))
        return
    users = getattr(dynamo, "_stance", None)
    if users is not None and type(users) is not _EagerWhileRecording:
        dynamo._stance = _EagerWhileRecording(users, recording, lost)


_F = TypeVar("_F", bound=Callable[..., Any])


def constant_while_compiling(function: _F) -> _F:
    """While Dynamo traces, `function` is called once, with constants, and its result is one.

    As `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: Callable[..., Any]) -> None:
    """Keep Dynamo out of `function` and all that it calls, without importing Dynamo."""
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


# A subclass that does not override dispatch carries this marker in place of a method.
_DISABLED_DISPATCH = torch._C._disabled_torch_dispatch_impl


class _DryRun(threading.local):
    """Whether this thread records a step of fake tensors, which then count as plain ones."""

    on = False


dry_run = _DryRun()


def has_own_dispatch(cls: type) -> bool:
    """Whether `cls` is a tensor subclass that intercepts operators (DTensor, FakeTensor)."""
    own = getattr(cls, "__torch_dispatch__", _DISABLED_DISPATCH) is not _DISABLED_DISPATCH
    return own and not (dry_run.on and cls.__name__ == "FakeTensor")


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass is made of, as `torch.compile` asks for them."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    parts = (getattr(tensor, name) for name in flatten()[0])
    return [part for part in parts if isinstance(part, torch.Tensor)]  # a mesh is another part


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the tensor's StorageImpl: what two aliases have in common.

    Raises NotImplementedError or RuntimeError for tensors without storage (sparse, oneDNN).
    `UntypedStorage._cdata` is the only identity torch gives a storage.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


# The autograd version counter. `Tensor._version` is documented but has no public name; raises
# RuntimeError for inference tensors. The bare getter: it is read for every argument.
version_of: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]


def leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf that collects a gradient for `tensor`: itself, or the parameter it is a view of.

    `Tensor._base` has no public name. A view is not asked whether it is a leaf: if its base was
    written, torch makes its `grad_fn` anew for the answer, which fails below autograd.
    """
    base = tensor._base
    if base is None:
        return tensor if tensor.is_leaf else None
    return base if base.requires_grad and base.is_leaf else None


_VIEWS = re.compile(
    "(View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Unsqueeze|Squeeze|Expand|Alias|Select|Slice"
    "|AsStrided|Diagonal|Unfold|Movedim)Backward[0-9]+"
)
_SPLITS = re.compile("(Split|SplitWithSizes|Unbind)Backward[0-9]+")


def gradient_of_part(tensor: torch.Tensor) -> str:
    """How autograd makes the gradient of a value of which `tensor` is a part.

    "joined": all at once, of the gradients of the pieces that a `split` or `unbind` gave; "padded":
    for this part alone, from zeros; "own": not at all, as autograd does not know that it is a part.

    The names of autograd's nodes are torch's own matter; an unknown one is taken for "padded".
    """
    if tensor._base is None:
        return "own"
    try:
        node = tensor.grad_fn if torch.is_grad_enabled() else None
    except RuntimeError:  # its base was written, and torch cannot make it anew below autograd
        return "padded"
    while node is not None and not _SPLITS.fullmatch(node.name()):
        node = node.next_functions[0][0] if _VIEWS.fullmatch(node.name()) else None
    return "padded" if node is None else "joined"


def storage_holders(storage: torch.UntypedStorage) -> int:
    """How many owners a storage has, its Python wrapper included; 0 where torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(storage._cdata)) if count is not None else 0


def push_saved_tensor_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """`torch.autograd.graph.saved_tensors_hooks` without its context object.

    A region opens and closes on every call of a small block; goes if the public class gets cheap.
    """
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running on this thread ends. Raises outside one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def newest_node() -> int:
    """The number that autograd gave the node it made last on this thread.

    `Node._sequence_nr` is the same number from the other side; neither has a public name. They go
    when torch says of a running backward which call of the forward it belongs to.
    """
    return int(_bindings._get_sequence_nr()) - 1


def node_in_backward() -> int | None:
    """The number of the node whose backward runs on this thread now, None outside of one."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def in_functorch() -> bool:
    """Whether a `torch.func` transform is active on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_script(module: object) -> bool:
    return isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction)


# Where torch's wrapper and its composable function for checkpointing are at home: told by name, as
# importing them loads torch.distributed. Go when torch can be asked whether a module has them.
CHECKPOINT_WRAPPER_HOME = "torch.distributed.algorithms._checkpoint"
COMPOSABLE_CHECKPOINT_HOME = "torch.distributed._composable.checkpoint_activation"


def is_compiled_module(module: object) -> bool:
    """Whether `module` is what `torch.compile(module)` returned, or was compiled in place.

    By name: importing torch._dynamo takes seconds, and where it is not imported there is none.
    Goes when torch tells.
    """
    return module.__dict__.get("_compiled_call_impl") is not None or any(
        c.__name__ == "OptimizedModule" and c.__module__ == "torch._dynamo.eval_frame"
        for c in type(module).__mro__
    )


cuda_seen = False


def cuda_in_use() -> bool:
    """Whether this process has touched CUDA; asking must not initialise it."""
    global cuda_seen
    cuda_seen = cuda_seen or torch.cuda.is_initialized()
    return cuda_seen


def synchronize() -> None:
    """Wait for the current CUDA device: only in steps whose operations are timed."""
    torch.cuda.synchronize()


def stream_of(args: Any) -> Any:
    """The CUDA stream that an operation on these arguments is about to run on, or None."""
    for argument in args:
        if isinstance(argument, torch.Tensor) and argument.is_cuda:
            return torch.cuda.current_stream(argument.device)
        if isinstance(argument, list | tuple) and argument and argument is not args:
            stream = stream_of(argument)
            if stream is not None:
                return stream
    return None


# `torch.set_grad_enabled` as a plain call, without making a context object.
set_grad_mode = torch._C._set_grad_enabled


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Run on a recorded stream, ordered after and before the current one."""
    current = torch.cuda.current_stream(stream.device)
    if current == stream:
        yield
        return
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


# Attribute access and calls on tensor subclasses without their Python overrides.
disable_torch_function_subclass = torch._C.DisableTorchFunctionSubclass


def selective_policy(context: object) -> Callable[..., Any] | None:
    """The policy function inside a context of `create_selective_checkpoint_contexts`.

    torch gives no accessor; goes when the caching mode has a public `policy_fn`.
    """
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    if isinstance(context, _CachingTorchDispatchMode):
        policy: Callable[..., Any] = context.policy_fn
        return policy
    return None


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor, None where it has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def leaves_behind(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from `outputs` would give gradients to."""
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs]
    found = [output for output in outputs if output.grad_fn is None]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


def parameters_and_buffers(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries themselves: they can be changed without the module's `__setattr__`."""
    return module._parameters, module._buffers
