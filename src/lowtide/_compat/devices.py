"""CUDA, where the process uses it: its streams, and whether it does.

Problem: an operation is replayed on the stream it ran on, and no question may initialise a device
that nobody uses. Invariant: as in `lowtide._compat`, of which this is a part; `cuda_seen` is read
as an attribute of this module, here, in `switches` and in the compiled recorder, and under no other
name: a copy of it would stay what it was. Imports torch. Rejected: `torch.cuda.is_available`, which
says that a device is there and not that it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

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
