"""Autograd: its hooks, the backward that runs, its nodes and its leaves.

Problem: a plan needs to know where gradients come from and go to, and which call of the forward a
running backward belongs to; torch tells that by names and numbers that it does not document.
Invariant: as in `lowtide._compat`, of which this is a part; a graph is read, never changed. Imports
torch. Rejected: hooks on every tensor, which change what users see and when memory is freed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _autograd as _bindings

# `torch.set_grad_enabled` as a plain call, without making a context object.
set_grad_mode = torch._C._set_grad_enabled


def push_saved_tensor_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """`torch.autograd.graph.saved_tensors_hooks` without its context object.

    A region opens and closes on every call of a small block. Unnecessary if the public class gets
    cheap.
    """
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks(pack: Callable[..., Any], *, every: bool = False) -> None:
    """Take the topmost hooks with this `pack` off the stack, or all of them, wherever in it they
    are, and leave the others: a program may have entered hooks of its own that are not left yet.

    torch's own code reads the topmost hooks in the same way. Unnecessary if the stack can be left
    in any order, and when a process that is forked begins without hooks.
    """
    others = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if top[0] != pack:
            others.append(top)
        elif not every:
            break
    for hooks in reversed(others):
        push_saved_tensor_hooks(*hooks)


def other_hooks_than(pack: Callable[..., Any] | None) -> bool:
    """Whether what autograd saves now goes to hooks with another `pack`; with None, to any.

    torch's own code reads the topmost hooks in the same way.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and bool(top[0] != pack)


_disable_hooks = inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks)


def refuses_hooks(error: RuntimeError) -> bool:
    """Whether torch raised this because saved-tensor hooks are disabled, or cannot be disabled.

    The text is the user's own, so what tells is the message in force, or the function that raised
    it. Unnecessary when torch raises an exception of a class of its own.
    """
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() == str(error):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is _disable_hooks.__code__


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that runs on this thread ends. Raises outside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether a backward runs on this thread. torch's own checkpoint asks in the same way."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_number() -> int:
    """A number of the backward that runs on this thread, which no other has; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def backward_retains_graph() -> bool:
    """Whether the backward that runs on this thread keeps the graph, as `retain_graph` asks.

    torch's own checkpoint asks in the same way. Unnecessary when nodes tell it in public.
    """
    return bool(_bindings._get_current_graph_task_keep_graph())


def newest_node() -> int:
    """The number that autograd gave the last node that it made on this thread.

    `Node._sequence_nr` is the same number, read from the node; neither has a public name. Both are
    unnecessary when torch says which call of the forward a running backward belongs to.
    """
    return int(_bindings._get_sequence_nr()) - 1


def node_in_backward() -> int | None:
    """The number of the node whose backward runs on this thread now; None outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def name_of_node_in_backward() -> str:
    """The class name of that node, which says whose formula runs; empty outside a backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf that collects a gradient for `tensor`: itself, or the parameter it is a view of.

    `Tensor._base` has no public name. `is_leaf` is not read from a view: if the base was written,
    torch makes the view's `grad_fn` anew to answer, which fails below autograd.
    """
    base = tensor._base
    if base is None:
        return tensor if tensor.is_leaf else None
    return base if base.requires_grad and base.is_leaf else None


def followed_by_hooks(leaf: torch.Tensor) -> bool:
    """Whether hooks run once its gradient is accumulated. Unnecessary when torch tells this in
    public."""
    return bool(leaf._post_accumulate_grad_hooks)


def hooks_of(tensor: torch.Tensor) -> list[dict[int, Any] | None]:
    """Its own hooks by their numbers: on its gradient, and once that is accumulated. Unnecessary
    when torch tells them in public."""
    after: dict[int, Any] | None = tensor._post_accumulate_grad_hooks
    return [tensor._backward_hooks, after]


def written_through(tensor: torch.Tensor) -> int:
    """Bytes of the base of a view that an operation with a gradient writes in place; 0 if the
    tensor is no view.

    Autograd records the write as one of the base (its `CopySlices`).
    """
    return _dense_bytes(tensor._base) if tensor._is_view() and tensor._base is not None else 0


def wanted_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the gradient that the backward of a call that reads `tensor` makes: as many as
    `tensor` has, or its base if that has more (a slice's gradient is as large as its base). 0 if it
    makes none, or none with dense memory, as for sparse tensors."""
    if not tensor.requires_grad:
        return 0
    base = tensor._base
    return max(_dense_bytes(tensor), 0 if base is None else _dense_bytes(base))


def _dense_bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.layout is not torch.strided or tensor.is_nested else tensor.nbytes


def parameter_of(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """The parameter that this is, or is a view of."""
    base = tensor._base
    base = tensor if base is None else base
    return base if isinstance(base, torch.nn.Parameter) else None


def leaves_behind(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from `outputs` would give gradients to."""
    found = [output for output in outputs if output.grad_fn is None]
    leaves = (getattr(node, "variable", None) for node in _nodes_behind(outputs))
    return found + [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@contextmanager
def before_backwards(
    tell: Callable[[list[torch.Tensor], list[torch.Tensor], bool], object],
) -> Iterator[None]:
    """Before each backward that this thread begins inside, `tell` gets what it begins with, the
    leaves that it reaches, and whether it gives them gradients, as `torch.autograd.grad` does not.

    Unnecessary when torch has a hook for the beginning of a backward.
    """
    begins = "_engine_run_backward"
    run, thread = getattr(torch.autograd, begins), threading.get_ident()

    def told(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(outputs, *args, **kwargs)
        inputs = args[3] if len(args) > 3 else ()  # after the gradients and two flags
        roots = [output for output in outputs if isinstance(output, torch.Tensor)]
        ends = inputs or leaves_behind(roots)
        leaves = [leaf for leaf in ends if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
        tell(roots, leaves, bool(kwargs.get("accumulate_grad")))
        return run(outputs, *args, **kwargs)

    setattr(torch.autograd, begins, told)
    try:
        yield
    finally:
        setattr(torch.autograd, begins, run)


def goes_through(outputs: list[torch.Tensor], nodes: Collection[Any]) -> bool:
    """Whether a backward from `outputs` reaches one of these nodes."""
    return bool(nodes) and any(node in nodes for node in _nodes_behind(outputs))


def runs_python(outputs: list[torch.Tensor]) -> bool:
    """Whether a backward from `outputs` runs that of a `torch.autograd.Function`."""
    kind = torch.autograd.function.BackwardCFunction
    return any(isinstance(node, kind) for node in _nodes_behind(outputs))


def _nodes_behind(outputs: list[torch.Tensor]) -> Iterator[Any]:
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)


def in_functorch() -> bool:
    """Whether a `torch.func` transform is active on this thread.

    Its dispatch key tells. To ask for its stack, `torch._C._functorch.peek_interpreter_stack`,
    makes one, which autograd from then on copies for each node of each backward on this thread.
    """
    front = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    return torch._C._dispatch_tls_is_dispatch_key_included(front)
