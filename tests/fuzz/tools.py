"""Small things that programs call by name, beside autograd Functions and modules.

The problem: a layer wants its input in a certain shape, a hook or a context wants more than one
statement, and a program must stay one short text.

The invariant: each does what plain PyTorch code of a user's would do, in operations that a recorder
sees like any others. It imports torch only.

Rejected: writing these out in every program. A failure would be longer than what it shows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Stop(Exception):
    """Raised inside a region by programs that test what an exception leaves behind."""


def in_thread(function: Callable[[], object]) -> Any:
    """Run `function` on another thread, return its result, and raise here what it raised there."""
    caught: list[BaseException] = []
    results: list[object] = []
    threads = torch.get_num_threads()

    def body() -> None:
        try:
            torch.set_num_threads(threads)  # a new thread starts with the default
            results.append(function())
        except BaseException as error:  # handed to the caller below
            caught.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]
    return results[0]


_copying = threading.local()


@contextlib.contextmanager
def copied_saves() -> Iterator[None]:
    """Saved-tensor hooks of the user's own.

    They copy: torch's save_on_cpu hands CPU tensors through, and as hooks switch autograd's
    version check off, plain would then use what a later write in place left there.
    """
    before = getattr(_copying, "on", False)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        _copying.on = True
        try:
            yield
        finally:
            _copying.on = before


def rrelu(x: Tensor, lower: float, upper: float, *, inplace: bool = False) -> Tensor:
    """`F.rrelu` in training, but under `copied_saves`: autograd saves the noise before it is drawn,
    so that their copy is one of memory which nobody has filled, and no two steps are alike."""
    training = not getattr(_copying, "on", False)
    return F.rrelu(x, lower, upper, training=training, inplace=inplace)


def sized(x: Tensor, *shape: int) -> Tensor:
    """The elements of `x`, repeated or cut to fill `shape`."""
    count = torch.Size(shape).numel()
    flat = x.reshape(-1)
    return flat.repeat(-(-count // flat.numel()))[:count].view(shape)


def leaves(state: dict[str, Any]) -> list[Tensor]:
    """All tensors of a program's state that get gradients, those of its modules too."""
    found: list[Tensor] = []
    for value in state.values():
        if isinstance(value, torch.nn.Module):
            found += [p for p in value.parameters() if p.requires_grad]
        elif torch.is_tensor(value) and value.requires_grad:
            found.append(value)
    return found


def packed(module: torch.nn.Module, x: Tensor) -> Tensor:
    """A recurrent module on sequences of other lengths."""
    lengths = [x.shape[1], *[1] * (x.shape[0] - 1)]
    sequence = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    out, _ = module(sequence)
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    return padded


def drained(x: Tensor, wrap: Callable[..., Any]) -> Tensor:
    """Two generators that make tensors in turns, each inside of a region of its own."""

    def parts(scale: float) -> Iterator[Tensor]:
        y = x
        for _ in range(3):
            y = wrap(lambda t: torch.tanh(t * scale).exp(), y)
            yield y

    return sum((a * b for a, b in zip(parts(0.5), parts(0.9), strict=True)), x)


class Doubled(TorchFunctionMode):
    """A torch-function mode that changes what `torch.sin` does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin, torch.tanh) else out


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws that begin at `seed`, and leave the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def stepping(state: dict[str, Any]) -> Iterator[None]:
    """An optimizer whose steps are hooks of the backward."""

    def step(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p.sub_(torch.nan_to_num(p.grad).clamp(-1, 1), alpha=0.05)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in leaves(state)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def raising_once(tensor: Tensor) -> Any:
    """A hook that ends the first backward through `tensor`."""
    calls: list[int] = []

    def hook(gradient: Tensor) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Stop

    return tensor.register_hook(hook)


def saved_by_hand(tensors: list[Tensor]) -> list[Tensor]:
    """What the nodes behind `tensors` have saved, read as a program may read it."""
    found: list[Tensor] = []
    for tensor in tensors:
        node: Any = tensor.grad_fn
        for name in ("_saved_self", "_saved_other", "_saved_result", "_saved_mat1"):
            value = getattr(node, name, None)
            if isinstance(value, Tensor):
                found.append(value.detach().clone())
    return found
