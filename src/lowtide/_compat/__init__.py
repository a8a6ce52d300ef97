"""Every use of a torch-private name, in one place: here, and for compiled code in `partitioner`.

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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch._C import _autograd as _bindings
from torch._C import _profiler as _kinds
from torch.autograd import profiler as _profiler
from torch.utils._python_dispatch import TorchDispatchMode

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


def cuda_in_use() -> bool:
    """Whether this process has touched CUDA; asking must not initialise it."""
    global _cuda_seen
    _cuda_seen = _cuda_seen or torch.cuda.is_initialized()
    return _cuda_seen


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


# --- fake tensors: shapes without memory --------------------------------------------------------

# Public to users of torch.compile only as an idea; all of this goes when torch documents a way to
# run a program on shapes.


def fake_mode(around: Iterable[torch.Tensor] = ()) -> Any:
    """A mode under which operators compute shapes only; that of a fake tensor given, if any."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for tensor in around:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def faked(mode: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A stand-in of the same geometry; one on the meta device is taken to be on `device`."""
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
    """Makes a fake tensor out of one on the meta device and the device that is meant.

    The first of a device is made by torch; what stands in its `__dict__` is put into the others,
    without the thirty checks and assignments with which torch makes each. Goes when
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
    """While this is open, operators take fake tensors for tensors on the meta device."""
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    return in_kernel_invocation_manager(mode)


def asks_for_device(func: Any) -> bool:
    """Whether an "operator" is the question where a fake tensor is meant to be."""
    return func is _ASKS_FOR_DEVICE


_ASKS_FOR_DEVICE = torch.ops.prim.device.default


def depends_on_data() -> tuple[type[Exception], ...]:
    """What a fake tensor raises when it is asked for what is in it."""
    from torch._subclasses import fake_tensor

    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


@contextlib.contextmanager
def listing(elements: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """While this is open, `tolist()` of a fake tensor on this thread is `elements(tensor)`.

    Its own asks for one element after the other, in operators that a real tensor does not run.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    cls: Any = FakeTensor
    usual, thread = cls.tolist, threading.get_ident()

    def tolist(tensor: Any) -> Any:
        return elements(tensor) if threading.get_ident() == thread else usual(tensor)

    cls.tolist = tolist
    try:
        yield
    finally:
        cls.tolist = usual


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


# --- state that operators read without being given it -----------------------------------------


_C = torch._C

# Where torch keeps a precision for float32 kernels: (backend, operation).
_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
_precision_of = _C._get_fp32_precision_getter


def ambient() -> tuple[Any, ...]:
    """Global switches that choose kernels and precision, as one comparable value (rule 5)."""
    return (
        _C._get_mkldnn_enabled(),
        _C._get_deterministic_algorithms(),
        _or_none(_C._get_float32_matmul_precision),
        torch.get_num_threads(),
        _C.get_default_dtype(),
        tuple([_precision_of(*pair) for pair in _PRECISIONS]),
        _cuda_switches() if _cuda_seen else None,
    )


def _or_none(get: Callable[[], Any]) -> Any:
    """An older switch: torch raises where a newer one was set to what the older cannot say."""
    try:
        return get()
    except RuntimeError:
        return None


_cuda_seen = False


def _cuda_switches() -> tuple[Any, ...]:
    return (
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        _or_none(_C._get_cudnn_allow_tf32),
    )


@contextlib.contextmanager
def restored_ambient(state: tuple[Any, ...]) -> Iterator[None]:
    """Run with the switches of `state`; leaves them as they were."""
    now = ambient()
    _set_ambient(state, now)
    try:
        yield
    finally:
        _set_ambient(now, state)


def _set_ambient(state: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    setters: tuple[Callable[[Any], object], ...] = (
        _C._set_mkldnn_enabled,
        lambda on: _C._set_deterministic_algorithms(
            on, warn_only=_C._get_deterministic_algorithms_warn_only()
        ),
        torch.set_float32_matmul_precision,
        torch.set_num_threads,
        torch.set_default_dtype,
    )
    cuda: tuple[Callable[[Any], object], ...] = (
        _C._set_cudnn_enabled,
        _C._set_cudnn_benchmark,
        _C._set_cudnn_deterministic,
        _C._set_cudnn_allow_tf32,
    )
    for setter, value, old in zip(setters, state, now, strict=False):
        if value != old and value is not None:
            setter(value)
    if state[-1] is not None:
        for setter, value, old in zip(cuda, state[-1], now[-1] or _cuda_switches(), strict=True):
            if value != old and value is not None:
                setter(value)
    for pair, value in zip(_PRECISIONS, state[5], strict=True):  # the older ones set these as well
        if _precision_of(*pair) != value:
            _C._set_fp32_precision_setter(*pair, value)


# --- the profiler, for memory events only -------------------------------------------------------

# torch has no public "memory events only" profile; all of this goes when it gets one, or a peak
# counter for the CPU.
_ACTIVITIES = {_kinds.ProfilerActivity.CPU}
# No operator runs in this scope, so that no operator is recorded.
_SILENT_SCOPE = {_kinds.RecordScope.LITE_INTERPRETER}
_ALLOCATION = _kinds._ExtraFields_Allocation


class _Untouched:
    """A false value put into torch's "a profiler is on" flag while memory events are recorded.

    The recorder behind the flag exists once per process, and stopping it after somebody else has
    started it crashes. Everybody who starts or stops a profiler overwrites the flag, so finding
    this very object in it afterwards proves that nobody did.
    """

    def __bool__(self) -> bool:
        return False


class _OfThread(threading.local):
    token: _Untouched | None = None


profiler_token = _OfThread()


def profiler_of_another() -> bool:
    """Whether a profiler of the user's is on or scheduled on any thread, or on this one."""
    # A profiler with a schedule is armed a step before the flag shows it; it is found by its
    # step counter, which exists from its construction to the end of its `with`.
    scheduled = torch.profiler.profiler.PROFILER_STEP_NAME in _profiler.KinetoStepTracker._step_dict
    unknown = _bindings._profiler_enabled() and profiler_token.token is None
    return scheduled or unknown or bool(_profiler._is_profiler_enabled)


def profiler_on_this_thread() -> bool:
    return bool(_bindings._profiler_enabled())


def start_memory_profiler() -> None:
    config = _kinds.ProfilerConfig(
        _kinds.ProfilerState.KINETO,
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # flops
        False,  # modules
        _kinds._ExperimentalConfig(),
    )
    _bindings._prepare_profiler(config, _ACTIVITIES)
    enable: Any = _bindings._enable_profiler  # the stub lacks the scopes
    enable(config, _ACTIVITIES, _SILENT_SCOPE)
    profiler_token.token = _Untouched()
    flagged: Any = _profiler
    flagged._is_profiler_enabled = profiler_token.token


def profiler_untouched() -> bool:
    """Whether the recorder still runs as this thread started it."""
    flag: object = _profiler._is_profiler_enabled
    mine = flag is profiler_token.token and _bindings._profiler_enabled()
    return mine and not profiler_of_another()


def stop_memory_profiler() -> list[Any]:
    """The allocations since the start: objects with `alloc_size` (signed), `ptr` and `device`."""
    profiler_token.token = None
    _profiler._is_profiler_enabled = False
    events = _bindings._disable_profiler().experimental_event_tree()
    fields = [event.extra_fields for event in events]
    return [field for field in fields if type(field) is _ALLOCATION]


# --- what the CUDA allocator did ----------------------------------------------------------------

# What memory_viz opens; torch documents these names and keeps the underscore. They go with it.


@contextlib.contextmanager
def cuda_history() -> Iterator[None]:
    """While this is open, the CUDA allocator remembers every block and the stack that asked."""
    record: Any = torch.cuda.memory._record_memory_history
    record(max_entries=1_000_000)
    try:
        yield
    finally:
        record(enabled=None)


def write_cuda_snapshot(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)
