"""`one_hot` of fake tensors, by the operators that real ones get.

Problem: torch compares fake indices with a range, and scatters real ones into zeros: a plan for the
first is left at this operation by the step that it is for. Invariant: operators and sizes are those
of a real tensor; its content has to be known only if the number of classes is not given. Imports
`_compat`. Rejected: a rule in the recorder, which never sees this operator, only what it does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide._compat import fakes

OneHot = Callable[..., Tensor]
_asks = threading.local()


def one_hot(usual: OneHot) -> OneHot:
    """This function, for fake tensors on the CPU as for real ones."""

    @functools.wraps(usual)
    def call(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if not fakes.is_fake(tensor) or tensor.device.type != "cpu" or not tensor.numel():
            return usual(tensor, num_classes)
        if tensor.dtype != torch.int64 or num_classes == 0 or num_classes < -1:
            return usual(tensor, num_classes)  # refused, as always
        count = _checked(tensor, num_classes, together="aten::aminmax" in _operators(usual))
        zeros = torch.zeros(*tensor.shape, count, dtype=tensor.dtype, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return call


def _checked(tensor: Tensor, num_classes: int, *, together: bool) -> int:
    """Ask for the lowest and the highest class, as torch does; returns how many there are."""
    before = only_checks()
    _asks.only_checks = before or num_classes != -1
    try:
        if together:
            least, most = torch.aminmax(tensor)
            least.item()
        else:
            tensor.min().item()
            most = tensor.max()
        highest = most.item()
    finally:
        _asks.only_checks = before
    return int(highest) + 1 if num_classes == -1 else num_classes


def only_checks() -> bool:
    """Whether what is in a tensor is asked for on this thread in order to refuse some: if nobody
    knows it, any answer that is not refused will do."""
    return getattr(_asks, "only_checks", False)


@functools.cache
def _operators(usual: OneHot) -> frozenset[str]:
    """What it runs on a real tensor, which differs between versions of torch."""
    names: set[str] = set()

    class Names(_compat.Mode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            names.add(_compat.schema_of(func).name)
            return func(*args, **(kwargs or {}))

    def run() -> None:
        with Names():
            usual(torch.zeros(1, dtype=torch.int64), 2)

    thread = threading.Thread(target=run)  # one of its own has no modes
    thread.start()
    thread.join()
    return frozenset(names)
