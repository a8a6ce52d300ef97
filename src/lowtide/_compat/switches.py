"""Global state that operators read without getting it as an argument.

Problem: a replay has to run under the global switches of the original (rule 5), and torch has no
call that returns them all. Invariant: as in `lowtide._compat`, of which this is a part. Imports
devices. Rejected: saving only the switches that a program changed, which nothing tells us.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide._compat import devices

_C = torch._C

# The (backend, operation) pairs for which torch has a precision of float32 kernels.
_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
_SMALLEST_NORMAL = sys.float_info.min
_precision_of = _C._get_fp32_precision_getter

lock = threading.RLock()
"""Held while a replay has changed a switch of the whole process: one of `ambient`, or the default
dtype. A replay on another thread would take what it finds for the program's and leave it behind."""


@contextlib.contextmanager
def without_anomalies() -> Iterator[None]:
    """Anomaly detection off for backwards on tensors without memory. It belongs to the process, and
    asks whether a gradient has NaNs, which such a gradient cannot say: the backward fails, and a
    warning blames an operator of the program."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with torch.autograd.set_detect_anomaly(False):
        yield


def ambient() -> tuple[Any, ...]:
    """Global switches that choose kernels and precision, as one comparable value (rule 5)."""
    return (
        _C._get_mkldnn_enabled(),
        _C._get_nnpack_enabled(),
        _C._get_deterministic_algorithms(),
        _or_none(_C._get_float32_matmul_precision),
        tuple([_precision_of(*pair) for pair in _PRECISIONS]),
        _cuda_switches() if devices.accelerator_seen else None,
    )


def flushes_denormals() -> bool:
    """Whether this thread treats denormal numbers as zero; torch can set that but not tell."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def _or_none(get: Callable[[], Any]) -> Any:
    """Read an older switch; torch raises if a newer one has a value that it cannot express."""
    try:
        return get()
    except RuntimeError:
        return None


def _cuda_switches() -> tuple[Any, ...]:
    return (
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        _or_none(_C._get_cudnn_allow_tf32),
    )


def tries_kernels_out() -> bool:
    """Whether a convolution on CUDA takes the kernel that is the fastest on the current thread."""
    return bool(_C._get_cudnn_benchmark() and _C._get_cudnn_enabled())


def may_run_cudnn(tensor: Any) -> bool:
    """Whether `tensor` is on a device that cuDNN, or something like it, may compute on."""
    kinds = ("cuda", _C._get_privateuse1_backend_name())
    return isinstance(tensor, torch.Tensor) and tensor.device.type in kinds


@contextlib.contextmanager
def restored_ambient(state: tuple[Any, ...]) -> Iterator[None]:
    """Run with the switches of `state`, then restore them."""
    now = ambient()
    _set_ambient(state, now)
    try:
        yield
    finally:
        _set_ambient(now, state)


def _set_ambient(state: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    setters: tuple[Callable[[Any], object], ...] = (
        _C._set_mkldnn_enabled,
        _C._set_nnpack_enabled,
        lambda on: _C._set_deterministic_algorithms(
            on, warn_only=_C._get_deterministic_algorithms_warn_only()
        ),
        torch.set_float32_matmul_precision,
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
    for pair, value in zip(_PRECISIONS, state[4], strict=True):  # the older ones set these as well
        if _precision_of(*pair) != value:
            _C._set_fp32_precision_setter(*pair, value)
