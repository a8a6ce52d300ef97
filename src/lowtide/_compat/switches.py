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
# Switches with a getter and a setter of these names, and those that only CUDA's kernels consult.
_ANYWHERE = (
    "mkldnn_enabled",
    "mkldnn_deterministic",
    "nnpack_enabled",
    "cpu_allow_fp16_reduced_precision_reduction",
    "deterministic_fill_uninitialized_memory",
)
_ON_CUDA = (
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "blas_preferred_backend",
    "linalg_preferred_backend",
    "miopen_immediate",
    "rocm_fa_preferred_backend",
    *(["cudnn_depthwise_kernel"] if hasattr(_C, "_get_cudnn_depthwise_kernel") else []),  # 2.13
)


def _getters(names: tuple[str, ...]) -> list[Callable[[], Any]]:
    return [getattr(_C, f"_get_{name}") for name in names]


_get_anywhere, _get_on_cuda = _getters(_ANYWHERE), _getters(_ON_CUDA)
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
        tuple([get() for get in _get_anywhere]),
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
    return (*[get() for get in _get_on_cuda], _or_none(_C._get_cudnn_allow_tf32))


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
    anywhere, deterministic, products, precisions, on_cuda = state
    _set_all(_ANYWHERE, anywhere, now[0])
    if deterministic != now[1]:
        _C._set_deterministic_algorithms(
            deterministic, warn_only=_C._get_deterministic_algorithms_warn_only()
        )
    if on_cuda is not None:
        _set_all(_ON_CUDA, on_cuda[:-1], (now[4] or _cuda_switches())[:-1])
    # The older switches set the newer ones of products and convolutions, which are otherwise taken
    # from the one for all: they are left alone where that one says enough.
    _set_precisions(precisions)
    if products not in (_or_none(_C._get_float32_matmul_precision), None):
        torch.set_float32_matmul_precision(products)
    if on_cuda is not None and on_cuda[-1] not in (_or_none(_C._get_cudnn_allow_tf32), None):
        _C._set_cudnn_allow_tf32(on_cuda[-1])
    _set_precisions(precisions)


def _set_precisions(values: tuple[str, ...]) -> None:
    for pair, value in zip(_PRECISIONS, values, strict=True):
        if _precision_of(*pair) != value:
            _C._set_fp32_precision_setter(*pair, value)


def _set_all(names: tuple[str, ...], state: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    for name, value, old in zip(names, state, now, strict=True):
        if value != old and value is not None:
            parts = value if isinstance(value, tuple) else (value,)
            getattr(_C, f"_set_{name}")(*parts)
