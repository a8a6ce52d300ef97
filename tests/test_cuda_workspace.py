"""What an H100 was seen to allocate inside kernels, compared with the model that knows no device.

The figures are requested bytes from the allocator's counters (torch 2.11, cuDNN 9.19, 2026-11-26),
of operators as they ran in forwards and backwards. A convolution may take less than the model says,
as cuDNN's choice of an algorithm is not modelled; those here took what the model says.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.kernels.workspace import kernel_workspace
from once import on_one_recorder

pytestmark = on_one_recorder

MIB = 1 << 20
HALF, FULL, LONG = torch.bfloat16, torch.float32, torch.int64
ALL = [True, True, False]


def of(*shape: int, dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
    """A tensor without memory."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)] if last else None
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made if form is None else made.contiguous(memory_format=form)


def spread(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """The gradient of a sum: one number, expanded."""
    return torch.empty((), dtype=dtype, device="meta").expand(shape)


def predicted(name: str, tensors: list[Tensor], args: tuple[Any, ...], made: float = 0) -> float:
    return kernel_workspace(f"aten::{name}", tensors, args, int(made * MIB), "cuda") / MIB


KERNELS: list[tuple[str, list[Tensor], tuple[Any, ...], float, float]] = [
    # name, tensors, arguments after the first, MiB made, MiB measured
    ("sum", [of(16384, 2304)], ([0], True), 0, 132.75),
    ("sum", [of(16384, 3072)], ([0], True), 0, 132),
    ("sum", [of(16384, 768)], ([0], True), 0, 96),
    ("sum", [of(25216, 768)], ([0], True), 0, 132),
    ("sum", [of(4096, 4096)], ([1],), 0, 0),
    ("mean", [of(8, 1024, 4096, dtype=FULL)], ([1],), 0, 144),
    ("mean", [of(100000, 64, dtype=FULL)], ([0],), 0, 12.22),
    ("mean", [of(64, 64, 56, 56, dtype=FULL)], ([0, 2, 3],), 0, 0),
    ("var", [of(8, 1024, 4096, dtype=FULL)], ([1],), 0, 576),
    ("var", [of(16384, 2304, dtype=FULL)], (False,), 0, 0),
    ("amax", [of(8, 1024, 4096)], ([1],), 0, 72),
    ("linalg_vector_norm", [of(8, 1024, 4096)], (2, [1]), 0, 144),
    ("logsumexp", [of(8, 1024, 4096, dtype=FULL)], ([1],), 0, 272.13),
    ("native_dropout", [of(16, 1024, 768)], (0.1, True), 36, 0),
    ("native_dropout_backward", [of(16, 1024, 768), of(16, 1024, 768)], (1.1,), 24, 0),
    ("nll_loss_forward", [of(8192, 10000, dtype=FULL), of(8192, dtype=LONG)], (None, 1), 0, 0),
    ("_softmax_backward_data", [of(4096, 4096), of(4096, 4096)], (-1, HALF), 32, 32),
    ("_safe_softmax", [of(8, 12, 2048, 1024, dtype=FULL)], (-1,), 768, 192.19),
    (
        "embedding_dense_backward",
        [of(16, 1024, 768), of(16, 1024, dtype=LONG)],
        (None, 50257, -1, False),
        73.62,
        53.56,
    ),
    (
        "index_put",
        [of(100000, 64), of(200000, dtype=LONG), of(200000, 64)],
        (None, None, True),
        12.21,
        9.2,
    ),
    ("index", [of(2048, 4096), of(2048, 4096, dtype=torch.bool)], (), 8, 64),
    (
        "_scaled_dot_product_cudnn_attention_backward",
        [*[of(16, 12, 1024, 64)] * 5, of(16, 12, 1024, 1, dtype=FULL)],
        (),
        72,
        48.75,
    ),
    (
        "_scaled_dot_product_efficient_attention_backward",
        [spread(8, 12, 512, 64), *[of(8, 12, 512, 64)] * 4],
        (),
        18,
        18.19,
    ),
    ("_scaled_dot_product_cudnn_attention", [of(16, 12, 1024, 64)] * 3, (), 24.75, 0),
    ("upsample_nearest3d", [of(2, 32, 96, 96, 96, last=True)], (), 864, 972),
    ("upsample_nearest2d", [of(256, 512, 7, 7)], ([14, 14],), 49, 0),
    (
        "max_pool2d_with_indices_backward",
        [of(64, 64, 28, 28), of(64, 64, 56, 56, last=True)],
        (),
        24.5,
        6.12,
    ),
    ("bmm", [spread(128, 197, 197, dtype=FULL), of(128, 197, 256, dtype=FULL)], (), 24.62, 18.95),
]


@pytest.mark.parametrize(("name", "tensors", "more", "made", "measured"), KERNELS)
def test_what_kernels_took(
    name: str, tensors: list[Tensor], more: tuple[Any, ...], made: float, measured: float
) -> None:
    found = predicted(name, tensors, (tensors[0], *more), made)
    assert found == pytest.approx(measured, rel=0.01, abs=0.1)


def convolution(
    x: Tensor, w: Tensor, y: Tensor, stride: int = 1, padding: int = 0, *, transposed: bool = False
) -> tuple[float, float]:
    """MiB predicted in forward, and in the backward of both arguments."""
    n = x.dim() - 2
    options = ([stride] * n, [padding] * n, [1] * n, transposed, [0] * n, 1)
    size = y.numel() * y.element_size() / MIB
    return (
        predicted("convolution", [x, w], (x, w, None, *options), size),
        predicted("convolution_backward", [y, x, w], (y, x, w, None, *options, ALL), size),
    )


def test_what_convolutions_took() -> None:
    """Three channels are padded to eight; what is not channels-last is copied; nothing else is."""
    resnet = of(256, 3, 224, 224, last=True), of(64, 3, 7, 7, last=True)
    assert convolution(*resnet, of(256, 64, 112, 112, last=True), 2, 3)[0] == pytest.approx(
        196.05, abs=0.1
    )
    dense = of(64, 128, 56, 56), of(32, 128, 3, 3), of(64, 32, 56, 56)
    assert convolution(*dense, 1, 1)[0] == pytest.approx(61.32, abs=0.1)
    patches = of(128, 3, 224, 224), of(768, 3, 16, 16), of(128, 768, 14, 14)
    assert convolution(*patches, 16)[0] == pytest.approx(137.75, abs=2.5)
    up = of(4, 64, 64, 64, 64, dtype=FULL), of(64, 16, 3, 3, 3, dtype=FULL)
    big = of(4, 16, 128, 128, 128, dtype=FULL)
    assert convolution(*up, big, 2, 1, transposed=True)[0] == pytest.approx(768.1, abs=0.2)
    pointwise = of(256, 64, 56, 56, last=True), of(256, 64, 1, 1), of(256, 256, 56, 56, last=True)
    assert convolution(*pointwise)[0] == 0
    plain = of(256, 64, 56, 56, last=True), of(64, 64, 3, 3, last=True)
    assert convolution(*plain, plain[0], 1, 1)[0] == pytest.approx(0, abs=0.1)


def test_pointwise_convolutions_are_products_only_where_that_is_possible() -> None:
    """As an H200 took them (2026-11-27): in rows of a multiple of 8, and with a stride of 1."""
    for count, measured in ((256, 148.0), (128, 74.0)):
        sizes = of(count, 1024, 14, 14), of(512, 1024, 1, 1), of(count, 512, 14, 14)
        assert convolution(*sizes)[0] == pytest.approx(measured, abs=0.6)
    assert convolution(of(256, 256, 56, 56), of(64, 256, 1, 1), of(256, 64, 56, 56))[0] == 0
    shortcut = of(256, 256, 56, 56), of(512, 256, 1, 1), of(256, 512, 28, 28)
    measured = 984.2 - 392.25  # the gradients are among it
    assert measured <= convolution(*shortcut, 2)[1] <= measured + 18


def test_the_gradient_of_a_parameter_is_added_up_from_parts() -> None:
    """Of the parameter of a pointwise convolution, 129 parts in float32 were seen; of large ones no
    more than 16 MiB."""
    for width, out, side, measured in ((64, 256, 56, 8.06), (512, 2048, 7, 12.0)):
        x, y = of(256, width, side, side, last=True), of(256, out, side, side, last=True)
        found = convolution(x, of(out, width, 1, 1), y)[1]
        assert measured <= found <= math.ceil(measured) + 16
