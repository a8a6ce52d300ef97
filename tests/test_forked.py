"""Rule 14: a process that is forked while a recording is open leaves it, and leaves only that.

The children run forwards of a few numbers only, which need no threads: those do not survive a fork.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


class _Seen:
    """What sees an operation in the child: names of hooks and modes."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self.names: list[str] = []
        self.x = torch.ones(64, requires_grad=True)

    def hooks(self, name: str) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            self.names.append(name)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def mode(self, name: str) -> TorchDispatchMode:
        seen = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.names.append(name)
                return func(*args, **(kwargs or {}))

        return Mode()

    def check(self, *expected: str) -> None:
        if os.getpid() == self.parent:
            return
        self.names.clear()
        self.x.sin()
        assert tuple(self.names) == expected

    def fork(self) -> None:
        """Go on in a child; here, wait for it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there are other threads
            child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def run(self, step: Callable[[_Seen], None]) -> None:
        """Run a step that forks; the child ends with it."""
        failed = True
        try:
            step(self)
            failed = False
        finally:
            if os.getpid() != self.parent:
                traceback.print_exc()
                os._exit(int(failed))


def _among_others(seen: _Seen) -> None:
    with seen.hooks("hooks below"), lowtide.budget("1 MB"):
        seen.x.exp()
        with seen.hooks("hooks above"), seen.mode("mode above"):
            seen.fork()
            seen.check("hooks above", "mode above")
        seen.check("hooks below")
    seen.check()


def _between_regions(seen: _Seen) -> None:
    def inside(x: Tensor) -> Tensor:
        seen.fork()
        seen.check("hooks between")
        return x.exp().sin()

    with lowtide.budget("1 MB"):
        with seen.hooks("hooks between"):
            lowtide.checkpoint(inside, seen.x)
            seen.check("hooks between")
        seen.check()
    seen.check()


@pytest.mark.parametrize("step", [_among_others, _between_regions])
def test_a_forked_process_leaves_hooks_and_modes_of_others(step: Callable[[_Seen], None]) -> None:
    _Seen().run(step)
